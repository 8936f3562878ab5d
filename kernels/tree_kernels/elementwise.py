"""Functions of single numbers, applied so that a number's bits do not depend on where it lies in its buffer.

ATen's loops on a CPU take two vector registers at a time and leave the rest of a buffer, its tail, to a scalar loop
that may round otherwise. Seen in torch 2.13, where buffers of 1 to 299 numbers were compared with longer ones:

| ATEN_CPU_CAPABILITY | float32 | bfloat16 |
|---|---|---|
| default | gelu, pow | none |
| avx2 | sigmoid, silu, softplus, gelu, exp2, pow, elu, mish | gelu (tanh), rsqrt, add with alpha |

exp, tanh, erf, log, sin, cos, sqrt, division, products and float32 rsqrt were the same everywhere. No function
differed in a buffer whose length is a multiple of `VECTOR_BYTES`.

Threads share a buffer of more than `GRAIN` numbers in equal parts, which end anywhere: with three threads, tails in the
middle of a buffer differed (silu, sigmoid, exp2, softplus, gelu). A strided input, such as one half of a gated
layer's output, has a tail in every row, and float32 gelu has another formula for it altogether.

So a call on rows is safe where the buffer is contiguous, its length is a multiple of VECTOR_BYTES, and so is each
thread's part (`is_safe`). `elementwise` makes it so elsewhere. `is_narrow` says for which widths a step's rows leave a
tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

VECTOR_BYTES = 128
"""Two registers of AVX-512: what the widest of ATen's loops takes at a time."""
GRAIN = 32768
"""Numbers from which ATen shares a loop among threads (at::internal::GRAIN_SIZE)."""
ROW_MULTIPLE = 8
"""A step's rows are padded to a multiple of this."""


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """torch's operations run in so many threads inside, and in the caller's number after."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_safe(count: int, itemsize: int, threads: int) -> bool:
    """Whether loops of so many threads over so many contiguous numbers leave no tail."""
    parts = max(1, min(threads, -(-count // GRAIN)))
    return count * itemsize % VECTOR_BYTES == 0 and -(-count // parts) * itemsize % VECTOR_BYTES == 0


def is_narrow(width: int) -> bool:
    """Whether rows of this width may leave a tail although their number is a multiple of ROW_MULTIPLE: as numbers of
    two bytes, and so, perhaps, as longer ones."""
    return ROW_MULTIPLE * width * 2 % VECTOR_BYTES != 0


def elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, applied to contiguous numbers of which none is in a tail.

    function(x, ...) gives a number for each of x and keeps its shape. On an accelerator it is called as it is.
    """

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.device.type != "cpu":
            return function(x, *args, **kwargs)
        x = x.contiguous()
        count, itemsize, threads = x.numel(), x.element_size(), torch.get_num_threads()
        if is_safe(count, itemsize, threads):
            return function(x, *args, **kwargs)
        flat = F.pad(x.view(-1), (0, -count % (VECTOR_BYTES // itemsize)))
        with threads_of(threads if is_safe(len(flat), itemsize, threads) else 1):
            return function(flat, *args, **kwargs)[:count].view(x.shape)

    return run


def elementwise_(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function that writes into its tensor. x, and each of its parts that lie apart in memory, ends with a
    dimension that is a multiple of VECTOR_BYTES."""
    if x.device.type != "cpu":
        return function(x)
    assert x.shape[-1] * x.element_size() % VECTOR_BYTES == 0, f"{tuple(x.shape)} leaves a tail"
    threads = torch.get_num_threads()
    with threads_of(threads if is_safe(x.numel(), x.element_size(), threads) else 1):
        return function(x)
