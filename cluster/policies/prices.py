"""Predicted time of a round of each arm, from measured costs."""

from __future__ import annotations

from dendro.step_sizes import StepSizes
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.policies.classes import row_class
from cluster.policies.costs import LEAST_US, TRIED, Costs


def hops(arm: Arm) -> int:
    """Calls to peers that a round waits for."""
    return 2 if arm.drafted else 1


class Prices:
    """Predicts from the costs of one load class as they are now: made anew for each choice, which weighs all arms."""

    __slots__ = ("_costs", "_degree", "_sizes")

    def __init__(self, costs: Costs, degree: int, sizes: StepSizes) -> None:
        """degree: of the step-time polynomial   sizes: of the target's steps"""
        self._costs, self._degree, self._sizes = costs, degree, sizes

    def round_us(self, arm: Arm, rows: float | None = None) -> float | None:
        """As `Experience.round_us`."""
        costs = self._costs
        if rows is None:
            rows = self._rows(arm)
        if costs.tried[row_class(round(rows))] < TRIED:
            return None
        if arm.drafted and ((draft := costs.draft.get(arm)) is None or not draft.known):
            return None
        return self.predicted_us(arm, rows)

    def predicted_us(self, arm: Arm, rows: float | None = None) -> float | None:
        """As `Experience.predicted_us`."""
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
        """Microseconds of a round with a tree: its draft as measured, the rest as predicted."""
        return tree.draft_us / tree.texts + self.verify_us(tree.rows) + hops(arm) * self._costs.hop_us(arm.off)

    @property
    def ahead_us(self) -> float:
        """Microseconds by which a round of `off` is shorter where the verifier begins it ahead."""
        return self._costs.ahead.us

    def verify_us(self, rows: float) -> float:
        """A text's share of a step in which every text has so many rows; 0 where none was measured."""
        return self._costs.verify_us(rows, self._degree, self._sizes)

    def _rows(self, arm: Arm) -> float:
        """Expected rows of a round; proposals alone, and drafts that stop in time, seldom fill a shape."""
        return arm.rows if arm.drafted and not arm.stops else self._costs.rows.get(arm, arm.rows)
