"""Calls the compiled generator of uniform numbers, Philox4x32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from tree_kernels.kernel_cache import NoKernelsError, load_kernels
from tree_kernels.noise import reference, shapes
from tree_kernels.noise.reference import Counters, Uniforms, Wide

MODULE = "tree_kernels.noise.loops"


@cache
def _philox() -> Callable[[int], None] | None:
    """The kernel; None where none can be compiled, which is found out once: each try takes a millisecond or more."""
    try:
        return load_kernels(MODULE).functions["philox"]
    except NoKernelsError:
        return None


def prepare_kernel() -> None:
    """Load the kernel, or compile it, before the first request needs it. Does nothing where none can be compiled."""
    _philox()


def uniforms(counters: Counters, blocks: Wide) -> Uniforms:
    """`reference.uniforms`, by the compiled kernel where there is one; the numbers are the same."""
    philox = _philox()
    if philox is None:
        return reference.uniforms(counters, blocks)
    blocks = np.ascontiguousarray(blocks)
    found = np.empty((len(counters.positions), 4 * len(blocks)))
    words = np.empty(shapes.CALL_WORDS, np.int64)
    words[shapes.BLOCKS], words[shapes.COUNT] = blocks.ctypes.data, len(blocks)
    words[shapes.SAMPLE], words[shapes.TAG] = counters.sample_index, counters.tag
    words[shapes.KEY0], words[shapes.KEY1] = counters.key
    for row, position in zip(found, counters.positions, strict=True):
        words[shapes.POSITION], words[shapes.UNIFORMS] = position, row.ctypes.data
        philox(words.ctypes.data)
    return found
