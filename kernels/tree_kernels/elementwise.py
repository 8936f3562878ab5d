"""Elementwise functions whose result for a number does not depend on its place in the buffer.

On a CPU, ATen's loops process two vector registers at a time. The last numbers of a buffer, its tail, go through a
scalar loop that may round differently. Measured with torch 2.13, by comparing buffers of 1 to 299 numbers with longer
ones, these functions differ in the tail:

| ATEN_CPU_CAPABILITY | float32 | bfloat16 |
|---|---|---|
| default | gelu, pow | none |
| avx2 | sigmoid, silu, softplus, gelu, exp2, pow, elu, mish | gelu (tanh), rsqrt, add with alpha |

exp, tanh, erf, log, sin, cos, sqrt, division, products and float32 rsqrt did not differ. No function differed in a
buffer whose length is a multiple of `VECTOR_BYTES`.

Threads split a buffer of more than `GRAIN` numbers into equal parts, each with its own tail: with three threads,
numbers in the middle of a buffer differed (silu, sigmoid, exp2, softplus, gelu). A strided input, such as one half of a
gated layer's output, has a tail in every row, and float32 gelu computes it by another formula.

So a call is safe if the buffer is contiguous and its length and the length of each thread's part are multiples of
VECTOR_BYTES (`is_safe`). `elementwise` copies and pads other buffers. `is_narrow` is true for widths of a step's rows
that leave a tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels import ROW_MULTIPLE

VECTOR_BYTES = 128
"""Two AVX-512 registers: the most that an iteration of ATen's loops processes."""
GRAIN = 32768
"""Most numbers of a loop that ATen does not split among threads (at::internal::GRAIN_SIZE)."""


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    """Runs torch's operations in `count` threads inside the context; restores the number on exit."""
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
    """True if a loop of `threads` threads over `count` contiguous numbers leaves no tail."""
    parts = max(1, min(threads, -(-count // GRAIN)))
    return count * itemsize % VECTOR_BYTES == 0 and -(-count // parts) * itemsize % VECTOR_BYTES == 0


def leaves_tail(width: int) -> bool:
    """True if a single row of this width may leave a tail. Assumes numbers of two bytes."""
    return width * 2 % VECTOR_BYTES != 0


def is_narrow(width: int) -> bool:
    """True if ROW_MULTIPLE rows of this width may leave a tail. Assumes numbers of two bytes; a width that is safe for
    these is safe for longer ones."""
    return ROW_MULTIPLE * width * 2 % VECTOR_BYTES != 0


def elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, with its input padded on a CPU so that no number is in a tail. Unchanged on an accelerator.

    function(x, ...) must be elementwise in x and take no other tensors.
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
    """Apply an elementwise function that writes into x, whose last dimension is contiguous and a multiple of
    VECTOR_BYTES."""
    if x.device.type != "cpu":
        return function(x)
    assert x.shape[-1] * x.element_size() % VECTOR_BYTES == 0, f"{tuple(x.shape)} leaves a tail"
    threads = torch.get_num_threads()
    with threads_of(threads if is_safe(x.numel(), x.element_size(), threads) else 1):
        return function(x)
