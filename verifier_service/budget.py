"""Decides which guesses a step verifies, and whether it waits for more texts, by the measured times of steps.

Under load, guesses are dropped first.

A step has b rows that must be computed. The guesses of all texts are sorted by the probability p that they are reached.
With the first m of them the step emits (texts + p_1 + ... + p_m) expected tokens in the time T(b + m), and m maximises
the tokens per second (docs/design/policies.md#trimming, after TurboSpec's goodput). The target's tokens do not depend
on the trees, so dropping guesses changes none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from dendro.calls import VerifyCall
from dendro.clock import Clock
from dendro.measured import OUTLIER
from dendro.tree import DraftTree

from verifier_service.requests import VerifierText

SMOOTHING = 0.1
LINGER = 0.75
"""Longest wait for rounds expected soon, as a share of the time that one common step saves over two separate ones."""

Floats = npt.NDArray[np.float64]


class StepCosts:
    """Measured times of steps by padded number of rows, linear between the sizes that were seen."""

    def __init__(self) -> None:
        self._us: dict[int, float] = {}

    def learn(self, rows: int, us: float) -> None:
        """Record the microseconds of a step. rows: its rows, padding included"""
        usual = self._us.get(rows)
        if usual is None:
            self._us[rows] = us
        else:
            self._us[rows] = usual + SMOOTHING * (min(us, OUTLIER * usual) - usual)

    @property
    def known(self) -> bool:
        """True if two sizes were seen, which a line needs."""
        return len(self._us) > 1

    def us(self, rows: npt.NDArray[np.int64]) -> Floats:
        """Microseconds of steps of these numbers of rows. Past the largest size seen they lie on the line through it
        and the smallest."""
        sizes = sorted(self._us)
        times = np.maximum.accumulate([self._us[size] for size in sizes])  # a step of more rows is not faster
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
        inside = np.interp(rows, sizes, times)
        times_us: Floats = inside + slope * np.maximum(rows - sizes[-1], 0)
        return times_us


def reached(trees: Sequence[DraftTree]) -> Floats:
    """Drafters' estimates of the chance that each row of these trees is reached, tree after tree, at most its
    parent's."""
    values = np.concatenate([tree.values for tree in trees]).astype(np.float64)
    counts = [tree.rows for tree in trees]
    above = np.concatenate([tree.parents for tree in trees]) + np.repeat(np.cumsum(counts) - counts, counts)
    roots = np.cumsum(counts) - counts
    above[roots] = roots
    while (least := np.minimum(values, values[above])).tobytes() != values.tobytes():
        values = least
    chances: Floats = np.exp(values)
    return chances


def worthwhile(
    trees: Sequence[DraftTree], must: int, most: int, sizes: Sequence[int], costs: StepCosts
) -> list[DraftTree]:
    """Drop the guesses that are not worth their rows. Returns the trees without them; ancestors of kept guesses stay.

    trees: at least one   must: rows that the step has anyway, the trees' roots among them   most: guesses that fit
    sizes: numbers of rows to which steps are padded. Guesses of equal chance are kept in the order of the texts.

    Two texts have a guess each, with chances 0.9 and 0.1. A step of 2 rows takes 10 ms, each further row 2 ms: 2 / 10,
    2.9 / 12 and 3 / 14 tokens a millisecond, so one guess is kept.

    >>> costs = StepCosts()
    >>> costs.learn(2, 10_000.0), costs.learn(4, 14_000.0)
    (None, None)
    >>> trees = [DraftTree.of([5, 6], [-1, 0], np.log([1.0, chance])) for chance in (0.9, 0.1)]
    >>> [tree.rows for tree in worthwhile(trees, must=2, most=8, sizes=(2, 3, 4), costs=costs)]
    [2, 1]
    """
    counts = np.array([tree.rows for tree in trees])
    ends = np.cumsum(counts)
    roots, chances = ends - counts, reached(trees)
    guesses = np.delete(np.arange(len(chances)), roots)
    order = guesses[np.argsort(-chances[guesses], kind="stable")]
    count = min(len(order), most)
    if costs.known and len(trees) > 1 and count:
        gains = len(trees) + np.concatenate([[0.0], np.cumsum(chances[order[:count]])])
        padded = np.array(sizes)[np.minimum(np.searchsorted(sizes, must + np.arange(count + 1)), len(sizes) - 1)]
        count = int(np.argmax(gains / costs.us(padded)))
    if count == len(order):
        return list(trees)
    kept = np.ones(len(chances), np.bool_)
    kept[order[count:]] = False
    parts = zip(trees, roots.tolist(), ends.tolist(), strict=True)
    return [subtree(tree, kept[first:end]) for tree, first, end in parts]


def subtree(tree: DraftTree, kept: npt.NDArray[np.bool_]) -> DraftTree:
    """The part of a tree that has the rows where `kept` [rows] is True. The parent of a kept row must be kept, too."""
    if kept.all():
        return tree
    place = np.append(np.cumsum(kept) - 1, -1)  # the last place is that of the root's parent
    return DraftTree.unchecked(tree.tokens[kept], place[tree.parents[kept]], tree.values[kept], tree.proposer)


def path_in(tree: DraftTree, tokens: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows and ranks, in a whole tree, of the path with these tokens below the root. It translates the walk through a
    trimmed tree into the tree that was sent."""
    path, ranks = [0], list[int]()
    for token in tokens:
        children = tree.children(path[-1])
        rank = next(rank for rank, row in enumerate(children) if tree.tokens[row] == token)
        path.append(children[rank])
        ranks.append(rank)
    return tuple(path), tuple(ranks)


def worth_waiting(
    sessions: Collection[VerifierText], costs: StepCosts, size: int, ended_s: float, clock: Clock
) -> float:
    """Seconds to delay the next step for rounds that are expected soon; mostly 0. sessions: two or more

    size: padded rows of the last step   ended_s: time at which the last step's answers were sent

    One text waits since 1.000 s, another was answered then and usually returns after 2 ms. Each step alone takes 10 ms,
    both texts in one step 11 ms: waiting pays for up to 0.75 * (10 + 10 - 11) = 6.75 ms.
    """
    if not costs.known:
        return 0.0
    now = clock()
    usual_s = costs.us(np.array([size]))[0] / 1e6
    waiting_since, next_return, rows, others = math.inf, math.inf, 0, 0
    for session in sessions:
        if session.opening is not None:
            if session.admitted:
                return 0.0
        elif session.asks:
            call = session.asks[0].call
            assert isinstance(call, VerifyCall)
            # A text that arrived while a step ran counts as waiting from the step's end: else two halves of the texts,
            # each waiting while the other's step runs, would never share one.
            waiting_since = min(waiting_since, max(session.asks[0].ticket.arrived_s, ended_s))
            rows += call.tree.rows
        elif session.answered is not None and max(session.away_s, now - session.answered) < usual_s:
            next_return = min(next_return, session.answered + session.away_s)
            others += session.rows
    if not rows or not others:
        return 0.0
    rows_us, others_us, together_us = costs.us(np.array([rows, others, rows + others]))
    until = waiting_since + LINGER * (rows_us + others_us - together_us) / 1e6
    return max(until - now, 0.0) if next_return <= until else 0.0
