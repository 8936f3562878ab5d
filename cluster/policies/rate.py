"""The common part of policies that weigh tokens against predicted time: whether to speculate, what a round costs, and
which rounds do not count.

    index_k = hoped N_k / T_k

By renewal-reward theory the long-run rate of an arm is E[N] / E[T]. T_k is predicted from cost tables, not the noisy
time of the last round, so one slow round does not decide a choice. Each policy has its own estimate of N_k (`hoped`).

Proposals exist before the choice and have their own chances: an arm of proposals is judged by those of this round, not
by its earlier rounds. So drafters are asked where proposals are few or unlikely.

A text that runs alone weighs `off` by the same index. Concurrent texts follow their `SpeculationTrial`: without
speculation nothing is explored, and between trials a round costs the router what one in mode `off` does; with it, a
text whose rounds emit too little still chooses `off`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm, drafters_of
from cluster.policies.costs import EmittedLength
from cluster.policies.experience import Experience
from cluster.policies.offers import Offer
from cluster.policies.prices import Prices
from cluster.policies.prior import NO_PRIOR, Prior
from cluster.policies.trial import SpeculationTrial
from cluster.policies.untried import UntriedArms

STAYING = 4
"""Rounds of `off` after which another is expected: a tree after all waits for a round that was begun ahead."""

OPENING_ROUNDS = 8
"""Rounds of a drafter at first that do not count where its tree is missing: it may still be opening the text. One that
never comes must count against its arms."""
PAUSE_GROWTH = 4
"""A drafter whose tree did not come is not asked again for 1, 4, 16, ... rounds, where another drafter may be: until a
drafter has opened the text, and once it is gone, every round that asks it is plain decoding."""


class RatePolicy(ABC):
    """The policy of one request on its tenant's experience. `off` emits one token a round and needs no exploration.

    `lengths` has the worth of this request's rounds (`Experience.worth`) on top of a prior: that of the request's kind
    where it has the arm, else that of the tenant's requests in the same temperature class. It is made when it is first
    read: predicting it from ranks takes tenths of a millisecond, which a text that a trial keeps from guessing saves; a
    text that first guesses late begins with what others have learned meanwhile.
    """

    def __init__(
        self, arms: Sequence[Arm], experience: Experience, temperature: float, prior: Prior = NO_PRIOR
    ) -> None:
        self.arms = tuple(arms)
        self._trees = tuple(arm for arm in self.arms if not arm.off)
        self._may_be_off = OFF_ARM in self.arms
        self._proposes = any(arm.proposed for arm in self.arms)
        self.experience = experience
        self.temperature = temperature
        self._prior = prior
        self._place = experience.concurrency.next_place()
        drafters = drafters_of(self.arms)
        self._openings = dict.fromkeys(drafters, OPENING_ROUNDS)  # rounds left that may not count
        self._untried = UntriedArms(self.arms) if len(drafters) > 1 else None
        self._paused: dict[str, int] = {}  # rounds for which a drafter is not asked, ...
        self._pauses: dict[str, int] = {}  # ... and how many its next missing tree will cause
        self._offer: DraftTree | None = None  # proposals for the coming round
        self._offered: dict[Arm, float] = {}  # their expected tokens
        self._excluded = False  # the trial keeps this text from guessing
        self._off_rounds = 0  # in a row, before the current one
        self._resting = False  # the round is `off`, and nothing is learned of it but its rate (`SpeculationTrial`)

    @functools.cached_property
    def lengths(self) -> dict[Arm, EmittedLength]:
        known = self._prior.lengths_of(self.arms)
        return {arm: known.get(arm) or self.experience.prior(arm, self.temperature) for arm in self.arms}

    @abstractmethod
    def hoped(self, arm: Arm) -> float:
        """Estimated tokens of a round of this arm, optimistic or sampled while it is little known. At most depth + 1,
        unless proposers add more; infinite for an arm never played, if the policy must try it."""

    def tokens(self, arm: Arm) -> float:
        """As `hoped`; for an arm of proposals that were offered, the sum of the chances that its likeliest rows are
        reached."""
        if self._offer is None or not arm.proposed:
            return self.hoped(arm)
        if arm not in self._offered:
            self._offered[arm] = float(np.exp(np.sort(self._offer.values)[-arm.rows :]).sum())
        return self._offered[arm]

    def rows(self, arm: Arm) -> float | None:
        """Rows of this round's tree, for an arm of proposals that were offered; else None."""
        if self._offer is None or not arm.proposed:
            return None
        return min(arm.rows, self._offer.rows)

    def round_us(self, arm: Arm) -> float | None:
        """Predicted microseconds of a round; None where it cannot be predicted yet."""
        return self._price(arm, self.experience.prices())

    def index(self, arm: Arm) -> float:
        """Tokens per microsecond; infinite for an arm whose time is not known."""
        return self._index(arm, self.experience.prices())

    def choose(self, offer: Offer | None = None) -> Arm:
        trial = self.experience.concurrency.trial if self._may_be_off else None
        self._resting = trial is not None and trial.resting
        self._excluded = trial is not None and not (self._trees and self._may_guess(trial))
        if self._excluded:
            return OFF_ARM
        self._paused = {drafter: left - 1 for drafter, left in self._paused.items() if left > 1}
        self._offer, self._offered = offer() if offer and self._proposes else None, {}
        if trial is None:
            return self._best(self.arms)
        best = self._best(self._trees)
        if trial.pilot is not None:
            trial.predict(self.index(best) / self.index(OFF_ARM))
        return best if trial.repays(self.tokens(best)) else OFF_ARM

    @property
    def stays_off(self) -> bool:
        return self._excluded or self._off_rounds >= STAYING

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        self._off_rounds = self._off_rounds + 1 if arm.off else 0
        if self._resting:
            return
        if arm.drafted and self._untried is not None:
            self._pause(arm.maker, tree.missed)
        if self._openings.get(arm.maker):
            self._openings[arm.maker] -= 1
            if tree.missed and not tree.draft_us:
                return
            self._openings[arm.maker] = 0
        # Read first: they begin with what is known before this round.
        lengths = {} if self._excluded else self.lengths
        worth = self.experience.learn(arm, tree, verdict, self.temperature)
        if self._untried is not None and lengths:
            self._untried.learn(arm, tree, verdict, lengths)
        if arm in lengths:
            self.observe(arm, worth)

    def _pause(self, drafter: str, missed: bool) -> None:
        """Ask a drafter whose tree is missing again later, PAUSE_GROWTH times as late as after the one before."""
        if not missed:
            self._pauses.pop(drafter, None)
            return
        rounds = self._pauses.get(drafter, 1)
        self._paused[drafter], self._pauses[drafter] = 1 + rounds, PAUSE_GROWTH * rounds

    def _may_guess(self, trial: SpeculationTrial) -> bool:
        return self.experience.concurrency.may_guess(trial, self._place)

    def observe(self, arm: Arm, tokens: float) -> None:
        """Add the worth of a round that counts to its arm's mean."""
        self.lengths[arm].learn(tokens)

    def _best(self, arms: Sequence[Arm]) -> Arm:
        """The arm of greatest index; ties go to the smaller tree."""
        arms = [arm for arm in arms if arm.maker not in self._paused] or arms
        prices = self.experience.prices()
        return max(arms, key=lambda arm: (self._index(arm, prices), -arm.rows))

    def _index(self, arm: Arm, prices: Prices) -> float:
        round_us = self._price(arm, prices)
        return math.inf if round_us is None else self.tokens(arm) / round_us

    def _price(self, arm: Arm, prices: Prices) -> float | None:
        if self._untried is not None:
            return prices.predicted_us(arm, self.rows(arm))
        return prices.round_us(arm, self.rows(arm))
