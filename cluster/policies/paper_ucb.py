"""The bandit of the Mamba-drafters paper, exactly: its equations (1) and (2), restarted for every request.

    (1)  k* = argmax_k  mean_k + lambda_ucb * sqrt(2 ln t / n_k)
    (2)  r  = -(1 / N + lambda_gamma * gamma / N)

`gamma` is the depth of the arm's tree, or 0 for an arm without a drafter; `lambda_gamma` is the time of one drafter
forward over one of the target.

mean_k is the mean reward of arm k, which the paper calls a mean but writes as a sum. Rewards lie in
[-(1 + lambda_gamma * gamma), 0), so lambda_ucb is a few tenths, not 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.policies.offers import Offer


class PaperUCB:
    """UCB1 on the paper's reward. Every arm once in the order given, then by (1); ties go to the smaller tree."""

    stays_off = False

    def __init__(self, arms: Sequence[Arm], lambda_gamma: float, lambda_ucb: float = 0.2) -> None:
        self.arms = tuple(arms)
        self.lambda_gamma = lambda_gamma
        self.lambda_ucb = lambda_ucb
        self.pulls = dict.fromkeys(self.arms, 0)
        self.rewards = dict.fromkeys(self.arms, 0.0)  # sums

    def index(self, arm: Arm) -> float:
        """Equation (1)'s bracket for an arm that was played."""
        total = sum(self.pulls.values())
        mean = self.rewards[arm] / self.pulls[arm]
        return mean + self.lambda_ucb * math.sqrt(2 * math.log(total) / self.pulls[arm])

    def choose(self, offer: Offer | None = None) -> Arm:
        for arm in self.arms:
            if self.pulls[arm] == 0:
                return arm
        return max(self.arms, key=lambda arm: (self.index(arm), -arm.rows))

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        self.pulls[arm] += 1
        gamma = arm.depth if arm.drafted else 0
        self.rewards[arm] -= (1 + self.lambda_gamma * gamma) / verdict.length
