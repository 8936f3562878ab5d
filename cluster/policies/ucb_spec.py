"""UCBSpec of BanditSpec (ICML 2025): upper confidence on the tokens of a round, ignoring its cost.

    k* = argmax_k  mean N_k + R * sqrt(ln t / (2 n_k))

Its regret is in rounds, not time, so it prefers a larger tree for any gain in tokens; it is a baseline. The bonus is
Hoeffding's for lengths in [1, R + 1], where R is the depth of the deepest arm. It restarts with every request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.policies.offers import Offer


class UCBSpec:
    """UCB1 on emitted tokens. Every arm once in the order given, then by the index; ties go to the smaller tree."""

    stays_off = False

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms = tuple(arms)
        self.range = max(arm.depth for arm in self.arms)
        self.pulls = dict.fromkeys(self.arms, 0)
        self.tokens = dict.fromkeys(self.arms, 0)  # sums

    def index(self, arm: Arm) -> float:
        """Upper confidence bound of a round's tokens, for an arm that was played."""
        total = sum(self.pulls.values())
        mean = self.tokens[arm] / self.pulls[arm]
        return mean + self.range * math.sqrt(math.log(total) / (2 * self.pulls[arm]))

    def choose(self, offer: Offer | None = None) -> Arm:
        for arm in self.arms:
            if self.pulls[arm] == 0:
                return arm
        return max(self.arms, key=lambda arm: (self.index(arm), -arm.rows))

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        self.pulls[arm] += 1
        self.tokens[arm] += verdict.length
