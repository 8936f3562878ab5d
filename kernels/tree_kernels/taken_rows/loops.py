"""The loops that copy rows, for numba. Imported only while they are compiled; `cpu.py` calls the machine code."""

from __future__ import annotations

from tree_kernels.taken_rows import shapes
from tree_kernels.vectors import halves, longs


def take_rows(call: int) -> None:
    """Copy the rows of each table that the indices name."""
    its = longs(call)
    indices = longs(its[shapes.INDICES])
    for table in range(its[shapes.TABLES]):
        words = shapes.CALL_WORDS + shapes.TABLE_WORDS * table
        width = its[words + shapes.HALVES]
        for row in range(its[shapes.ROWS]):
            source = halves(its[words + shapes.SOURCE] + 2 * width * indices[row])
            target = halves(its[words + shapes.TARGET] + 2 * width * row)
            for i in range(width):
                target[i] = source[i]


KERNELS = {"take_rows": (take_rows, "i")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
