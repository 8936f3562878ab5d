"""Upper confidence on tokens, divided by predicted time: tokens per second, which the mean of 1/N is not.

    index_k = (mean N_k + beta * sqrt(2 ln t / n_k)) / T_k

(Always 3 tokens against 1 or 7 by a fair coin, at equal cost, are 3 against 4, and the mean of 1/N prefers the 3.)
`t` is the sum of all n_k. When to guess at all, and what T_k is, says `RatePolicy`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dendro.shapes import TreeShape

from cluster.policies.experience import Experience
from cluster.policies.prior import NO_PRIOR, Prior
from cluster.policies.rate import RatePolicy

BETA = 0.25
DISCOUNT = 0.97


class RatioUCB(RatePolicy):
    """The policy of one request."""

    def __init__(
        self,
        arms: Sequence[TreeShape],
        experience: Experience,
        temperature: float,
        prior: Prior = NO_PRIOR,
        beta: float = BETA,
    ) -> None:
        super().__init__(arms, experience, temperature, prior)
        self.beta = beta
        self._doubt = self._doubted()

    def hoped(self, arm: TreeShape) -> float:
        """Optimistic tokens of a round; infinite for an arm never seen."""
        length = self.lengths[arm]
        if arm.off:
            return 1.0
        if length.rounds == 0:
            return math.inf
        # However hopeful: an arm's own guesses give no more than its depth and the target's own token.
        return min(length.mean + self._doubt / math.sqrt(length.rounds), max(length.mean, arm.depth + 1))

    def observe(self, shape: TreeShape, tokens: float) -> None:
        super().observe(shape, tokens)
        self._doubt = self._doubted()

    def _doubted(self) -> float:
        """The bonus of an arm that was played once."""
        total = sum(length.rounds for length in self.lengths.values())
        return self.beta * math.sqrt(2 * math.log(max(total, 1.0)))


class DiscountedUCB(RatioUCB):
    """The same where a text changes its kind as it goes on, from prose to code: with every round all that is known
    weighs `discount` times as much, the prior too (discounted UCB of Garivier and Moulines, on the ratio).

        n_k = sum over rounds s that played k of discount^(t - s)     mean N_k likewise

    An arm that was not played for long is hoped for again. At 0.97 no more than 33 rounds count.
    """

    def __init__(
        self,
        arms: Sequence[TreeShape],
        experience: Experience,
        temperature: float,
        prior: Prior = NO_PRIOR,
        beta: float = BETA,
        discount: float = DISCOUNT,
    ) -> None:
        super().__init__(arms, experience, temperature, prior, beta)
        self.discount = discount

    def observe(self, shape: TreeShape, tokens: float) -> None:
        for length in self.lengths.values():
            length.rounds *= self.discount
        super().observe(shape, tokens)
