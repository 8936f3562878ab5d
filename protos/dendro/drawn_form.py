"""The form of a drawn dynamic tree: the number of children of each row, decided before they are drawn
(docs/design/drafting.md#drawn-dynamic-trees).

The j-th draw below a row is a *slot*. A slot's priority is the chance that the text goes through the row and is not
among the draws before the slot, if the text follows the drafter's laws:

    V(row) * (1 - mass of the draws before it)        V(child) = V(row) * probability of the child's token

The queue of slots opens the best one at a time, and a child has slots of its own once it is drawn. Here a whole level
is decided at once: before its draws the queue runs to the tree's end, with expected masses and values in place of drawn
ones, and the slots that it opens on this level are the level's children. So a decision depends only on laws and on
tokens of the levels above, which keeps the output unbiased (kernels/tree_kernels/sampled_walk/README.md).

Drafter and router compute a form alike, bit for bit: by additions and multiplications in a fixed order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dendro.shapes import DynamicShape
from dendro.tree import DraftTree, FloatArray64, IntArray

Masses = list[float]
"""Chances [n + 1] that a token of a law is not among the first 0, 1, ..., n draws; a row has at most n children."""


class TokenLaw(Protocol):
    """A drafter's law of a row's children, such as a `ChildLaw`: token ids and their probabilities."""

    @property
    def ids(self) -> IntArray: ...  # [n] unique
    @property
    def probabilities(self) -> FloatArray64: ...  # [n]


class Slot(NamedTuple):
    """A draw that the queue may open. The least slot is the best."""

    priority: float  # negative priority
    level: int  # levels below the frontier
    number: int  # breaks ties
    value: float  # V of the slot's row
    masses: Masses  # masses of the row's law
    draws: int  # number of draws below the row before this one
    place: int  # place of the row in the frontier; -1: an expected row below the frontier


class DrawnForm:
    """The form of one tree while it grows. For each level call `widths`, draw, then call `descend`.

    At most `shape.k` rows of a level get children, each at least one and at most `shape.k`.

    With the shape dynamic(2,2,3), the root, whose law is 0.8 and 0.2, gets both children, since the second draw below
    it has the priority 1 - (0.8^2 + 0.2^2) = 0.32. The third guess goes below the likelier child, token 5:

    >>> import numpy as np
    >>> from dendro.tree import ChildLaw
    >>> form = DrawnForm(DynamicShape(2, 2, 3))
    >>> form.widths([ChildLaw(0, np.array([5, 7]), np.array([0.8, 0.2]))]), form.descend([[5, 7]])
    ([2], [0])
    """

    def __init__(self, shape: DynamicShape) -> None:
        self._k = shape.k
        self._levels = shape.steps  # levels that are not drawn yet
        self._left = shape.total  # guesses that are not drawn yet
        self._values = [1.0]  # V of each row of the frontier
        self._laws: Sequence[TokenLaw] = ()  # laws of the frontier's rows
        self._usual: Masses = []  # mean masses of the last frontier's laws, for rows whose laws are not known yet

    def widths(self, laws: Sequence[TokenLaw]) -> list[int]:
        """Number of children of each row of the frontier. laws: one per row"""
        self._laws = laws
        masses = [undrawn(law, self._k) for law in laws]
        shortest = min(map(len, masses))
        self._usual = [sum(each[draws] for each in masses) / len(masses) for draws in range(shortest)]
        return self._opened(masses, least=1)

    def descend(self, drawn: Sequence[Sequence[int]]) -> list[int]:
        """Places, in the new level, of the rows that get children, ascending; empty if the tree is complete.

        drawn [frontier][width]: tokens of each row's children. Raises KeyError for a token that the row's law lacks.
        """
        values = []
        for above, law, tokens in zip(self._values, self._laws, drawn, strict=True):
            chances = dict(zip(law.ids.tolist(), law.probabilities.tolist(), strict=True))
            values += [above * chances[token] for token in tokens]
        self._levels -= 1
        self._left -= len(values)
        if not self._levels or not self._left:
            return []
        self._values = values
        counts = self._opened([self._usual] * len(values), least=0)
        best = sorted(range(len(values)), key=lambda place: -values[place])[: self._k]  # stable
        chosen = sorted(place for place in best if counts[place])
        self._values = [values[place] for place in chosen]
        return chosen

    def _opened(self, masses: Sequence[Masses], least: int) -> list[int]:
        """Numbers of slots that the queue opens at each row of `_values`. masses: one list per row   least: number of
        slots of each row that are open already"""
        counts, slots, numbers = [least] * len(masses), list[Slot](), itertools.count()

        def push(level: int, value: float, own: Masses, draws: int, place: int) -> None:
            if draws + 1 < len(own):
                heapq.heappush(slots, Slot(-value * own[draws], level, next(numbers), value, own, draws, place))

        def push_child(level: int, value: float, own: Masses, draws: int) -> None:
            if level + 1 < self._levels:
                push(level + 1, value * (own[draws] - own[draws + 1]), self._usual, 0, -1)

        for place, (value, own) in enumerate(zip(self._values, masses, strict=True)):
            for draws in range(least):
                push_child(0, value, own, draws)
            push(0, value, own, least, place)
        left = self._left - least * len(masses)
        while slots and left:
            _, level, _, value, own, draws, place = heapq.heappop(slots)
            if place >= 0:
                counts[place] += 1
            push_child(level, value, own, draws)
            push(level, value, own, draws + 1, place)
            left -= 1
        return counts


def undrawn(law: TokenLaw, most: int) -> Masses:
    """Chances [n + 1] that a token of the law is not among the first 0, 1, ..., n draws, where n is `most` or the
    number of tokens that can be drawn. Estimated by draws with replacement: sum over x of q[x] (1 - q[x])^draws, exact
    up to one draw."""
    count = min(most, int((law.probabilities > 0).sum()))
    found, weights, missed = list[float](), law.probabilities, 1.0 - law.probabilities
    for _ in range(count + 1):
        found.append(math.fsum(weights.tolist()))  # exact: numpy's sums differ between processors
        weights = weights * missed
    return found


def has_drawn_form(tree: DraftTree, shape: DynamicShape) -> bool:
    """True if a tree has the form that its own laws and tokens decide: no guess is missing and none is too many."""
    tokens, parents, laws = tree.tokens.tolist(), tree.parents.tolist(), {law.row: law for law in tree.laws}
    form, frontier, rows = DrawnForm(shape), [0], 1
    while frontier:
        if not laws.keys() >= set(frontier):
            return False
        widths, first, drawn = form.widths([laws[row] for row in frontier]), rows, list[list[int]]()
        for row, width in zip(frontier, widths, strict=True):
            if parents[rows : rows + width] != [row] * width:
                return False
            drawn.append(tokens[rows : rows + width])
            rows += width
        try:
            frontier = [first + place for place in form.descend(drawn)]
        except KeyError:
            return False
    return rows == tree.rows
