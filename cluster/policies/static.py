"""A constant arm: `off`, a shape that the client fixed, or a baseline."""

from __future__ import annotations

from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.policies.offers import Offer


class Static:
    """Chooses the same arm every round."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm

    @property
    def next_arm(self) -> Arm:
        return self.arm

    def choose(self, offer: Offer | None = None) -> Arm:
        return self.arm

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        """Learn nothing: the arm never changes."""
