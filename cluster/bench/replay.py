"""Rounds of recorded answers, with the times of a table of measured costs.

Emitted tokens come from the trace, times from the table. So replays are deterministic, and every way to guess is
compared on the same text. Costs of router, hops and queues are not included: `dendro bench speed` measures those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dendro.shapes import MAX_ROWS, LevelShape, TreeShape
from tree_kernels import FEW_ROWS, ROW_MULTIPLE

from cluster.bench.traces import Trace, is_static
from cluster.measure.statistics import Key
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


def costed(shapes: Sequence[TreeShape]) -> list[TreeShape]:
    """The shapes whose drafts are measured for a table that has these: also those from which levels are computed."""
    wanted = dict.fromkeys([*shapes, *(shape for pair in level_shapes().values() for shape in pair)])
    return [shape for shape in wanted if shape.drafted]


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """One round of a replay."""

    emitted: int
    guesses: int
    took_us: float


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedAnswer:
    """All rounds of one answer."""

    trace: Trace
    rounds: tuple[ReplayedRound, ...]

    @property
    def tokens_per_second(self) -> float:
        return rate([self])


def rate(runs: Sequence[ReplayedAnswer]) -> float:
    """Tokens a second over all rounds of all answers."""
    rounds = [played for run in runs for played in run.rounds]
    return 1e6 * sum(played.emitted for played in rounds) / sum(played.took_us for played in rounds)


def rates(runs: Sequence[ReplayedAnswer]) -> dict[Key, float]:
    """Tokens a second of each answer, for `paired_ratio`."""
    return by_answer([run.tokens_per_second for run in runs])


def by_answer(values: Sequence[float]) -> dict[Key, float]:
    """Values of answers, for `paired_ratio`."""
    return {(index, 0): value for index, value in enumerate(values)}


def run_fixed(shape: TreeShape, trace: Trace, costs: ReplayCosts) -> ReplayedAnswer:
    """Replay one answer with the same shape in every round."""
    rounds = []
    for base, emitted in trace.rounds(shape):
        rows, draft_us = trace.rows(shape, base), costs.draft_us(trace.drafted_as(shape, base))
        rounds.append(ReplayedRound(emitted, rows - 1, draft_us + costs.step_us(rows)))
    return ReplayedAnswer(trace, tuple(rounds))
