"""Upper confidence on tokens, divided by predicted time: tokens per second, which the mean of 1/N is not.

    index_k = (mean N_k + beta * sqrt(2 ln t / n_k)) / T_k

By renewal and reward the long-run rate of an arm is E[N] / E[T]. (Always 3 tokens against 1 or 7 by a fair coin, at
equal cost, are 3 against 4, and the mean of 1/N prefers the 3.) T_k is predicted from cost tables, not the noisy
time of the round just run, so a choice does not hang on one slow round.

Where the house does not guess (`Experience.guesses`), neither does the text, and nothing is explored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dendro.text import Verdict
from dendro.tree import OFF, DraftTree, TreeShape

from cluster.policies.experience import Experience, Length

OPENING_ROUNDS = 8
"""Rounds without a tree that count for nothing at first: a drafter that is being opened says nothing of an arm, one
that never comes does."""


class RatioUCB:
    """The policy of one request on the router's experience. `off` emits one token a round, which needs no exploring."""

    def __init__(
        self, arms: Sequence[TreeShape], experience: Experience, temperature: float, beta: float = 0.25
    ) -> None:
        self.arms = tuple(arms)
        self.experience = experience
        self.temperature = temperature
        self.beta = beta
        self.lengths: dict[TreeShape, Length] = {arm: experience.prior(arm, temperature) for arm in self.arms}
        self._opening = OPENING_ROUNDS

    def index(self, arm: TreeShape) -> float:
        """Optimistic tokens per microsecond; infinite for an arm never seen."""
        round_us = self.experience.round_us(arm)
        length = self.lengths[arm]
        if round_us is None or (length.rounds == 0 and not arm.off):
            return math.inf
        if arm.off:
            return 1 / round_us
        total = sum(length.rounds for length in self.lengths.values())
        bonus = self.beta * math.sqrt(2 * math.log(max(total, 1.0)) / length.rounds)
        # No arm emits more than its depth and the target's own token, however hopeful.
        return min(length.mean + bonus, arm.depth + 1) / round_us

    def choose(self) -> TreeShape:
        if not self.experience.guesses and OFF in self.arms:
            return OFF
        return max(self.arms, key=lambda arm: (self.index(arm), -arm.rows))

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        if not shape.off and self._opening:
            self._opening -= 1
            if not tree.guesses and not tree.draft_us:
                return
            self._opening = 0
        self.lengths[shape].learn(verdict.length)
        self.experience.learn(shape, tree, verdict, self.temperature)
