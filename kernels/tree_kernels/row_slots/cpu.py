"""Calls the compiled computation of rows' slots."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache

import numpy as np

from tree_kernels.kernel_cache import NoKernelsError, load_kernels
from tree_kernels.row_slots import reference
from tree_kernels.row_slots.shapes import Homes, PathSlots, StepRows, lines

MODULE = "tree_kernels.row_slots.loops"


@cache
def row_slots_kernel() -> Callable[[int], None] | None:
    """The kernel, called with the address of its words; None where it cannot be compiled."""
    try:
        return load_kernels(MODULE).locked("row_slots")
    except NoKernelsError:
        return None


def path_slots(rows: StepRows, block: int, homes: Homes, scratch: int, for_all: bool) -> PathSlots:
    """The slots of a step's rows and of their paths.

    Columns of a row at position p are the 2 * block positions from `first_seen(p, block)` on. A row that is no guess
    sees those up to its own; a guess sees those up to the text's last row that is none, and the guesses on its path.

    block: at least the depth of the deepest tree   scratch: the first slot for guesses, or `for_all` rows, in order
    """
    kernel = row_slots_kernel()
    if kernel is None:
        return reference.path_slots(rows, block, homes, scratch, for_all)
    count, texts = rows.rows, len(rows.lowest)
    ends, zero = lines(rows, block)
    width = 2 * block
    made = np.empty(count * (2 + width) + ends[-1] + zero[-1], np.int64)
    words = [count, texts, block, homes.unit, homes.paged, scratch, for_all]
    words += [rows.numbers.buffer_info()[0], made.ctypes.data]
    for each in zip(rows.lowest, ends, rows.certain, zero, homes.offsets, strict=True):
        words += each
    call = array("q", words + list(homes.table))
    kernel(call.buffer_info()[0])
    line = count * (2 + width)
    return PathSlots(
        made[:count], made[count : 2 * count], made[2 * count : line].reshape(count, width), made[line:], zero
    )
