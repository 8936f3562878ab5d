"""The layout of a packed weight."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LINE = 64
"""Bytes of a cache line."""


def in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory, in the system's large pages where it has them.

    A step of few rows reads all weights once, and with small pages a twentieth of its time goes to finding them. numpy
    asks for large pages; torch does not.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def pack(weight: Tensor, panel: int) -> Tensor:
    """A weight [outputs, inputs] as panels [panels, inputs, panel] of its dtype, the last one padded with zeros.

    bfloat16: word i of an input has output i in its lower half and output panel / 2 + i in its upper half, so that a
    shift and a mask widen them.
    """
    outputs, inputs = weight.shape
    panels = -(-outputs // panel)
    padded = F.pad(weight.detach(), (0, 0, 0, panels * panel - outputs))
    packed = in_large_pages((panels, inputs, panel), weight.dtype)
    if weight.dtype == torch.bfloat16:
        packed.view(panels, inputs, panel // 2, 2).copy_(padded.view(panels, 2, panel // 2, inputs).permute(0, 3, 2, 1))
    else:
        packed.copy_(padded.view(panels, panel, inputs).transpose(1, 2))
    return packed
