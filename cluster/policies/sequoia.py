"""Sequoia's dynamic program: the static tree that emits the most tokens a second
(docs/design/policies.md#optimal-trees).

`accept[d][j]` is the chance that the j-th child of a row of depth d carries the target's token, given that the row was
accepted. A tree then emits E[N] tokens, the target's own included: the sum over its rows of the product of the chances
on the path to them, 1 for the root, since each emitted token needs one more row reached. The best subtree of y rows
below a row of depth d does not depend on its siblings, so for every number of rows and greatest depth

    T[d][r][m]  = 1 + H[d][r][0][m - 1]                                          m rows, r levels below a row of depth d
    H[d][r][j][n] = max over y of accept[d][j] * T[d + 1][r - 1][y] + H[d][r][j + 1][n - y]      children j, j + 1, ...

In Sequoia (arXiv 2402.12374) chances depend on j alone; here they may depend on the depth, too.

Where a drafter's forward takes longer with more rows, a tree that emits a little less from fewer forwarded rows can be
better. Then the rows with children are chosen first, as those likeliest to be reached, because a row's children are
worth in proportion to its own chance; and of all their children the likeliest are taken. Where chances depend on j
alone and fall with it, no tree with as many rows, forwarded rows and greatest depth emits more.

Of all trees found in both ways, the one with the least predicted time per token is returned.

>>> best_tree([0.5, 0.25], level_us=lambda rows: 0.0, step_us=lambda rows: 1.0, max_rows=4, max_depth=3)
Found(shape=NodeShape(children=(2, 1)), emitted=2.0, round_us=1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt
from dendro.shapes import MAX_ROWS, NodeShape, TreeShape, child_counts

from cluster.policies.replay import mean_emitted

Accept = Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[np.float64]
"""Acceptance chances a[j], or a[d][j] with the last row also for all greater depths: the chance that the j-th child of
an accepted row of depth d is accepted."""
TimeOf = Callable[[int], float]
"""Microseconds of a forward, by its number of rows."""
NEVER = -np.inf
SURPLUS = 1e-6
"""Most by which the chances of siblings may exceed 1 together: files have chances of 6 digits."""
SAME = 1e-12
"""Relative difference below which two trees are equally good; the tree found first is taken."""


@dataclass(frozen=True, slots=True)
class Found:
    """A tree, and the tokens and time predicted for a round with it."""

    shape: NodeShape
    emitted: float  # E[N], with the target's own token
    round_us: float

    @property
    def tokens_per_second(self) -> float:
        return 1e6 * self.emitted / self.round_us


def chances(accept: Accept, depth: int) -> npt.NDArray[np.float64]:
    """`accept` as [depth, children]; the last row given is repeated for greater depths.

    Raises ValueError for numbers that are not chances, and for siblings with a sum above 1.
    """
    given = np.asarray(accept, np.float64)
    table = given[None] if given.ndim == 1 else given
    if table.ndim != 2 or not table.size:
        raise ValueError(f"accept: has the shape {given.shape}; give a[j] or a[d][j]")
    if not np.isfinite(table).all() or (table < 0).any() or (table.sum(1) > 1 + SURPLUS).any():
        raise ValueError("accept: each number must lie in [0, 1], the chances of siblings together at most 1")
    return table[np.minimum(np.arange(depth), len(table) - 1)]


def forwarded_rows(shape: TreeShape) -> tuple[int, ...]:
    """Rows of each of the drafter's forwards: the rows of one level that have children."""
    rows, counts = [], child_counts(shape)
    start, stop = 0, 1
    while below := sum(counts[start:stop]):
        rows.append(sum(count > 0 for count in counts[start:stop]))
        start, stop = stop, stop + below
    return tuple(rows)


def expected_tokens(shape: TreeShape, accept: Accept) -> float:
    """E[N] of a tree of fixed form. Raises ValueError where a row has more children than `accept` has chances."""
    table = chances(accept, max(shape.depth, 1))
    if shape.width > table.shape[1]:
        raise ValueError(f"accept: has chances of {table.shape[1]} siblings, but {shape} has up to {shape.width}")
    return mean_emitted(shape, table)


