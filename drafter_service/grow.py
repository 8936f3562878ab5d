"""Draft trees while they grow, level by level.

Rows are numbered level by level, a parent's children adjacent and best first. The kind of shape decides which rows of a
level go through the model, the *frontier*; they need not be adjacent.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from dendro.shapes import MAX_K, BeamShape, DynamicShape, LevelShape, NodeShape, TreeShape, UntilShape
from dendro.tree import FloatArray, IntArray

LEAST_CHANCE = -80.0
"""Lower bound of a log confidence; keeps sums over a path finite."""


Numbers = Sequence[float]


@dataclass
class Growth(ABC):
    """One tree. Its processed rows, which went through the model and have candidates, are numbered in that order.

    Plain lists: levels have few rows, and an operation of numpy costs as much as a loop over a dozen numbers.
    """

    root: int
    shape: TreeShape
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    values: list[float] = field(init=False)
    level: int = 0  # of the frontier
    frontier: list[int] = field(default_factory=lambda: [0])  # rows of the next forward, ascending
    place: dict[int, int] = field(default_factory=dict)  # row -> its number among the processed rows
    above: list[int] = field(default_factory=lambda: [-1])  # of processed rows and the frontier: their parents' numbers
    candidates: list[Sequence[int]] = field(default_factory=list)  # [k] of each processed row, best first
    scores: list[Numbers] = field(default_factory=list)  # [k] of these candidates
    first_child: list[int] = field(default_factory=list)  # row of each processed row's best candidate
    children: list[int] = field(default_factory=list)  # number of each processed row's candidates that became rows

    def __post_init__(self) -> None:
        self.tokens, self.parents, self.values = [self.root], [-1], [0.0]
        self.width, self.depth = self.shape.width, self.shape.depth

    @property
    def processed(self) -> int:
        return len(self.candidates)

    @property
    def finished(self) -> bool:
        """All remaining rows are leaves, whose candidates are not needed."""
        return not self.frontier

    def extend(
        self, candidates: Sequence[Sequence[int]], scores: Sequence[Numbers], confidences: Sequence[Numbers]
    ) -> None:
        """Add the children of each row of the frontier, which are the first of its candidates.

        candidates [frontier][k], best first   scores [frontier][k] by which they are ordered
        confidences [frontier][k] logarithms, at most 0, never increasing along a row
        A row with k below the shape's width, since no other tokens may follow it, has at most k children.
        """
        above = [self.values[row] for row in self.frontier]
        reached = [
            [max(chance, LEAST_CHANCE) + value for chance in chances[: self.width]]
            for chances, value in zip(confidences, above, strict=True)
        ]
        first = len(self.tokens)
        for row, own, chances, count in zip(self.frontier, candidates, reached, self._counts(reached), strict=True):
            self.place[row] = len(self.place)
            self.first_child.append(len(self.tokens))
            self.children.append(count)
            self.tokens += own[:count]
            self.parents += [row] * count
            self.values += chances[:count]
        self.candidates += candidates
        self.scores += scores
        self.level += 1
        self.frontier = [] if self.level == self.depth else self._next(first)
        self.above += [self.place[self.parents[row]] for row in self.frontier]

    @abstractmethod
    def _counts(self, reached: Sequence[Numbers]) -> Sequence[int]:
        """[frontier] number of children of each row. reached [frontier][width] value of each candidate as a row."""

    def _next(self, first: int) -> list[int]:
        """The next frontier, from the rows just added: `first` and those after it."""
        return list(range(first, len(self.tokens)))

    def child(self, row: int, token: int) -> int | None:
        """The child of a processed row that has this token, or None."""
        place = self.place[row]
        children = self.candidates[place][: self.children[place]]
        return self.first_child[place] + children.index(token) if token in children else None

    def arrays(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Tokens, parents and values, as for `DraftTree`."""
        return np.array(self.tokens, np.int64), np.array(self.parents, np.int64), np.array(self.values, np.float32)


class LevelGrowth(Growth):
    """All rows of a level have the same number of children."""

    shape: LevelShape

    def _counts(self, reached: Sequence[Numbers]) -> Sequence[int]:
        return [min(self.shape.widths[self.level], len(values)) for values in reached]


@dataclass
class NodeGrowth(Growth):
    """The shape sets the number of children of each row; rows without children are leaves, on any level."""

    shape: NodeShape
    in_shape: list[int] = field(default_factory=lambda: [0])  # of each row: which of the shape's rows it is

    def _counts(self, reached: Sequence[Numbers]) -> Sequence[int]:
        counts = []
        for row, values in zip(self.frontier, reached, strict=True):
            same = self.in_shape[row]
            counts.append(min(self.shape.children[same], len(values)))
            first = 1 + sum(self.shape.children[:same])
            self.in_shape += range(first, first + counts[-1])
        return counts

    def _next(self, first: int) -> list[int]:
        children = self.shape.children  # without the leaves after the last row that has some
        return [row for row, same in enumerate(self.in_shape[first:], first) if same < len(children) and children[same]]


class BeamGrowth(Growth):
    """Of all candidates of a level, the `beams` of greatest value become rows, under any parents.

    A row's values do not increase along its candidates, so its kept candidates are its first.
    """

    shape: BeamShape

    def _counts(self, reached: Sequence[Numbers]) -> Sequence[int]:
        counts = [0] * len(reached)
        owners = [row for row, values in enumerate(reached) for _ in values]
        for at in greatest([value for values in reached for value in values], self.shape.beams):
            counts[owners[at]] += 1
        return counts


