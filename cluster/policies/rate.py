"""What the policies have in common that weigh tokens against predicted time: when to guess at all, what a round costs,
and which rounds say nothing.

    index_k = hoped N_k / T_k

By renewal and reward the long-run rate of an arm is E[N] / E[T]. T_k is predicted from cost tables, not the noisy time
of the round just run, so a choice does not hang on one slow round. What each of them hopes of an arm is its own.

What is proposed without a model is there before the choice, and says itself what may come of it: an arm of proposals is
judged by this round's, not by its rounds so far. So drafters are asked where the text says nothing of how it goes on.

A text that is alone weighs `off` by the same index. In company the house says whether to guess (`House`): where it does
not, nothing is explored; where it does, a text refrains that draws too little from its rounds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from dendro.shapes import OFF, ProposedShape, TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.policies.costs import EmittedLength
from cluster.policies.experience import Experience
from cluster.policies.offers import Offer
from cluster.policies.prior import NO_PRIOR, Prior

OPENING_ROUNDS = 8
"""Rounds without a drafter's tree that count for nothing at first: a drafter that is being opened says nothing of an
arm, one that never comes does."""


class RatePolicy(ABC):
    """The policy of one request on its tenant's experience. `off` emits one token a round, which needs no exploring.

    `lengths` are what this request's own rounds were worth (`Experience.worth`), on top of the prior: that of the
    request's kind where it knows the arm, else that of the tenant's requests of its temperature.
    """

    def __init__(
        self, arms: Sequence[TreeShape], experience: Experience, temperature: float, prior: Prior = NO_PRIOR
    ) -> None:
        self.arms = tuple(arms)
        self.experience = experience
        self.temperature = temperature
        self.lengths: dict[TreeShape, EmittedLength] = {
            arm: prior.length(arm) or experience.prior(arm, temperature) for arm in self.arms
        }
        self._opening = OPENING_ROUNDS
        self._offer: DraftTree | None = None  # of the round that is chosen for

    @abstractmethod
    def hoped(self, arm: TreeShape) -> float:
        """Tokens that a round of this arm is taken to emit, with what is hoped of an arm little known; at most
        depth + 1, but for what proposers add, or infinite for an arm never seen."""

    def tokens(self, arm: TreeShape) -> float:
        """The same, of proposals by what they say of themselves this time: the sum of the chances that a row is
        reached."""
        if self._offer is None or not isinstance(arm, ProposedShape):
            return self.hoped(arm)
        return float(np.exp(np.sort(self._offer.values)[-arm.rows :]).sum())

    def rows(self, arm: TreeShape) -> float | None:
        """Rows that this round of it would have; None: as many as usual."""
        if self._offer is None or not isinstance(arm, ProposedShape):
            return None
        return min(arm.rows, self._offer.rows)

    def round_us(self, arm: TreeShape) -> float | None:
        """Predicted microseconds of a round; None where too little is known."""
        return self.experience.round_us(arm, self.rows(arm))

    def index(self, arm: TreeShape) -> float:
        """Tokens per microsecond; infinite for an arm whose time is not known."""
        round_us = self.round_us(arm)
        return math.inf if round_us is None else self.tokens(arm) / round_us

    def choose(self, offer: Offer | None = None) -> TreeShape:
        trial = self.experience.concurrency.trial
        trees = [arm for arm in self.arms if not arm.off]
        if trial is not None and OFF in self.arms and not (trees and trial.guessing):
            return OFF
        self._offer = offer() if offer and any(isinstance(arm, ProposedShape) for arm in trees) else None
        if trial is None or OFF not in self.arms:
            return self._best(self.arms)
        best = self._best(trees)
        return best if trial.repays(self.tokens(best)) else OFF

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        if shape.drafted and self._opening:
            self._opening -= 1
            if tree.missed and not tree.draft_us:
                return
            self._opening = 0
        self.observe(shape, self.experience.learn(shape, tree, verdict, self.temperature))

    def observe(self, shape: TreeShape, tokens: float) -> None:
        """Take in what a round was worth that says something of its arm."""
        self.lengths[shape].learn(tokens)

    def _best(self, arms: Sequence[TreeShape]) -> TreeShape:
        """The arm of greatest index; ties go to the smaller tree."""
        return max(arms, key=lambda arm: (self.index(arm), -arm.rows))
