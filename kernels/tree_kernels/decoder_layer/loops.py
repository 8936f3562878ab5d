"""The loop over a program's operations, for numba. Imported only while it is compiled."""

from __future__ import annotations

from numba import njit

from tree_kernels.decoder_layer.shapes import LENGTH, RECORDS, Operation
from tree_kernels.matmul.loops import share, wait_a_little
from tree_kernels.translating import INLINED
from tree_kernels.vectors import call_kernel, fetch_add, longs

_called = njit(**INLINED)
KERNEL, CALL, NEXT, NEEDS = (
    int(place) for place in (Operation.KERNEL, Operation.CALL, Operation.NEXT, Operation.NEEDS)
)
ENTERED, LEFT, RECORD_BYTES = 8 * Operation.ENTERED, 8 * Operation.LEFT, 8 * Operation.SIZE


@_called
def await_others(record: int) -> None:
    """Returns when an operation that this thread has left is complete.

    A thread leaves when no unit is left, so threads that begin later get none, and those that began earlier may hold
    the last ones. LEFT is read first: if it equals what ENTERED is afterwards, every thread that held one has left.
    """
    looks = 0
    while fetch_add(record + LEFT, 0) != fetch_add(record + ENTERED, 0):
        looks += 1
        wait_a_little(looks)


def operations(program: int, thread: int) -> None:
    """Runs all operations in order, in each of the threads that call it."""
    count, records = longs(program)[LENGTH], program + RECORDS * 8
    complete = 0
    for number in range(count):
        record = records + number * RECORD_BYTES
        own = longs(record)
        while complete < own[NEEDS]:
            await_others(records + complete * RECORD_BYTES)
            complete += 1
        fetch_add(record + ENTERED, 1)
        call_kernel(own[KERNEL], own[CALL], thread)
        fetch_add(record + LEFT, 1)


def run(program: int, function: int, helpers: int, count: int) -> None:
    """Runs a program in this thread and in `count` helpers.

    function: the address of `operations`   helpers: of `count` helpers' memory
    """
    records = program + RECORDS * 8
    for number in range(longs(program)[LENGTH]):
        record = records + number * RECORD_BYTES
        own = longs(record)
        longs(own[NEXT])[0] = 0
        longs(record + ENTERED)[0] = longs(record + LEFT)[0] = 0
    share(program, function, helpers, count)


KERNELS = {"run": (run, "iiii"), "operations": (operations, "ii")}
