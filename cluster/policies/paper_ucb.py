"""The bandit of Mamba Drafters (arXiv 2506.01206), equations (1) and (2), restarted for every request.

    (1)  k* = argmax_k  mean_k + lambda_ucb * sqrt(2 ln t / n_k)
    (2)  r  = -(1 / N + lambda_gamma * gamma / N)

N is the number of tokens that the round emitted, `gamma` the depth of the arm's tree (0 for an arm without a drafter),
`lambda_gamma` the time of one drafter forward over the time of one target forward.

mean_k is the mean reward of arm k; the paper calls it a mean but writes a sum. Rewards lie in
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
    """UCB1 on the paper's reward. Plays every arm once in the order given, then by (1); ties go to the smaller tree.

    A plain round emits 1 token, a round of 3 guesses emits 3 and costs 3 drafter forwards of a tenth each:

    >>> off, chain = Arm.parse("off"), Arm.parse("mamba:(1,1,1)")
    >>> policy = PaperUCB([off, chain], lambda_gamma=0.1)
    >>> for length in (1, 3):
    ...     path = tuple(range(length))
    ...     policy.learn(policy.choose(), DraftTree.root_only(0), Verdict(path, path, (), None, length))
    >>> [round(reward, 3) for reward in policy.rewards.values()]  # -1 / 1, -(1 + 0.1 * 3) / 3
    [-1.0, -0.433]
    >>> print(policy.choose())
    mamba:(1,1,1)
    """

    next_arm = None

    def __init__(self, arms: Sequence[Arm], lambda_gamma: float, lambda_ucb: float = 0.2) -> None:
        self.arms = tuple(arms)
        self.lambda_gamma = lambda_gamma
        self.lambda_ucb = lambda_ucb
        self.pulls = dict.fromkeys(self.arms, 0)
        self.rewards = dict.fromkeys(self.arms, 0.0)  # sum of rewards by arm

    def index(self, arm: Arm) -> float:
        """Value of equation (1)'s right side for an arm that was played."""
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
