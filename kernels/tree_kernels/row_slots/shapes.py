"""What the forms of the computation share: their arguments, their result, and the words of the kernel's call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

ROWS, TEXTS, BLOCK, UNIT, PAGED, SCRATCH, ALL, NUMBERS, MADE = range(9)
"""Words of a call: numbers of rows and texts, tokens of a block, those of a page or ring, 1 for homes in pages, the
first scratch slot, 1 if every row has one, addresses of the rows' numbers and of the result's. TEXT_WORDS words of each
text follow, then the table."""
CALL_WORDS = 9
LOWEST, END, CERTAIN, ZERO, OFFSET = range(5)
"""A text's words: the first position of its line, the one after the last, the greatest of a row that is no guess, the
line's place of position 0, and the table's entry of page 0, or of its ring."""
TEXT_WORDS = 5
TEXT, TOKEN, POSITION, ABOVE = range(4)
"""Numbers of a row, each of all rows after one another."""


class StepRows(NamedTuple):
    """The rows of a step's texts, text after text."""

    numbers: array[int]  # [4, rows]: number of the text, token, position, row of a guess's parent (-1: no guess)
    lowest: Sequence[int]  # [texts] a position at or before the first column of each row of the text
    most: Sequence[int]  # [texts] greatest position of a row
    certain: Sequence[int]  # [texts] greatest position of a row that is no guess

    @property
    def rows(self) -> int:
        return len(self.numbers) // 4


class Homes(NamedTuple):
    """Where texts store what belongs to a committed position p.

    In pages: `table[offsets[text] + p // unit] * unit + p % unit`; in rings: `table[offsets[text]] + p % unit`.
    """

    table: Sequence[int]
    offsets: Sequence[int]  # [texts]
    unit: int
    paged: bool


class PathSlots(NamedTuple):
    """Slots of a step's rows."""

    homes: Ints  # [rows] slot of the row's position in its text
    own: Ints  # [rows] slot that the row writes: a scratch slot, or its home
    columns: Ints  # [rows, 2 * block] slots at the positions from `first_seen` on; 0 for those not on the row's path
    line: Ints  # slots of each text's positions, text after text
    zero: Sequence[int]  # [texts] place of each text's position 0 in the line

    def between(self, text: int, begin: int, end: int) -> Ints:
        """The slots of a text's positions [begin, end), from its `lowest` on."""
        return self.line[self.zero[text] + begin : self.zero[text] + end]


def first_seen(position: int, block: int) -> int:
    """Position of the first of the 2 * block columns of a row at this position; below 0 in the first block.

    >>> [first_seen(position, block=16) for position in (5, 16, 40)]
    [-16, 0, 16]
    """
    return block * (position // block - 1)


def lines(rows: StepRows, block: int) -> tuple[list[int], list[int]]:
    """The end of each text's line, a position, and the line's place of its position 0."""
    ends, zero, place = list[int](), list[int](), 0
    for lowest, most in zip(rows.lowest, rows.most, strict=True):
        ends.append(block * (most // block + 1))
        zero.append(place - lowest)
        place += ends[-1] - lowest
    return ends, zero
