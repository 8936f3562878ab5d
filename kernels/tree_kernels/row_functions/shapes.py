"""What the compiled functions and their caller agree on: layouts of calls in memory, arrays of int64.

Arrays are given by their addresses. Threads take units from a counter.
"""

from __future__ import annotations

from enum import IntEnum

SUMS = 8
"""Partial sums of squares of a row: number i is added to sum i mod SUMS."""
UNIT = 2048
"""Numbers of a unit of gates, or of numbers to widen. A unit of norms is a row."""


def norm_scratch(width: int) -> int:
    """float32 numbers of scratch memory that a thread needs for norms of this width."""
    return SUMS + width


class NormArgument(IntEnum):
    """Places of the arguments of norms."""

    X = 0  # [ROWS, WIDTH] of KIND
    WEIGHT = 1  # [WIDTH] of KIND
    TARGET = 2  # [ROWS, WIDTH] of TARGET_KIND
    ROWS = 3
    WIDTH = 4
    KIND = 5  # a `Precision`, to which results are rounded
    TARGET_KIND = 6  # KIND, F32 or PAIRS: the rounded numbers, as products take them
    EPSILON = 7  # the bits of a float32
    SCRATCH = 8  # [threads, norm_scratch(WIDTH)] float32
    NEXT = 9  # the next unit that no thread has taken


class GateArgument(IntEnum):
    """Places of the arguments of gates."""

    GATE = 0  # [COUNT] of KIND
    UP = 1  # [COUNT] of KIND
    TARGET = 2  # [COUNT] of TARGET_KIND
    COUNT = 3
    KIND = 4  # a `Precision`, to which results are rounded
    TARGET_KIND = 5  # a `Precision`
    SCRATCH = 6  # [threads, UNIT] float32
    NEXT = 7


class WidenArgument(IntEnum):
    """Places of the arguments of widening."""

    SOURCE = 0  # [COUNT] of KIND
    TARGET = 1  # [COUNT] of TARGET_KIND
    COUNT = 2
    KIND = 3
    TARGET_KIND = 4  # F32, or PAIRS where KIND is BF16
    NEXT = 5
