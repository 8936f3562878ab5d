"""The loops of the rows' slots, for numba. Imported only while they are compiled; `cpu.py` calls the machine code."""

from __future__ import annotations

from numba import njit

from tree_kernels.row_slots import shapes
from tree_kernels.translating import INLINED
from tree_kernels.vectors import longs

inlined = njit(**INLINED)


@inlined
def home(call: int, text: int, position: int) -> int:
    """Slot of a committed position."""
    its = longs(call)
    texts, unit = longs(call + 8 * shapes.CALL_WORDS), its[shapes.UNIT]
    table = longs(call + 8 * (shapes.CALL_WORDS + shapes.TEXT_WORDS * its[shapes.TEXTS]))
    entry = texts[text * shapes.TEXT_WORDS + shapes.OFFSET]
    if its[shapes.PAGED] == 0:
        return table[entry] + position % unit
    return table[entry + position // unit] * unit + position % unit


def row_slots(call: int) -> None:
    """Write homes, own slots, columns and lines, one after the other."""
    its = longs(call)
    rows, block = its[shapes.ROWS], its[shapes.BLOCK]
    texts, numbers = longs(call + 8 * shapes.CALL_WORDS), longs(its[shapes.NUMBERS])
    homes = longs(its[shapes.MADE])
    own = longs(its[shapes.MADE] + 8 * rows)
    columns = longs(its[shapes.MADE] + 8 * 2 * rows)
    line = longs(its[shapes.MADE] + 8 * (2 * rows + 2 * block * rows))

    for text in range(its[shapes.TEXTS]):
        words = text * shapes.TEXT_WORDS
        zero, certain = texts[words + shapes.ZERO], texts[words + shapes.CERTAIN]
        for position in range(texts[words + shapes.LOWEST], texts[words + shapes.END]):
            held = position >= 0 and position <= certain
            line[zero + position] = home(call, text, position) if held else 0

    scratch = its[shapes.SCRATCH]
    for row in range(rows):
        text, position = numbers[shapes.TEXT * rows + row], numbers[shapes.POSITION * rows + row]
        certain_row = numbers[shapes.ABOVE * rows + row] < 0
        homes[row] = own[row] = home(call, text, position)
        if its[shapes.ALL] == 1 or not certain_row:
            own[row] = scratch
            scratch += 1
        if certain_row:
            line[texts[text * shapes.TEXT_WORDS + shapes.ZERO] + position] = own[row]

    for row in range(rows):
        text, position = numbers[shapes.TEXT * rows + row], numbers[shapes.POSITION * rows + row]
        words, first = text * shapes.TEXT_WORDS, block * (position // block - 1)
        zero, seen = texts[words + shapes.ZERO], position
        if numbers[shapes.ABOVE * rows + row] >= 0:
            seen = texts[words + shapes.CERTAIN]
        start = row * 2 * block
        for column in range(2 * block):
            columns[start + column] = line[zero + first + column] if first + column <= seen else 0
        up = row
        while numbers[shapes.ABOVE * rows + up] >= 0:
            column = numbers[shapes.POSITION * rows + up] - first
            if column >= 0:
                columns[start + column] = own[up]
            up = numbers[shapes.ABOVE * rows + up]


KERNELS = {"row_slots": (row_slots, "i")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