def draft_and_step_us(shape: TreeShape, level_us: TimeOf, step_us: TimeOf) -> float:
    """Microseconds to draft and verify a tree of fixed form, without what is independent of the tree."""
    return sum(map(level_us, forwarded_rows(shape))) + step_us(shape.rows)


def best_tree(
    accept: Accept,
    level_us: TimeOf,
    step_us: TimeOf,
    *,
    fixed_us: float = 0.0,
    max_rows: int = MAX_ROWS,
    max_depth: int = 10,
    max_children: int = 8,
) -> Found:
    """Find the tree of least predicted time per token.

    It is optimal if the time of a drafter's forward does not depend on its rows, or grows by the row while chances
    depend on the place among siblings alone and fall with it. Otherwise it is near the optimum.

    level_us: time of a drafter's forward, by rows   step_us: time of a verifier's step, padding included, by rows
    before padding   fixed_us: microseconds of a round that do not depend on its tree
    Raises ValueError, naming the argument.
    """
    if not 2 <= max_rows <= MAX_ROWS:
        raise ValueError(f"max_rows: {max_rows}; 2 to {MAX_ROWS}, with the root")
    if max_depth < 1:
        raise ValueError(f"max_depth: {max_depth}; at least 1")
    if max_children < 1:
        raise ValueError(f"max_children: {max_children}; at least 1")
    deepest = min(max_depth, max_rows - 1)
    steps = {rows: step_us(rows) for rows in range(2, max_rows + 1)}
    table = chances(accept, deepest)[:, :max_children]
    best: Found | None = None
    for shape in (
        *(shape for shape, _ in longest_trees(table, max_rows, deepest, max_children)),
        *thrifty_trees(table, level_us, steps.__getitem__, fixed_us, max_rows),
    ):
        round_us = fixed_us + draft_and_step_us(shape, level_us, steps.__getitem__)
        found = Found(shape, expected_tokens(shape, table), round_us)
        if best is None or found.round_us * best.emitted < (1 - SAME) * best.round_us * found.emitted:
            best = found
    assert best is not None
    return best


def thrifty_trees(
    table: npt.NDArray[np.float64], level_us: TimeOf, step_us: TimeOf, fixed_us: float, max_rows: int
) -> Iterator[NodeShape]:
    """Yield, for each greatest depth, the tree of least time per token among those whose rows with children are the
    likeliest rows. table [depth, children]: chances"""
    steps = np.array([step_us(max(rows, 2)) for rows in range(max_rows + 1)])
    for depth in range(1, len(table) + 1):
        candidates = _OpenRows(table, depth)
        best, least = None, np.inf
        while candidates.open() and len(candidates.parents) < max_rows:
            order = candidates.order()
            emitted = 1 + np.cumsum(candidates.reached(order[: max_rows - 1]))  # E[N] of trees of 2 rows, 3 and so on
            took = fixed_us + sum(map(level_us, candidates.forwarded)) + steps[2 : 2 + len(emitted)]
            per_token = took / emitted
            rows = int(per_token.argmin())
            if per_token[rows] < least:
                best, least = candidates.tree(order[: rows + 1]), per_token[rows]
        if best is not None:
            yield best


