"""How many guesses a step is worth, and which: when many texts share a forward, speculation is shed first.

With `b` rows that must be computed and the guesses of all texts sorted by the chance p that they are reached, the step
gives (texts + p_1 + ... + p_m) tokens in T(b + m), and m is chosen for the most tokens per second (ALGORITHMS 10.4,
after TurboSpec's goodput). The target's tokens do not depend on the trees, so leaving guesses out loses nothing but
their chance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from dendro.tree import DraftTree

SMOOTHING = 0.1
OUTLIER = 3.0
"""A step that took longer than this many times the usual counts as that."""

Floats = npt.NDArray[np.float64]


class StepCosts:
    """What steps took, by their padded number of rows. Between the sizes that were seen, a straight line."""

    def __init__(self) -> None:
        self._us: dict[int, float] = {}

    def learn(self, rows: int, us: float) -> None:
        usual = self._us.get(rows)
        if usual is None:
            self._us[rows] = us
        else:
            self._us[rows] = usual + SMOOTHING * (min(us, OUTLIER * usual) - usual)

    @property
    def known(self) -> bool:
        """Whether there is a line at all."""
        return len(self._us) > 1

    def us(self, rows: npt.NDArray[np.int64]) -> Floats:
        """The time of steps of so many rows; past the largest seen, the line from the smallest through it goes on."""
        sizes = sorted(self._us)
        times = np.maximum.accumulate([self._us[size] for size in sizes])  # more rows are not faster
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
        inside = np.interp(rows, sizes, times)
        return inside + slope * np.maximum(rows - sizes[-1], 0)


def reached(tree: DraftTree) -> Floats:
    """[rows] the chance that each row is reached, by the drafter's word; no row's is above its parent's."""
    values = tree.values.astype(np.float64)
    for row in range(1, tree.rows):
        values[row] = min(values[row], values[tree.parents[row]])
    return np.exp(values)


def worthwhile(
    trees: Sequence[DraftTree], must: int, most: int, sizes: Sequence[int], costs: StepCosts
) -> list[DraftTree]:
    """The trees without the guesses that are not worth their rows.

    must: rows that the step has anyway, the trees' roots among them   most: guesses that fit   sizes: numbers of rows
    that steps are padded to. Ancestors of a guess that stays all stay; where chances are equal, the earlier text's.
    """
    chances = [reached(tree) for tree in trees]
    order = sorted(
        (-chance, place, row) for place, each in enumerate(chances) for row, chance in enumerate(each.tolist()) if row
    )
    count = min(len(order), most)
    if costs.known and len(trees) > 1 and count:
        gains = len(trees) + np.concatenate([[0.0], np.cumsum([-chance for chance, _, _ in order[:count]])])
        rows = must + np.arange(count + 1)
        padded = np.array([sizes[min(bisect_left(sizes, each), len(sizes) - 1)] for each in rows])
        count = int(np.argmax(gains / costs.us(padded)))
    kept: list[list[int]] = [[0] for _ in trees]
    for _, place, row in order[:count]:
        kept[place].append(row)
    return [
        tree if len(rows) == tree.rows else subtree(tree, sorted(rows)) for tree, rows in zip(trees, kept, strict=True)
    ]


def subtree(tree: DraftTree, rows: Sequence[int]) -> DraftTree:
    """The tree of these rows alone, in ascending order; the parent of each is among them."""
    place = {row: index for index, row in enumerate(rows)}
    parents = np.array([-1, *(place[int(tree.parents[row])] for row in rows[1:])], tree.parents.dtype)
    return DraftTree(tree.tokens[list(rows)], parents, tree.values[list(rows)], tree.proposer)


def path_in(tree: DraftTree, tokens: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows and ranks of the path in a whole tree that carries these tokens below the root: a subtree's walk, told in
    the rows of the tree that was sent."""
    path, ranks = [0], list[int]()
    for token in tokens:
        children = tree.children(path[-1])
        rank = next(rank for rank, row in enumerate(children) if tree.tokens[row] == token)
        path.append(children[rank])
        ranks.append(rank)
    return tuple(path), tuple(ranks)
