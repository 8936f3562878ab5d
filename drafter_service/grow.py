"""A draft tree while it grows, level by level: rows in order of level, a parent's children side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from dendro.shapes import LevelShape
from dendro.tree import FloatArray, IntArray

LEAST_CHANCE = -80.0
"""Logarithm below which a guess's chance is not told apart from none; keeps sums over a path finite."""


@dataclass
class Growth:
    """One tree. The first `processed` rows have been through the model and have their candidates."""

    root: int
    shape: LevelShape
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    values: list[float] = field(init=False)
    candidates: list[IntArray] = field(default_factory=list)  # of each processed row, best first
    first_child: list[int] = field(default_factory=list)  # of each processed row
    level: int = 0  # of the rows that wait
    start: int = 0  # the first of them

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.values = [self.root], [-1], [0.0]

    @property
    def processed(self) -> int:
        return len(self.candidates)

    @property
    def finished(self) -> bool:
        """The rows that are left are leaves, whose scores nobody needs."""
        return self.level == self.shape.depth

    @property
    def frontier(self) -> range:
        """The rows that wait: the next forward's."""
        return range(self.start, len(self.tokens))

    def extend(self, candidates: IntArray, chances: FloatArray) -> None:
        """Give every row of the frontier its children: its first candidates, as many as the shape says.

        candidates [frontier, k], best first   chances [frontier, k] logarithms of the drafter's own law
        """
        width, rows = self.shape.widths[self.level], self.frontier
        above = np.asarray(self.values[self.start :], np.float32)[:, None]
        reached = np.clip(chances[:, :width], LEAST_CHANCE, 0.0) + above
        first = len(self.tokens)
        self.candidates += list(candidates)
        self.first_child += range(first, first + width * len(rows), width)
        self.tokens += candidates[:, :width].ravel().tolist()
        self.values += reached.ravel().tolist()
        self.parents += np.repeat(np.arange(rows.start, rows.stop), width).tolist()
        self.start, self.level = first, self.level + 1

    def rank(self, row: int, token: int) -> int:
        """The place of a token among a processed row's candidates; their number where it is not one of them."""
        hits = np.flatnonzero(self.candidates[row] == token)
        return int(hits[0]) if len(hits) else len(self.candidates[row])

    def child(self, row: int, token: int) -> int | None:
        """The row below a processed one that carries this token, or none."""
        rank = self.rank(row, token)
        width = self.shape.widths[self._level_of(row)]
        return self.first_child[row] + rank if rank < width else None

    def _level_of(self, row: int) -> int:
        level = 0
        while row:
            row, level = self.parents[row], level + 1
        return level

    def arrays(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Tokens, parents and values, as a DraftTree wants them."""
        return np.array(self.tokens, np.int64), np.array(self.parents, np.int64), np.array(self.values, np.float32)


def processed_rows(shape: LevelShape) -> int:
    """Rows of a full tree that go through the model: all but the leaf level."""
    return 1 + sum(shape.levels[:-1])


def ranks(growth_ranks: dict[int, int], start: int, stop: int, unknown: int) -> npt.NDArray[np.int32]:
    """The trace of text positions start..stop-1; a rank that was never computed counts as past all candidates."""
    return np.array([growth_ranks.get(position, unknown) for position in range(start, stop)], np.int32)
