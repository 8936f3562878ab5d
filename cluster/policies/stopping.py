"""When a draft stops: the h and least of `until(auto,...)`, from measured costs and the current rate
(docs/design/stopping.md#the-marginal-rule).

A round costs time, and time is worth `rate` tokens a microsecond: so many are emitted in it otherwise. So another level
is drafted, and a guess verified, only if it is expected to emit more than its time is worth:

    accept * S > rate * (level_us + guesses * row_us)    S = sum of V over the rows that would get children
    V(guess) > rate * row_us                             V = the estimated chance that a row is reached

By this rule E[N] / E[T] of the rounds is greatest where `rate` is that ratio (Dinkelbach), which no sweep of h has to
find. As an `UntilShape` drafts another level while 1 - S < h,

    h = 1 - rate * (level_us + guesses * row_us) / accept        least = rate * row_us
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dendro.shapes import MarginalShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies.costs import Rate

if TYPE_CHECKING:
    from cluster.policies.experience import Experience

FIRST_H = 0.5
"""The h until the costs of a level and of a row are known."""


@dataclass(frozen=True, slots=True)
class Marginal:
    """What the rule depends on."""

    rate: float  # tokens per microsecond
    level_us: float  # of one more level
    row_us: float  # of one more row in the verifier's step
    guesses: float  # that a level adds to the tree
    accept: float  # chance that a level has the text's token, if the level above had it

    @property
    def h(self) -> float:
        return 1 - self.rate * (self.level_us + self.guesses * self.row_us) / self.accept

    @property
    def least(self) -> float:
        return self.rate * self.row_us


@dataclass(slots=True)
class StopRule:
    """Computes the numbers of `until(auto,...)` for one request's rounds."""

    experience: Experience
    rate: Rate = field(default_factory=Rate)  # of this request's rounds
    _arm: Arm = OFF_ARM  # of the current round
    _drafted: DraftTree | None = None  # its tree, as the drafter sent it

    def resolved(self, arm: Arm) -> Arm:
        """Begin a round of this arm. Returns the arm that the drafter is asked for, with numbers in its shape."""
        self._arm, self._drafted = arm, None
        if not isinstance(arm.shape, MarginalShape):
            return arm
        found = self.experience.marginal(arm, self.rate)
        return Arm(arm.maker, arm.shape.at(FIRST_H, 0.0) if found is None else arm.shape.at(found.h, found.least))

    def drafted(self, tree: DraftTree) -> None:
        """Note the drafter's tree, before proposals are merged into it."""
        self._drafted = None if tree.missed else tree

    def learn(self, verdict: Verdict, share_us: float | None) -> None:
        """Record a round. share_us: its cost (`Experience.share_us`); None where that is not known"""
        if share_us is not None:
            self.rate.learn(verdict.length, share_us)
        if self._arm.stops and self._drafted is not None:
            self.experience.learn_stop(self._arm, self._drafted, verdict)