class _OpenRows:
    """Candidate rows: all children of the rows opened so far, at first none."""

    def __init__(self, table: npt.NDArray[np.float64], depth: int) -> None:
        self._table = table
        self._depth = depth
        self._nodes: list[tuple[int, float]] = [(0, 1.0)]  # depth, chance to be reached; the root, then the candidates
        self._keys = [1.0]  # sort keys: no sibling comes before one on its left
        self._above = [-1]
        self._waiting = [(-1.0, 0)]  # a heap of nodes that may be opened, the likeliest first
        self.parents: list[int] = []  # nodes with children
        self.forwarded: list[int] = []  # number of nodes with children, by level

    def open(self) -> bool:
        """Add the children of the likeliest unopened node to the candidates; False where none is left."""
        if not self._waiting:
            return False
        negative, node = heappop(self._waiting)
        level, reach = self._nodes[node]
        self.parents.append(node)
        self.forwarded += [0] * (level + 1 - len(self.forwarded))
        self.forwarded[level] += 1
        key = -negative
        for chance in self._table[level].tolist():
            key = min(key, reach * chance)
            if level + 1 < self._depth:
                heappush(self._waiting, (-key, len(self._nodes)))
            self._nodes.append((level + 1, reach * chance))
            self._keys.append(key)
            self._above.append(node)
        return True

    def order(self) -> npt.NDArray[np.int64]:
        """All candidates, the likeliest first; each comes after its parent and its siblings on the left."""
        return 1 + np.argsort(-np.array(self._keys[1:]), kind="stable")

    def reached(self, nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.array([self._nodes[node][1] for node in nodes])

    def tree(self, nodes: npt.NDArray[np.int64]) -> NodeShape:
        """The tree of the root and these candidates."""
        below: dict[int, list[int]] = {}
        for node in sorted(nodes.tolist()):
            below.setdefault(self._above[node], []).append(node)
        level, counts = [0], []
        for node in level:  # extended while it is iterated
            level += below.get(node, [])
            counts.append(len(below.get(node, [])))
        return _shape(counts)


def _shape(counts: Sequence[int]) -> NodeShape:
    """The shape of a tree whose rows have these numbers of children."""
    return NodeShape(tuple(counts[: max(row for row, count in enumerate(counts) if count) + 1]))


def longest_trees(
    accept: Accept, max_rows: int, max_depth: int, max_children: int
) -> Iterator[tuple[NodeShape, float]]:
    """Yield, for each number of rows and greatest depth, the tree that emits most and its E[N]; fewer rows first."""
    program = _Program(chances(accept, max_depth)[:, :max_children], max_rows)
    for rows in range(2, max_rows + 1):
        seen = NEVER
        for depth in range(1, min(max_depth, rows - 1) + 1):
            emitted = float(program.emitted[depth][0, rows])
            if emitted > seen:  # a deeper tree that emits no more is left out
                yield program.tree(rows, depth), emitted
                seen = emitted


class _Program:
    """The tables of the dynamic program."""

    def __init__(self, table: npt.NDArray[np.float64], max_rows: int) -> None:
        """table: [depth, children] chances"""
        depths, children = table.shape
        sizes = np.arange(max_rows + 1)
        alone = np.full(max_rows + 1, NEVER)
        alone[1] = 1.0
        # emitted[r][d, m] is T[d][r][m]; with no level below, the row is alone.
        self.emitted = [np.tile(alone, (depths + 1, 1))]
        # taken[r][j][d, n] is the y of H[d][r][j][n]: rows of the subtree of child j.
        self.taken: list[list[npt.NDArray[np.int64]]] = [[]]
        rest = np.maximum(sizes[:, None] - sizes[None, :], 0)  # [n, y]
        forbidden = (sizes[None, :] < 1) | (sizes[None, :] > sizes[:, None])
        for below in range(1, depths + 1):
            starts = depths + 1 - below  # number of depths that have room for `below` more levels
            under = self.emitted[below - 1][1 : starts + 1]  # [starts, y]
            forest = np.full((starts, max_rows + 1), NEVER)  # H of a row to which no child is left to be added
            forest[:, 0] = 0.0
            taken = []
            for child in reversed(range(children)):
                reached = table[:starts, child, None] * np.where(np.isfinite(under), under, 0.0)
                reached[~np.isfinite(under)] = NEVER
                ways = reached[:, None, :] + forest[:, rest]  # [starts, n, y]
                ways[:, forbidden] = NEVER
                most = ways.argmax(2)
                forest = np.take_along_axis(ways, most[..., None], 2)[..., 0]
                forest[:, 0] = 0.0
                taken.append(most)
            trees = np.full((starts, max_rows + 1), NEVER)
            trees[:, 1:] = 1.0 + forest[:, :-1]
            self.emitted.append(trees)
            self.taken.append(taken[::-1])

    def tree(self, rows: int, depth: int) -> NodeShape:
        """The tree of `rows` rows and at most `depth` levels that emits the most."""
        waiting, counts = [(0, depth, rows)], []
        for above, below, size in waiting:  # extended while it is iterated, level by level
            left, child = size - 1, 0
            while left:
                part = int(self.taken[below][child][above, left])
                waiting.append((above + 1, below - 1, part))
                left, child = left - part, child + 1
            counts.append(child)
        return _shape(counts)
