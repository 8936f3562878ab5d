"""What a round costs, measured piece by piece: a verifier's step by its rows, a drafter's tree by its shape.

A round that is replayed is charged by this table, so that its time is the same whenever it is replayed, and two ways to
go differ by what they do alone. Router, hops and queues are not in it: `dendro bench speed` has those.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dendro.calls import DrafterPeer, VerifierPeer
from dendro.shapes import MAX_ROWS, LevelShape, TreeShape
from dendro.text import Sampling
from dendro.tree import DraftTree

from cluster.bench.traces import EngineText, is_static
from cluster.policies.sequoia import forwarded_rows

STEP_ROWS = (1, *range(8, MAX_ROWS + 1, 8))
LEVEL_ROWS = (1, 2, 4, 8, 16, 31)
"""Of a drafter's level. A tree of 64 rows has no wider one that goes through the model, but for a dynamic tree's."""


@dataclass(slots=True)
class ReplayCosts:
    """Microseconds at one temperature; medians once measured."""

    step: dict[int, float] = field(default_factory=dict)  # of the verifier, by rows
    draft: dict[TreeShape, float] = field(default_factory=dict)  # of the drafter's tree

    def step_us(self, rows: int) -> float:
        """A step of so many rows: those of the next number measured, as steps are padded."""
        fitting = [measured for measured in self.step if measured >= rows]
        return self.step[min(fitting)]

    def draft_us(self, shape: TreeShape) -> float:
        """A tree of this shape; predicted from levels where it was not measured."""
        if not shape.drafted:
            return 0.0
        return self.draft[shape] if shape in self.draft else self.predicted_draft_us(shape)

    def round_us(self, shape: TreeShape) -> float:
        """A round in which the tree is as large as it may be."""
        return self.draft_us(shape) + self.step_us(shape.rows)

    def level_us(self, rows: int) -> float:
        """A level of so many rows: what a tree of two levels takes more than one of a single level as wide."""
        measured = {wide: self.draft[two] - self.draft[one] for wide, (one, two) in level_shapes().items()}
        above = min((wide for wide in measured if wide >= rows), default=max(measured))
        below = max((wide for wide in measured if wide <= rows), default=above)
        share = (rows - below) / (above - below) if above > below else 0.0
        return measured[below] + share * (measured[above] - measured[below])

    def predicted_draft_us(self, shape: TreeShape) -> float:
        """A static tree by its levels: the root's, which every tree has, and those of rows that get children."""
        if not is_static(shape):
            raise ValueError(f"shape: what {shape} costs was not measured")
        return self.draft[LevelShape((1,))] + sum(map(self.level_us, forwarded_rows(shape)[1:]))


def level_shapes() -> Mapping[int, tuple[LevelShape, LevelShape]]:
    """Rows of a level -> a tree in which it is not read, and one in which it is, alike but for that."""
    return {rows: (LevelShape((rows,)), LevelShape((rows, 1))) for rows in LEVEL_ROWS}


def star(root: int, rows: int) -> DraftTree:
    """A tree of so many rows."""
    return DraftTree.of([root, *range(rows - 1)], [-1] + [0] * (rows - 1))


async def _timed(what: Awaitable[Any]) -> float:
    started = time.perf_counter()
    await what
    return 1e6 * (time.perf_counter() - started)


async def measure_steps(
    verifier: VerifierPeer, ids: Sequence[int], temperature: float, repetitions: int, step: Callable[[], None]
) -> dict[int, float]:
    """A verifier's step by rows, on one text, interleaved. Verdicts are dropped; the first of each is not counted."""
    peer = EngineText(ids, Sampling(temperature=temperature))
    await peer.open(verifier, MAX_ROWS)
    times: dict[int, list[float]] = {rows: [] for rows in STEP_ROWS}
    for _ in range(repetitions + 1):
        for rows, taken in times.items():
            taken.append(await _timed(peer.verify(verifier, star(ids[-1], rows), len(ids))))
        step()
    await peer.close(verifier)
    return {rows: statistics.median(taken[1:]) for rows, taken in times.items()}


async def measure_drafts(
    drafter: DrafterPeer,
    ids: Sequence[int],
    temperature: float,
    shapes: Sequence[TreeShape],
    repetitions: int,
    step: Callable[[], None],
) -> dict[TreeShape, float]:
    """A drafter's tree by shape, on one text, interleaved. The first of each is not counted.

    Each begins where the last one did: the root is read anew, as in a round of which nothing was guessed.
    """
    peer = EngineText(ids, Sampling(temperature=temperature))
    await peer.open(drafter, MAX_ROWS)
    wanted = dict.fromkeys([*shapes, *(shape for pair in level_shapes().values() for shape in pair)])
    times: dict[TreeShape, list[float]] = {shape: [] for shape in wanted if shape.drafted}
    for _ in range(repetitions + 1):
        for shape, taken in times.items():
            taken.append(await _timed(peer.draft(drafter, shape, len(ids))))
        step()
    await peer.close(drafter)
    return {shape: statistics.median(taken[1:]) for shape, taken in times.items()}
