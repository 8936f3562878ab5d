"""What the compiled loops and their caller agree on: the layout of a program in memory, an array of int64.

A program is its number of operations and their records. An operation is a kernel of (call, thread) that takes units
from a counter in its call until none is left, so that any number of threads may run it at once.
"""

from __future__ import annotations

from enum import IntEnum

LENGTH = 0
"""Place of the number of operations; the records begin at RECORDS."""
RECORDS = 8


class Operation(IntEnum):
    """Places of the numbers in an operation's record. The last two are written while the program runs."""

    KERNEL = 0  # the kernel's address
    CALL = 1  # the address of its arguments
    NEXT = 2  # the address of its counter of units
    NEEDS = 3  # number of operations, from the program's first on, that are complete before this one begins
    ENTERED = 4  # threads that began it
    LEFT = 5  # threads that found no unit left
    SIZE = 8  # a cache line