@dataclass
class DynamicGrowth(Growth):
    """EAGLE-2: a level's k rows of greatest value get k children each; at the end the `total` best guesses remain.

    Once there are `total` guesses, a later one is kept only if its value is above the least of the best `total`. No
    row's value is above its parent's. So guesses up to that bound do not become rows, rows up to it get no children,
    and a tree with no new row above it is complete, often long before its last level.
    """

    shape: DynamicShape | UntilShape
    best: list[float] = field(default_factory=list)  # values of the best `total` guesses so far, descending

    @property
    def largest(self) -> DynamicShape:
        """The shape of the largest tree."""
        assert isinstance(self.shape, DynamicShape)
        return self.shape

    @property
    def _bound(self) -> float:
        """A later guess is kept only if its value is above this."""
        return self.best[-1] if len(self.best) == self.largest.total else -math.inf

    def _counts(self, reached: Sequence[Numbers]) -> Sequence[int]:
        bound = self._bound
        counts = [sum(value > bound for value in values) for values in reached]
        new = [value for values, count in zip(reached, counts, strict=True) for value in values[:count]]
        self.best = sorted(self.best + new, reverse=True)[: self.largest.total]
        return counts

    def _next(self, first: int) -> list[int]:
        bound, new = self._bound, self.values[first:]
        return sorted(first + at for at in greatest(new, self.largest.k) if new[at] > bound)

    def arrays(self) -> tuple[IntArray, IntArray, FloatArray]:
        tokens, parents, values = super().arrays()
        kept = rerank(values, parents, self.largest.total)
        # Kept rows are ascending and include all parents: a parent's new row is its position in `kept`.
        return tokens[kept], np.append(-1, np.searchsorted(kept, parents[kept[1:]])), values[kept]


class UntilGrowth(DynamicGrowth):
    """A dynamic tree that gets another level only while the text likely goes through the rows that would get children;
    guesses of too small a value do not become rows (`UntilShape`). The tree of such a guess alone is the root."""

    shape: UntilShape

    @property
    def largest(self) -> DynamicShape:
        return self.shape.tree

    @property
    def _bound(self) -> float:
        return max(super()._bound, math.log(self.shape.least) if self.shape.least else -math.inf)

    def _next(self, first: int) -> list[int]:
        frontier = super()._next(first)
        reached = sum(math.exp(self.values[row]) for row in frontier)
        return frontier if 1 - reached < self.shape.h else []


@dataclass(frozen=True, slots=True)
class FixedForm:
    """The processed rows of a tree whose form does not depend on the candidates, level by level."""

    above: tuple[int, ...]  # number of each row's parent, -1 for the root
    ranks: tuple[int, ...]  # which of its parent's candidates each row is
    counts: tuple[int, ...]  # rows of each level


@functools.lru_cache(maxsize=1024)
def fixed_form(shape: TreeShape) -> FixedForm | None:
    """The form of all trees of this shape; None if it depends on the candidates."""
    if not isinstance(shape, LevelShape | NodeShape):
        return None
    growth, counts = growth_of(0, shape), list[int]()
    while not growth.finished:
        counts.append(len(growth.frontier))
        ranks, chances = [list(range(shape.width))] * counts[-1], [[0.0] * shape.width] * counts[-1]
        growth.extend(ranks, chances, chances)  # a row's token is then its rank
    return FixedForm(tuple(growth.above), tuple(growth.tokens[row] for row in growth.place), tuple(counts))


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
        case UntilShape():
            return UntilGrowth(root, shape)
    raise TypeError(f"a drafter cannot grow a tree of shape {shape}")


def most_processed(max_rows: int, max_depth: int) -> int:
    """An upper bound of the rows that a tree within these limits puts through the model.

    A dynamic tree may process more rows than it keeps.
    """
    steps = min(max_depth, max_rows - 1)
    return max(max_rows - 1, 1 + (steps - 1) * MAX_K, 1)


def greatest(values: Numbers, count: int) -> list[int]:
    """Indices of the `count` greatest values, descending; of equal values, the lower index first."""
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)[:count]  # a stable order, reversed too


def rerank(values: FloatArray, parents: IntArray, total: int) -> IntArray:
    """The root and the `total` guesses of greatest value, as ascending rows; each guess's parent is included.

    values [rows], at most 0, none above its parent's   parents [rows] row 0 is the root, and a parent comes before its
    children

    Of equal values the earlier row is kept, which of rows numbered level by level is the shallower. A row then comes
    after all its ancestors, so every prefix of the order is a tree. The value alone does not ensure this, as
    confidences of exactly 1 are common (docs/design/drafting.md#dynamic-trees).
    """
    kept: IntArray = np.sort(np.argsort(-values, kind="stable")[: 1 + total])
    rows = set(kept.tolist())
    assert 0 in rows and rows.issuperset(parents[kept[1:]].tolist()), "a guess is kept without its parent"
    return kept


def ranks(known: dict[int, int], start: int, stop: int, unknown: int) -> npt.NDArray[np.int32]:
    """The ranks of text positions start..stop-1; `unknown` where none was computed."""
    return np.array([known.get(position, unknown) for position in range(start, stop)], np.int32)
