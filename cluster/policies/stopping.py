"""The stop rule of one request: h and least of `until(auto,...)` for each round, by the marginal rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from dendro.shapes import MarginalShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies.costs import Rate
from cluster.policies.experience import Experience

FIRST_H = 0.5
"""h used until the costs of a level and of a row are known."""


@dataclass(slots=True)
class StopRule:
    """Replaces `until(auto,...)` by an `until` shape with numbers in each round of a request, by the marginal rule."""

    experience: Experience
    rate: Rate = field(default_factory=Rate)  # tokens and time of this request's rounds
    _arm: Arm = OFF_ARM  # the current round's arm
    _drafted: DraftTree | None = None  # the current round's tree, as the drafter sent it

    def resolved(self, arm: Arm) -> Arm:
        """Begin a round of this arm. Returns the arm to draft, in whose shape `auto` is replaced by h and least."""
        self._arm, self._drafted = arm, None
        if not isinstance(arm.shape, MarginalShape):
            return arm
        found = self.experience.marginal(arm, self.rate)
        return Arm(arm.maker, arm.shape.at(FIRST_H, 0.0) if found is None else arm.shape.at(found.h, found.least))

    def drafted(self, tree: DraftTree) -> None:
        """Note the drafter's tree; called before proposals are merged into it."""
        self._drafted = None if tree.missed else tree

    def learn(self, verdict: Verdict, share_us: float | None) -> None:
        """Record a round. share_us: the round's cost (`Experience.share_us`); None if unknown"""
        if share_us is not None:
            self.rate.learn(verdict.length, share_us)
            self.experience.learn_rate(verdict.length, share_us)
        if self._arm.stops and self._drafted is not None:
            self.experience.learn_stop(self._arm, self._drafted, verdict)
