"""Upper confidence on tokens, divided by predicted time: tokens per second, which the mean of 1/N is not.

    index_k = (mean N_k + beta * sqrt(2 ln t / n_k)) / T_k

By renewal and reward the long-run rate of an arm is E[N] / E[T]. (Always 3 tokens against 1 or 7 by a fair coin, at
equal cost, are 3 against 4, and the mean of 1/N prefers the 3.) T_k is predicted from cost tables, not the noisy
time of the round just run, so a choice does not hang on one slow round.

A text that is alone weighs `off` by the same index. In company the house says whether to guess (`House`): where it does
not, nothing is explored; where it does, a text refrains that draws too little from its rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dendro.shapes import OFF, TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.policies.experience import Experience, Length

OPENING_ROUNDS = 8
"""Rounds without a drafter's tree that count for nothing at first: a drafter that is being opened says nothing of an
arm, one that never comes does."""


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

    def hoped(self, arm: TreeShape) -> float:
        """Optimistic tokens of a round; infinite for an arm never seen."""
        length = self.lengths[arm]
        if arm.off:
            return 1.0
        if length.rounds == 0:
            return math.inf
        total = sum(length.rounds for length in self.lengths.values())
        bonus = self.beta * math.sqrt(2 * math.log(max(total, 1.0)) / length.rounds)
        # However hopeful: an arm's own guesses give no more than its depth and the target's own token.
        return min(length.mean + bonus, max(length.mean, arm.depth + 1))

    def index(self, arm: TreeShape) -> float:
        """Optimistic tokens per microsecond; infinite for an arm never seen."""
        round_us = self.experience.round_us(arm)
        return math.inf if round_us is None else self.hoped(arm) / round_us

    def choose(self) -> TreeShape:
        house = self.experience.house
        if house is None or OFF not in self.arms:
            return self._best(self.arms)
        trees = [arm for arm in self.arms if not arm.off]
        if not trees or not house.guessing:
            return OFF
        best = self._best(trees)
        return best if house.repays(self.hoped(best)) else OFF

    def _best(self, arms: Sequence[TreeShape]) -> TreeShape:
        return max(arms, key=lambda arm: (self.index(arm), -arm.rows))

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        if not shape.off and self._opening:
            self._opening -= 1
            if tree.missed and not tree.draft_us:
                return
            self._opening = 0
        self.lengths[shape].learn(verdict.length)
        self.experience.learn(shape, tree, verdict, self.temperature)
