"""Copies chosen rows of tables by a compiled kernel."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache

from torch import Tensor

from tree_kernels.kernel_cache import load_kernels

MODULE = "tree_kernels.taken_rows.loops"


@cache
def take_rows_kernel() -> Callable[[int], None]:
    """The kernel, called with the address of its words. Raises NoKernelsError."""
    return load_kernels(MODULE).locked("take_rows")


def take_rows(indices: Tensor, *tables: tuple[Tensor, Tensor]) -> None:
    """Set target[i] = source[indices[i]] for each table (source [n, width], target [rows, width]).

    indices [rows] int64, below n: they are not checked. All are contiguous and on a CPU; numbers have an even number of
    bytes. Raises NoKernelsError where the kernel cannot be compiled.
    """
    rows = len(indices)
    words = [rows, indices.data_ptr(), len(tables)]
    for source, target in tables:
        width = source.shape[1]
        assert target.shape == (rows, width) and source.dtype == target.dtype
        words += [source.data_ptr(), target.data_ptr(), width * source.element_size() // 2]
    call = array("q", words)
    take_rows_kernel()(call.buffer_info()[0])
