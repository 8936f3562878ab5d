"""The paths of a step's rows: for each row, the slots of what the positions before it store. Computed for all texts of
a step at once: a few calls of NumPy for each text would take as long as several layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from dendro.tree import DraftTree

Ints = npt.NDArray[np.int64]


def first_seen(positions: Ints, block: int) -> Ints:
    """Position of the first of the 2 * block columns of rows at these positions; below 0 in the first block.

    >>> first_seen(np.array([5, 16, 40]), block=16).tolist()
    [-16, 0, 16]
    """
    return block * (positions // block - 1)


class TextPart(NamedTuple):
    """One text's rows of a step: committed ones, then those of a tree whose root is the text's last token."""

    ids: Sequence[int]
    committed: Ints  # positions, each at most once
    tree: DraftTree | None


@dataclass(frozen=True, slots=True, eq=False)
class RowPaths:
    """The rows of several texts, text after text. Each text has at least one."""

    texts: Ints  # [rows] number of each row's text
    tokens: Ints  # [rows]
    positions: Ints  # [rows]
    above: Ints  # [rows] row of a guess's parent; undefined for other rows
    guessed: npt.NDArray[np.bool_]  # [rows] True for guesses
    starts: Ints  # [texts] first row
    least: Ints  # [texts] least position of a row
    most: Ints  # [texts] greatest position of a row
    certain: Ints  # [texts] greatest position of a row that is not a guess

    @classmethod
    def of(cls, parts: Sequence[TextPart]) -> Self:
        pieces: list[tuple[int, Sequence[int] | Ints, int, Ints, Ints]] = []
        for number, (ids, committed, tree) in enumerate(parts):
            if len(committed):
                tokens = [ids[position] for position in committed.tolist()]
                pieces.append((number, tokens, 0, committed, np.full(len(committed), -1)))
            if tree is not None:
                pieces.append((number, tree.tokens, len(ids) - 1, tree.depths, tree.parents))
        numbers, of_tokens, first, after, of_parents = zip(*pieces, strict=True)
        counts = [len(each) for each in after]
        texts, parents = np.repeat(numbers, counts), np.concatenate(of_parents)
        starts = np.flatnonzero(np.diff(texts, prepend=-1))
        positions, guessed = np.concatenate(after) + np.repeat(first, counts), parents >= 0
        return cls(
            texts=texts,
            tokens=np.concatenate(of_tokens),
            positions=positions,
            above=parents + np.repeat(list(accumulate(counts[:-1], initial=0)), counts),
            guessed=guessed,
            starts=starts,
            least=np.minimum.reduceat(positions, starts),
            most=np.maximum.reduceat(positions, starts),
            certain=np.maximum.reduceat(np.where(guessed, -1, positions), starts),
        )


class PathSlots:
    """The slots of what the positions on each row's path store."""

    def __init__(
        self, rows: RowPaths, block: int, lowest: Ints, own: Ints, committed: Callable[[Ints, Ints], Ints]
    ) -> None:
        """lowest [texts]: the first position of each text whose slot is needed, at most that of its rows' first columns
        own [rows]: the slot of each row's own position   committed: returns the slots of committed positions, by the
        numbers of their texts"""
        self._rows, self._block, self._own = rows, block, own
        lengths = first_seen(rows.most, block) + 2 * block - lowest
        self._zero = np.cumsum(lengths) - lengths - lowest  # [texts] place of each text's position 0 in the line
        texts = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(texts)) - self._zero[texts]
        self.line = np.zeros(len(texts), np.int64)
        """The slots of each text's positions from its `lowest` on, text after text; 0 past its committed tokens."""
        held = np.flatnonzero((positions >= 0) & (positions <= rows.certain[texts]))
        self.line[held] = committed(texts[held], positions[held])
        certain = np.flatnonzero(~rows.guessed)
        self.line[self._zero[rows.texts[certain]] + rows.positions[certain]] = own[certain]

    def columns(self) -> Ints:
        """The slots at the positions from each row's `first_seen` on, [rows, 2 * block]; 0 for those not on its
        path."""
        rows, width = self._rows, 2 * self._block
        first = first_seen(rows.positions, self._block)
        windows = np.ndarray((len(self.line) - width + 1, width), np.int64, self.line, strides=self.line.strides * 2)
        found: Ints = windows[self._zero[rows.texts] + first]
        column = rows.positions - first  # the place of each row's own slot
        early = np.flatnonzero(~rows.guessed & (rows.positions < rows.certain[rows.texts]))
        if len(early):
            found[early] = np.where(np.arange(width) > column[early, None], 0, found[early])
        row = at = np.flatnonzero(rows.guessed)
        while len(at):  # a level of all trees at a time, upwards
            found[row, rows.positions[at] - first[row]] = self._own[at]
            at = rows.above[at]
            guessed = rows.guessed[at]
            row, at = row[guessed], at[guessed]
        return found

    def between(self, text: int, begin: int, end: int) -> Ints:
        """The slots of a text's positions [begin, end)."""
        zero = int(self._zero[text])
        return self.line[zero + begin : zero + end]
