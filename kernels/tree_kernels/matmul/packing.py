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
    """Allocate uninitialised memory, in large pages if the system has them.

    A step of few rows reads all weights once, and with small pages a twentieth of its time goes to finding them. numpy
    asks for large pages; torch does not.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)


def pack(weight: Tensor, panel: int) -> Tensor:
    """A weight [outputs, inputs] as panels [panels, inputs, panel] of its dtype, the last panel padded with zeros.

    bfloat16: inputs 2k and 2k + 1 are one row of words, one for each output, with input 2k in the upper half: a mask
    and a shift widen them, and a dot product of pairs adds the upper half first. The last of an odd number of inputs is
    a row of its own.
    """
    outputs, inputs = weight.shape
    panels = -(-outputs // panel)
    padded = F.pad(weight.detach(), (0, 0, 0, panels * panel - outputs))
    packed = in_large_pages((panels, inputs, panel), weight.dtype)
    if weight.dtype == torch.bfloat16:
        laid, given = packed.view(panels, -1), padded.view(panels, panel, inputs).transpose(1, 2)
        paired = inputs // 2 * 2
        pairs = given[:, :paired].unflatten(1, (-1, 2)).flip(2).transpose(2, 3)  # [panels, pairs, panel, 2]
        laid[:, : paired * panel].view(pairs.shape).copy_(pairs)
        laid[:, paired * panel :].view(panels, -1, panel).copy_(given[:, paired:])
    else:
        packed.copy_(padded.view(panels, panel, inputs).transpose(1, 2))
    return packed
