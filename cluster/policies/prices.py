"""Predicted round times of arms, from measured costs."""

from __future__ import annotations

from dendro.step_sizes import StepSizes
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.policies.classes import row_class
from cluster.policies.costs import LEAST_US, TRIED, Costs


def hops(arm: Arm) -> int:
    """Number of calls to peers that a round of this arm waits for, one after the other."""
    return 2 if arm.drafted else 1


class Prices:
    """Predicts round times from the current costs under one load class. A policy makes one for each choice.

    A plain step of 10 ms, a draft of 2 ms, and calls of 0.1 ms beyond the peers' own time:

    >>> chain, costs = Arm.parse("mamba:(1,1)"), Costs()
    >>> costs.hop.learn(100.0)
    >>> costs.step.learn(rows=1, us=10_000.0, degree=1)
    >>> for _ in range(TRIED):
    ...     costs.learn_draft(chain, us=2_000.0)
    >>> Prices(costs, degree=1, sizes=StepSizes()).predicted_us(chain)
    12200.0
    """

    __slots__ = ("_costs", "_degree", "_sizes")

    def __init__(self, costs: Costs, degree: int, sizes: StepSizes) -> None:
        """degree: of the step-time polynomial   sizes: padded sizes of the target's steps"""
        self._costs, self._degree, self._sizes = costs, degree, sizes

    def round_us(self, arm: Arm, rows: float | None = None) -> float | None:
        """Predicted microseconds of a round of this arm; None until it was measured (`Experience.round_us`)."""
        costs = self._costs
        if rows is None:
            rows = self._rows(arm)
        if costs.tried[row_class(round(rows))] < TRIED:
            return None
        if arm.drafted and ((draft := costs.draft.get(arm)) is None or not draft.known):
            return None
        return self.predicted_us(arm, rows)

    def predicted_us(self, arm: Arm, rows: float | None = None) -> float | None:
        """Predicted microseconds of a round, also of an arm never played (`Experience.predicted_us`)."""
        costs = self._costs
        if not costs.step.sizes:
            return None
        draft_us = costs.draft_us(arm) if arm.drafted else 0.0
        if draft_us is None:
            return None
        if rows is None:
            rows = self._rows(arm)
        verify_us = self.verify_us(rows)
        ahead_us = costs.ahead.us if arm.off else 0.0  # a text that stays `off` has its rounds begun ahead
        return max(draft_us + verify_us + hops(arm) * costs.hop_us(arm.off) - ahead_us, LEAST_US)

    def spent_us(self, arm: Arm, tree: DraftTree) -> float:
        """Microseconds of a round with this tree: the measured draft, plus predicted step and hops."""
        return tree.draft_us / tree.texts + self.verify_us(tree.rows) + hops(arm) * self._costs.hop_us(arm.off)

    @property
    def ahead_us(self) -> float:
        """Microseconds by which a round of `off` is shorter where the verifier begins it ahead."""
        return self._costs.ahead.us

    def verify_us(self, rows: float) -> float:
        """A text's share, in microseconds, of a step in which every text has `rows` rows; 0 if no step was measured."""
        return self._costs.verify_us(rows, self._degree, self._sizes)

    def _rows(self, arm: Arm) -> float:
        """Expected rows of a round's tree; measured for proposals and `until` shapes, which seldom fill the shape."""
        return arm.rows if arm.drafted and not arm.stops else self._costs.rows.get(arm, arm.rows)
