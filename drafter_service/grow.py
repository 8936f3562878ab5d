"""Growth of draft trees, level by level.

Rows are numbered level by level, a parent's children adjacent and best first. The kind of shape decides which rows of a
level go through the model next, the *frontier*; they need not be adjacent.
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
    """One growing tree. Its processed rows, which went through the model and have candidates, are numbered in the order
    of processing.

    All data are plain lists: levels have few rows, and an operation of NumPy costs as much as a loop over a dozen
    numbers.
    """

    root: int
    shape: TreeShape
    tokens: list[int] = field(init=False)
    parents: list[int] = field(init=False)
    values: list[float] = field(init=False)
    level: int = 0  # depth of the frontier
    frontier: list[int] = field(default_factory=lambda: [0])  # rows of the next forward, ascending
    place: dict[int, int] = field(default_factory=dict)  # row -> its number among the processed rows
    above: list[int] = field(default_factory=lambda: [-1])  # number of the parent of each processed or frontier row
    candidates: list[Sequence[int]] = field(default_factory=list)  # [processed][k] tokens, best first
    scores: list[Numbers] = field(default_factory=list)  # [processed][k] scores of the candidates
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
        """True if no row waits for candidates. All rows that did not get any are then leaves."""
        return not self.frontier

    def extend(
        self, candidates: Sequence[Sequence[int]], scores: Sequence[Numbers], confidences: Sequence[Numbers]
    ) -> None:
        """Add the children of each row of the frontier, which are the first of its candidates.

        candidates [frontier][k] tokens, best first   scores [frontier][k] by which candidates are ordered
        confidences [frontier][k] logarithms, at most 0, never increasing along a row
        A row with k below the shape's width, since no other tokens may follow it, has at most k children.
        """
        above = [self.values[row] for row in self.frontier]
        reached = [
            [(chance if chance > LEAST_CHANCE else LEAST_CHANCE) + value for chance in chances[: self.width]]
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
        """Called by `extend` at each level. Returns the number of children of each frontier row.

        reached [frontier][width]: value that each candidate would have as a row
        """

    def _next(self, first: int) -> list[int]:
        """Called by `extend` unless the tree is at its full depth. Returns the next frontier, chosen from the rows just
        added: `first` and all after it."""
        return list(range(first, len(self.tokens)))

    @property
    def sent(self) -> Sequence[int]:
        """Rows of the finished tree that are answered, ascending; the others were grown and are dropped."""
        return range(len(self.tokens))

    def child(self, row: int, token: int) -> int | None:
        """Row of the child with this token below a processed row, or None."""
        place = self.place[row]
        children = self.candidates[place][: self.children[place]]
        return self.first_child[place] + children.index(token) if token in children else None

    def arrays(self) -> tuple[IntArray, IntArray, FloatArray]:
        """Tokens, parents and values of the finished tree, as `DraftTree` takes them."""
        return np.array(self.tokens, np.int64), np.array(self.parents, np.int64), np.array(self.values, np.float32)


class LevelGrowth(Growth):
    """A tree in which all rows of a level have the same number of children.

    Shape (2, 1): the root gets its 2 best candidates, and each of these its best:

    >>> growth, half = LevelGrowth(9, LevelShape((2, 1))), [math.log(0.5), math.log(0.25)]
    >>> growth.extend([[5, 7]], [half], [half])
    >>> growth.extend([[1, 2], [3, 4]], [half, half], [half, half])
    >>> growth.tokens, growth.parents, [round(math.exp(value), 3) for value in growth.values]
    ([9, 5, 7, 1, 3], [-1, 0, 0, 1, 2], [1.0, 0.5, 0.25, 0.25, 0.125])
    """

    shape: LevelShape

    def _counts(self, reached: Sequence[Numbers]) -> Sequence[int]:
        return [min(self.shape.widths[self.level], len(values)) for values in reached]


@dataclass
class NodeGrowth(Growth):
    """A tree whose shape gives the number of children of each row; rows without children are leaves, on any level.

    Shape nodes(2,1): the root has 2 children and the first of them has one, so only the first is processed:

    >>> growth, half = NodeGrowth(9, NodeShape((2, 1))), [math.log(0.5), math.log(0.25)]
    >>> growth.extend([[5, 7]], [half], [half])
    >>> growth.frontier
    [1]
    >>> growth.extend([[1, 2]], [half], [half])
    >>> growth.tokens, growth.parents
    ([9, 5, 7, 1], [-1, 0, 0, 1])
    """

    shape: NodeShape
    in_shape: list[int] = field(default_factory=lambda: [0])  # [rows] which of the shape's rows each row is

    def _counts(self, reached: Sequence[Numbers]) -> Sequence[int]:
        counts = []
        for row, values in zip(self.frontier, reached, strict=True):
            same = self.in_shape[row]
            counts.append(min(self.shape.children[same], len(values)))
            first = 1 + sum(self.shape.children[:same])
            self.in_shape += range(first, first + counts[-1])
        return counts

    def _next(self, first: int) -> list[int]:
        children = self.shape.children  # rows past its end are leaves
        return [row for row, same in enumerate(self.in_shape[first:], first) if same < len(children) and children[same]]


class BeamGrowth(Growth):
    """A tree in which each level has the `beams` candidates of greatest value, under any parents.

    Values do not increase along a row's candidates, so the kept ones come first. With 2 beams, the second level has
    both candidates of the likely first row (0.6 * 0.5 and 0.6 * 0.4) and none of the other (at most 0.2 * 0.5):

    >>> growth = BeamGrowth(9, BeamShape(2, 2))
    >>> first, second = [math.log(0.6), math.log(0.2)], [[math.log(0.5), math.log(0.4)]] * 2
    >>> growth.extend([[5, 7]], [first], [first])
    >>> growth.extend([[1, 2], [3, 4]], second, second)
    >>> growth.tokens, growth.parents
    ([9, 5, 7, 1, 2], [-1, 0, 0, 1, 1])
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
    """A tree of EAGLE-2: the k rows of greatest value of a level get k children each, and in the end only the `total`
    guesses of greatest value remain.

    Once there are `total` guesses, a later one is kept only if its value exceeds the bound, the least value of the best
    `total`. No value exceeds its parent's. So candidates up to the bound do not become rows, rows up to it get no
    children, and the tree is complete once no new row exceeds it, often long before its last level.

    With k = 2 and total = 3, the guesses 5, 7 and 1 have the values 0.6, 0.3 and 0.42; no other exceeds 0.3:

    >>> growth = DynamicGrowth(9, DynamicShape(2, 3, 3))
    >>> first = [math.log(0.6), math.log(0.3)]
    >>> second = [[math.log(0.7), math.log(0.2)], [math.log(0.3), math.log(0.2)]]
    >>> growth.extend([[5, 7]], [first], [first])
    >>> growth.extend([[1, 2], [3, 4]], second, second)
    >>> third = [math.log(0.5), math.log(0.2)]  # below 1 at most 0.42 * 0.5, so the third level is the last
    >>> growth.extend([[6, 8]], [third], [third])
    >>> growth.finished, [array.tolist() for array in growth.arrays()[:2]]
    (True, [[9, 5, 7, 1], [-1, 0, 0, 1]])
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
        """The value that a further guess must exceed to be kept."""
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

    @property
    def sent(self) -> Sequence[int]:
        _, parents, values = super().arrays()
        return [int(row) for row in rerank(values, parents, self.largest.total)]

    def arrays(self) -> tuple[IntArray, IntArray, FloatArray]:
        tokens, parents, values = super().arrays()
        kept = rerank(values, parents, self.largest.total)
        # Kept rows are ascending and include all parents: a parent's new row is its position in `kept`.
        return tokens[kept], np.append(-1, np.searchsorted(kept, parents[kept[1:]])), values[kept]


class UntilGrowth(DynamicGrowth):
    """A dynamic tree that gets another level only while the text likely goes through the rows that would get children
    (`UntilShape`). Guesses with a chance of at most `least` do not become rows, so a tree may be its root alone.

    Rows with the chances 0.3 and 0.2 are left with a chance of 0.5, which is below an h of 0.6 but not of 0.4:

    >>> for h in (0.6, 0.4):
    ...     growth, chances = UntilGrowth(9, UntilShape(DynamicShape(2, 3, 3), h)), [math.log(0.3), math.log(0.2)]
    ...     growth.extend([[5, 7]], [chances], [chances])
    ...     print(growth.frontier)
    [1, 2]
    []
    """

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
    ranks: tuple[int, ...]  # place of each row among its parent's candidates
    counts: tuple[int, ...]  # number of processed rows of each level


ROOT_ALONE = FixedForm(above=(-1,), ranks=(0,), counts=(1,))
"""The first level of any tree."""


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
    """Begin a tree of this shape, with only its root."""
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
    """Upper bound of the rows that a tree within these limits puts through the model; a dynamic tree may process more
    rows than it keeps."""
    steps = min(max_depth, max_rows - 1)
    return max(max_rows - 1, 1 + (steps - 1) * MAX_K, 1)


def greatest(values: Numbers, count: int) -> list[int]:
    """Indices of the `count` greatest values, descending; of equal values, the lower index first."""
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)[:count]  # a stable order, reversed too


def rerank(values: FloatArray, parents: IntArray, total: int) -> IntArray:
    """The rows of the root and of the `total` guesses of greatest value, ascending; each guess's parent is included.

    values [rows], at most 0, none above its parent's   parents [rows], row 0 is the root, parents come first

    Equal values are ordered by row, so that a row comes after all its ancestors and every prefix of the order is a
    tree. Confidences of exactly 1, which are common, give a row its parent's value
    (docs/design/drafting.md#dynamic-trees).

    >>> rerank(np.log([1.0, 0.6, 0.3, 0.6, 0.1]), np.array([-1, 0, 0, 1, 1]), total=2).tolist()
    [0, 1, 3]
    """
    kept: IntArray = np.sort(np.argsort(-values, kind="stable")[: 1 + total])
    rows = set(kept.tolist())
    assert 0 in rows and rows.issuperset(parents[kept[1:]].tolist()), "a guess is kept without its parent"
    return kept


def ranks(known: dict[int, int], start: int, stop: int, unknown: int) -> npt.NDArray[np.int32]:
    """Ranks of the tokens at text positions start..stop-1; `unknown` for tokens without a rank."""
    return np.array([known.get(position, unknown) for position in range(start, stop)], np.int32)
