"""Draft trees while they grow, level by level.

Rows are numbered in order of level, a parent's children side by side and best first. Which of a level's rows go through
the model, its *frontier*, is for the kind of shape to say; they need not lie side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from dendro.shapes import MAX_K, BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape
from dendro.tree import FloatArray, IntArray

LEAST_CHANCE = -80.0
"""Logarithm below which a guess's chance is not told apart from none; keeps sums over a path finite."""


@dataclass
class Growth(ABC):
    """One tree. The rows that have been through the model, and so have candidates, are numbered in that order."""

    root: int
    shape: TreeShape
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    values: list[float] = field(init=False)
    level: int = 0  # of the frontier
    frontier: list[int] = field(default_factory=lambda: [0])  # rows of the next forward, ascending
    place: dict[int, int] = field(default_factory=dict)  # row -> its number among the processed
    candidates: list[IntArray] = field(default_factory=list)  # of each processed row, best first
    scores: list[FloatArray] = field(default_factory=list)  # of these
    first_child: list[int] = field(default_factory=list)  # row of each processed row's best candidate
    children: list[int] = field(default_factory=list)  # how many of its candidates became rows

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.values = [self.root], [-1], [0.0]

    @property
    def processed(self) -> int:
        return len(self.candidates)

    @property
    def finished(self) -> bool:
        """The rows that are left are leaves, whose scores nobody needs."""
        return self.level == self.shape.depth

    def extend(self, candidates: IntArray, scores: FloatArray, chances: FloatArray) -> None:
        """Give the rows of the frontier their children: of each row so many of its first candidates.

        candidates [frontier, k], best first   scores [frontier, k] what ordered them
        chances [frontier, k] log of their confidence, never increasing along a row; k at least the shape's width
        """
        width = self.shape.width
        above = np.array([self.values[row] for row in self.frontier], np.float32)[:, None]
        reached = np.clip(chances[:, :width], LEAST_CHANCE, 0.0) + above
        counts = self._counts(reached)
        taken = np.arange(width) < counts[:, None]
        values, first = reached[taken], len(self.tokens)
        self.place.update(zip(self.frontier, range(self.processed, self.processed + len(self.frontier)), strict=True))
        self.candidates += list(candidates)
        self.scores += list(scores)
        self.first_child += (first + np.cumsum(counts) - counts).tolist()
        self.children += counts.tolist()
        self.tokens += candidates[:, :width][taken].tolist()
        self.parents += np.repeat(self.frontier, counts).tolist()
        self.values += values.tolist()
        self.level += 1
        self.frontier = self._next(first, values)

    @abstractmethod
    def _counts(self, reached: FloatArray) -> IntArray:
        """[frontier] children of each row. reached [frontier, width] the value that each candidate would have."""

    def _next(self, first: int, values: FloatArray) -> list[int]:
        """Those of the rows just made, `first` and on, that go through the model. values [rows just made]"""
        return list(range(first, first + len(values)))

    def child(self, row: int, token: int) -> int | None:
        """The row below a processed one that carries this token, or none."""
        place = self.place[row]
        hits = np.flatnonzero(self.candidates[place][: self.children[place]] == token)
        return self.first_child[place] + int(hits[0]) if len(hits) else None

    def arrays(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Tokens, parents and values, as a DraftTree wants them."""
        return np.array(self.tokens, np.int64), np.array(self.parents, np.int64), np.array(self.values, np.float32)


class LevelGrowth(Growth):
    """Every row of a level has as many children."""

    shape: LevelShape

    def _counts(self, reached: FloatArray) -> IntArray:
        return np.full(len(reached), self.shape.widths[self.level], np.int64)


class NodeGrowth(Growth):
    """Each row has the children that its number names. Rows without any are leaves, on whatever level."""

    shape: NodeShape

    def _counts(self, reached: FloatArray) -> IntArray:
        return np.array([self.shape.children[row] for row in self.frontier], np.int64)

    def _next(self, first: int, values: FloatArray) -> list[int]:
        named = self.shape.children[first : first + len(values)]
        return [row for row, count in enumerate(named, first) if count]


class BeamGrowth(Growth):
    """Of what a level's rows offer, the `beams` candidates of greatest value are kept, wherever they hang.

    A row's values do not increase along its candidates, so what is kept of them are its first.
    """

    shape: BeamShape

    def _counts(self, reached: FloatArray) -> IntArray:
        kept = greatest(reached.ravel(), self.shape.beams)
        return np.bincount(kept // self.shape.width, minlength=len(reached))


class DynamicGrowth(Growth):
    """EAGLE-2: a level's k rows of greatest value get k children each, and of all rows the greatest stay at the end."""

    shape: DynamicShape

    def _counts(self, reached: FloatArray) -> IntArray:
        return np.full(len(reached), self.shape.k, np.int64)

    def _next(self, first: int, values: FloatArray) -> list[int]:
        return (first + np.sort(greatest(values, self.shape.k))).tolist()

    def arrays(self) -> tuple[IntArray, IntArray, FloatArray]:
        tokens, parents, values = super().arrays()
        k, steps = self.shape.k, self.shape.steps
        depths = np.repeat(np.arange(steps + 1), [1, k] + [k * k] * (steps - 1))
        kept = rerank(values, depths, parents, self.shape.total)
        # A kept row's parent is kept, and kept rows are in ascending order: its number is its place among them.
        return tokens[kept], np.append(-1, np.searchsorted(kept, parents[kept[1:]])), values[kept]


def growth_of(root: int, shape: TreeShape) -> Growth:
    """A tree of this shape that has its root alone."""
    match shape:
        case LevelShape():
            return LevelGrowth(root, shape)
        case NodeShape():
            return NodeGrowth(root, shape)
        case BeamShape():
            return BeamGrowth(root, shape)
        case DynamicShape():
            return DynamicGrowth(root, shape)
    raise TypeError(f"{shape} is of a kind that is not known here")


def most_processed(max_rows: int, max_depth: int) -> int:
    """The most rows that any tree of so many rows and levels takes through the model.

    A dynamic tree's beat all others': they may be more than the rows that it keeps.
    """
    steps = min(max_depth, max_rows - 1)
    return max(max_rows - 1, 1 + (steps - 1) * MAX_K, 1)


def greatest(values: FloatArray, count: int) -> IntArray:
    """Indices of the `count` greatest values, the greatest first; the lower index first among equals."""
    return np.argsort(-values, kind="stable")[:count]


def rerank(values: FloatArray, depths: IntArray, parents: IntArray, total: int) -> IntArray:
    """The root and the `total` guesses of greatest value, ascending, such that each one's parent is among them.

    values [rows] float32, at most 0, none above its parent's   depths [rows] below 256
    parents [rows] row 0 is the root, and a parent comes before its children

    Ordered by (value descending, depth ascending, index ascending), a row comes after all its ancestors, so that any
    beginning of the order is closed; by the value alone it may not, as confidences of exactly 1 are common (ALGORITHMS
    4.1). The order is that of one integer key, so it is exact:

        | order-preserving bits of the value, 32 | 255 - depth, 8 | 2**24 - 1 - index, 24 |
    """
    bits = (values.astype(np.float32) + np.float32(0)).view(np.uint32)  # + 0: there are two zeros
    ordered = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    low = ((255 - depths) << 24) | (2**24 - 1 - np.arange(len(values)))
    key = (ordered << np.uint64(32)) | low.astype(np.uint64)
    kept = np.sort(np.argpartition(key, len(key) - 1 - total)[len(key) - 1 - total :])
    assert kept[0] == 0 and np.isin(parents[kept[1:]], kept).all(), "a guess was kept without its parent"
    return kept


def ranks(growth_ranks: dict[int, int], start: int, stop: int, unknown: int) -> npt.NDArray[np.int32]:
    """The trace of text positions start..stop-1; a rank that was never computed counts as past all candidates."""
    return np.array([growth_ranks.get(position, unknown) for position in range(start, stop)], np.int32)
