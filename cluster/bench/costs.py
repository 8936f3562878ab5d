"""Measured costs of the parts of a round: a verifier's step by its rows, a drafter's tree by its shape.

Replayed rounds take the times of this table, so replays are deterministic and arms can be compared. Costs of router,
hops and queues are not included: `dendro bench speed` measures those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dendro.calls import DrafterPeer, VerifierPeer
from dendro.shapes import MAX_ROWS, LevelShape, TreeShape
from dendro.text import Sampling
from tree_kernels import FEW_ROWS, ROW_MULTIPLE

from cluster.bench.traces import is_static
from cluster.measure.in_process import EngineText, star
from cluster.measure.measurement import Step
from cluster.measure.turns import by_turns, medians_us
from cluster.policies.sequoia import forwarded_rows

STEP_ROWS = tuple(sorted({*FEW_ROWS, *range(ROW_MULTIPLE, MAX_ROWS + 1, ROW_MULTIPLE)}))
LEVEL_ROWS = (1, 2, 4, 8, 16, 31)
"""Forwarded rows of a drafter's level. A static tree of 64 rows forwards at most 31 per level; a dynamic one more."""


@dataclass(slots=True)
class ReplayCosts:
    """Median costs in microseconds, at one temperature."""

    step: dict[int, float] = field(default_factory=dict)  # rows -> verifier step
    draft: dict[TreeShape, float] = field(default_factory=dict)  # shape -> drafting a tree

    def step_us(self, rows: int) -> float:
        """A step of `rows` rows: the cost of the next larger measured number, as steps are padded."""
        fitting = [measured for measured in self.step if measured >= rows]
        return self.step[min(fitting)]

    def draft_us(self, shape: TreeShape) -> float:
        """Drafting a tree of this shape; predicted from its levels if it was not measured."""
        if not shape.drafted:
            return 0.0
        return self.draft[shape] if shape in self.draft else self.predicted_draft_us(shape)

    def round_us(self, shape: TreeShape) -> float:
        """A round whose tree has all of its shape's rows."""
        return self.draft_us(shape) + self.step_us(shape.rows)

    def level_us(self, rows: int) -> float:
        """A level of `rows` rows: the cost of tree (rows,1) less that of (rows); linear between measured numbers."""
        measured = {wide: self.draft[two] - self.draft[one] for wide, (one, two) in level_shapes().items()}
        above = min((wide for wide in measured if wide >= rows), default=max(measured))
        below = max((wide for wide in measured if wide <= rows), default=above)
        share = (rows - below) / (above - below) if above > below else 0.0
        return measured[below] + share * (measured[above] - measured[below])

    def predicted_draft_us(self, shape: TreeShape) -> float:
        """A static tree: the root's level plus the levels whose rows have children. Raises ValueError for others."""
        if not is_static(shape):
            raise ValueError(f"shape: the cost of {shape} was not measured")
        return self.draft[LevelShape((1,))] + sum(map(self.level_us, forwarded_rows(shape)[1:]))


def level_shapes() -> Mapping[int, tuple[LevelShape, LevelShape]]:
    """Rows of a level -> two trees whose drafting differs only by the forward of that level."""
    return {rows: (LevelShape((rows,)), LevelShape((rows, 1))) for rows in LEVEL_ROWS}


async def measure_steps(
    verifier: VerifierPeer, ids: Sequence[int], temperature: float, repetitions: int, step: Step
) -> dict[int, float]:
    """Rows -> a verifier's step, on one text, interleaved. Verdicts are not committed; each first step is warm-up."""
    peer = EngineText(ids, Sampling(temperature=temperature))
    await peer.open(verifier, MAX_ROWS)
    times = await by_turns(
        STEP_ROWS, lambda rows: peer.verify(verifier, star(ids[-1], rows), len(ids)), repetitions, step
    )
    await peer.close(verifier)
    return medians_us(times)


async def measure_drafts(
    drafter: DrafterPeer,
    ids: Sequence[int],
    temperature: float,
    shapes: Sequence[TreeShape],
    repetitions: int,
    step: Step,
) -> dict[TreeShape, float]:
    """Shape -> drafting a tree, on one text, interleaved. The first draft of each shape is warm-up.

    All drafts start at the same text length: each reads the root again, as after a round that accepted no guess.
    """
    peer = EngineText(ids, Sampling(temperature=temperature))
    await peer.open(drafter, MAX_ROWS)
    wanted = dict.fromkeys([*shapes, *(shape for pair in level_shapes().values() for shape in pair)])
    drafted = [shape for shape in wanted if shape.drafted]
    times = await by_turns(drafted, lambda shape: peer.draft(drafter, shape, len(ids)), repetitions, step)
    await peer.close(drafter)
    return medians_us(times)
