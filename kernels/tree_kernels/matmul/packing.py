"""The layout of a packed weight."""

from __future__ import annotations

import math
import threading

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

LINE = 64
"""Bytes of a cache line."""
ALONE = 4 << 20
"""Bytes from which on numpy asks the system for large pages."""
CHUNK = 32 << 20
"""Bytes of a chunk, which smaller weights share."""


class _Chunks:
    """Memory that weights of one dtype share, in chunks: a chunk is freed with the last weight in it. Quantised weights
    are bytes, so that a model's can be freed while the unpacked ones stay, and the other way round."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[torch.dtype, tuple[npt.NDArray[np.uint8], int]] = {}  # the last chunk, and where it is free

    def bytes_for(self, size: int, dtype: torch.dtype) -> npt.NDArray[np.uint8]:
        """`size` bytes, at most ALONE."""
        with self._lock:
            memory, begin = self._open.get(dtype, (None, 0))
            if memory is None or begin + size > CHUNK:
                memory, begin = _bytes(CHUNK), 0
            self._open[dtype] = memory, -(-(begin + size) // LINE) * LINE
            return memory[begin : begin + size]


_chunks = _Chunks()


def _bytes(size: int) -> npt.NDArray[np.uint8]:
    """Uninitialised memory that begins at a cache line."""
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size]


def in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate uninitialised memory, in large pages if the system has them.

    A step of few rows reads all weights once, and with small pages a twentieth of its time goes to finding them. numpy
    asks for large pages, of large arrays only; torch does not.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = _chunks.bytes_for(size, dtype) if size < ALONE else _bytes(size)
    return torch.from_numpy(memory).view(dtype).view(shape)


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
