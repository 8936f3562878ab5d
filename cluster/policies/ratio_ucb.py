"""Upper confidence on tokens, divided by predicted time. This maximizes tokens per second; the mean of 1/N does not.

    index_k = (mean N_k + beta * sqrt(2 ln t / n_k)) / T_k

(At equal cost, always 3 tokens is worse than 1 or 7 with equal chances, which is 4 on average; the mean of 1/N prefers
the 3.) `t` is the sum of all n_k. `RatePolicy` decides whether to speculate, and defines T_k.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from cluster.arms import Arm
from cluster.policies.experience import Experience
from cluster.policies.prior import NO_PRIOR, Prior
from cluster.policies.rate import RatePolicy

BETA = 0.25
DISCOUNT = 0.97


class RatioUCB(RatePolicy):
    """The policy of one request."""

    def __init__(
        self,
        arms: Sequence[Arm],
        experience: Experience,
        temperature: float,
        prior: Prior = NO_PRIOR,
        beta: float = BETA,
    ) -> None:
        super().__init__(arms, experience, temperature, prior)
        self.beta = beta

    def hoped(self, arm: Arm) -> float:
        """Upper confidence bound of a round's tokens; infinite for an arm never played."""
        length = self.lengths[arm]
        if arm.off:
            return 1.0
        if length.rounds == 0:
            return math.inf
        # An arm's own guesses emit at most depth + 1 tokens; only added proposals raise the mean above that.
        return min(length.mean + self._bonus / math.sqrt(length.rounds), max(length.mean, arm.depth + 1))

    def observe(self, arm: Arm, tokens: float) -> None:
        super().observe(arm, tokens)
        self.__dict__.pop("_bonus", None)

    @functools.cached_property
    def _bonus(self) -> float:
        """The bonus of an arm that was played once: beta * sqrt(2 ln t)."""
        total = sum(length.rounds for length in self.lengths.values())
        return self.beta * math.sqrt(2 * math.log(max(total, 1.0)))


class DiscountedUCB(RatioUCB):
    """For texts that change their kind, such as from prose to code: every round multiplies the weights of all earlier
    ones and of the prior by `discount` (discounted UCB of Garivier and Moulines, on the ratio).

        n_k = sum over rounds s that played k of discount^(t - s)     mean N_k likewise

    An arm not played for long is explored again. At 0.97 the weights sum to 33 rounds at most.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        experience: Experience,
        temperature: float,
        prior: Prior = NO_PRIOR,
        beta: float = BETA,
        discount: float = DISCOUNT,
    ) -> None:
        super().__init__(arms, experience, temperature, prior, beta)
        self.discount = discount

    def observe(self, arm: Arm, tokens: float) -> None:
        for length in self.lengths.values():
            length.rounds *= self.discount
        super().observe(arm, tokens)
