"""Draft trees while they grow, level by level.

Rows are numbered level by level, a parent's children adjacent and best first. The kind of shape decides which rows of a
level go through the model, the *frontier*; they need not be adjacent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from dendro.shapes import MAX_K, BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape
from dendro.tree import FloatArray, IntArray

LEAST_CHANCE = -80.0
"""Lower bound of a log confidence; keeps sums over a path finite."""


@dataclass
class Growth(ABC):
    """One tree. Its processed rows, which went through the model and have candidates, are numbered in that order."""

    root: int
    shape: TreeShape
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    values: list[float] = field(init=False)
    level: int = 0  # of the frontier
    frontier: list[int] = field(default_factory=lambda: [0])  # rows of the next forward, ascending
    place: dict[int, int] = field(default_factory=dict)  # row -> its number among the processed rows
    candidates: list[IntArray] = field(default_factory=list)  # [k] of each processed row, best first
    scores: list[FloatArray] = field(default_factory=list)  # [k] of these candidates
    first_child: list[int] = field(default_factory=list)  # row of each processed row's best candidate
    children: list[int] = field(default_factory=list)  # number of each processed row's candidates that became rows

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.values = [self.root], [-1], [0.0]

    @property
    def processed(self) -> int:
        return len(self.candidates)

    @property
    def finished(self) -> bool:
        """All remaining rows are leaves, whose candidates are not needed."""
        return self.level == self.shape.depth

    def extend(self, candidates: IntArray, scores: FloatArray, confidences: FloatArray) -> None:
        """Add the children of each row of the frontier, which are the first of its candidates.

        candidates [frontier, k], best first   scores [frontier, k] by which they are ordered
        confidences [frontier, k] logarithms, never increasing along a row; k at least the shape's width
        """
        width = self.shape.width
        above = np.array([self.values[row] for row in self.frontier], np.float32)[:, None]
        reached = np.clip(confidences[:, :width], LEAST_CHANCE, 0.0) + above
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
        """[frontier] number of children of each row. reached [frontier, width] value of each candidate as a row."""

    def _next(self, first: int, values: FloatArray) -> list[int]:
        """The next frontier, from the rows just added: `first` and those after it. values [rows added]"""
        return list(range(first, first + len(values)))

    def child(self, row: int, token: int) -> int | None:
        """The child of a processed row that has this token, or None."""
        place = self.place[row]
        hits = np.flatnonzero(self.candidates[place][: self.children[place]] == token)
        return self.first_child[place] + int(hits[0]) if len(hits) else None

    def arrays(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Tokens, parents and values, as for `DraftTree`."""
        return np.array(self.tokens, np.int64), np.array(self.parents, np.int64), np.array(self.values, np.float32)


class LevelGrowth(Growth):
    """All rows of a level have the same number of children."""

    shape: LevelShape

    def _counts(self, reached: FloatArray) -> IntArray:
        return np.full(len(reached), self.shape.widths[self.level], np.int64)


class NodeGrowth(Growth):
    """The shape sets the number of children of each row; rows without children are leaves, on any level."""

    shape: NodeShape

    def _counts(self, reached: FloatArray) -> IntArray:
        return np.array([self.shape.children[row] for row in self.frontier], np.int64)

    def _next(self, first: int, values: FloatArray) -> list[int]:
        counts = self.shape.children[first : first + len(values)]
        return [row for row, count in enumerate(counts, first) if count]


class BeamGrowth(Growth):
    """Of all candidates of a level, the `beams` of greatest value become rows, under any parents.

    A row's values do not increase along its candidates, so its kept candidates are its first.
    """

    shape: BeamShape

    def _counts(self, reached: FloatArray) -> IntArray:
        kept = greatest(reached.ravel(), self.shape.beams)
        return np.bincount(kept // self.shape.width, minlength=len(reached))


class DynamicGrowth(Growth):
    """EAGLE-2: a level's k rows of greatest value get k children each; at the end the `total` best guesses remain."""

    shape: DynamicShape

    def _counts(self, reached: FloatArray) -> IntArray:
        return np.full(len(reached), self.shape.k, np.int64)

    def _next(self, first: int, values: FloatArray) -> list[int]:
        rows: list[int] = (first + np.sort(greatest(values, self.shape.k))).tolist()
        return rows

    def arrays(self) -> tuple[IntArray, IntArray, FloatArray]:
        tokens, parents, values = super().arrays()
        k, steps = self.shape.k, self.shape.steps
        depths = np.repeat(np.arange(steps + 1), [1, k] + [k * k] * (steps - 1))
        kept = rerank(values, depths, parents, self.shape.total)
        # Kept rows are ascending and include all parents: a parent's new row is its position in `kept`.
        return tokens[kept], np.append(-1, np.searchsorted(kept, parents[kept[1:]])), values[kept]


def growth_of(root: int, shape: TreeShape) -> Growth:
    """A tree of this shape with only its root."""
    match shape:
        case LevelShape():
            return LevelGrowth(root, shape)
        case NodeShape():
            return NodeGrowth(root, shape)
        case BeamShape():
            return BeamGrowth(root, shape)
        case DynamicShape():
            return DynamicGrowth(root, shape)
    raise TypeError(f"a drafter cannot grow a tree of shape {shape}")


def most_processed(max_rows: int, max_depth: int) -> int:
    """An upper bound of the rows that a tree within these limits puts through the model.

    A dynamic tree may process more rows than it keeps.
    """
    steps = min(max_depth, max_rows - 1)
    return max(max_rows - 1, 1 + (steps - 1) * MAX_K, 1)


def greatest(values: FloatArray, count: int) -> IntArray:
    """Indices of the `count` greatest values, descending; of equal values, the lower index first."""
    return np.argsort(-values, kind="stable")[:count]


def rerank(values: FloatArray, depths: IntArray, parents: IntArray, total: int) -> IntArray:
    """The root and the `total` guesses of greatest value, as ascending rows; each guess's parent is included.

    values [rows] float32, at most 0, none above its parent's   depths [rows] below 256
    parents [rows] row 0 is the root, and a parent comes before its children

    Rows are ordered by (value descending, depth ascending, index ascending). A row then comes after all its ancestors,
    so every prefix of the order is a tree. The value alone does not ensure this, as confidences of exactly 1 are common
    (ALGORITHMS 4.1). The order is that of one integer key, so it is exact:

        | order-preserving bits of the value, 32 | 255 - depth, 8 | 2**24 - 1 - index, 24 |
    """
    bits = (values.astype(np.float32) + np.float32(0)).view(np.uint32)  # + 0 makes -0.0 equal to 0.0
    ordered = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    low = ((255 - depths) << 24) | (2**24 - 1 - np.arange(len(values)))
    key = (ordered << np.uint64(32)) | low.astype(np.uint64)
    kept = np.sort(np.argpartition(key, len(key) - 1 - total)[len(key) - 1 - total :])
    assert kept[0] == 0 and np.isin(parents[kept[1:]], kept).all(), "a guess is kept without its parent"
    return kept


def ranks(known: dict[int, int], start: int, stop: int, unknown: int) -> npt.NDArray[np.int32]:
    """The ranks of text positions start..stop-1; `unknown` where none was computed."""
    return np.array([known.get(position, unknown) for position in range(start, stop)], np.int32)
