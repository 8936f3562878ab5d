"""A conservative bandit on tokens per second: it never costs a text much more than no speculation (after Wu et al.,
Conservative Bandits, arXiv 1602.04282).

    index_k = (mean N_k + b_k) / T_k        b_k = beta * sqrt(2 ln t / n_k)        N_off = 1

The arm of greatest index is played only if the text stays within its budget should the arm emit as little as is likely:

    D + h * (T_k - T_off * (mean N_k - b_k)) <= BUDGET * T_off * tokens so far
    h = HORIZON where the bracket is a gain, else 1        D = sum over earlier rounds with trees of T - T_off * N

else the arm of greatest mean / T_k, under the same condition; else `off`. D is negative once speculation has gained:
what it gained may be spent on finding a better arm. The time by which plain rounds after a tree are longer, as the
verifier did not begin them ahead, is added to D. `t` are the tokens of the text and the rounds of all priors.

mean N_k begins with a prior: what the tenant's earlier texts emitted, or all tenants' medians. To it come this text's
rounds; for a tree of static form all rounds that it would have emitted by the ranks in the drafter's traces, played or
not (`Replay`). So one cheap tree, whose trace has the ranks of all tokens since the last one, tells of all static arms:
where no other arm is within the budget, the cheapest is played as a probe. Trees that likely do not pay follow each
other ever more slowly, as long as they do not. T_k is predicted from the machine's costs, not the noisy time of the
last round. By renewal-reward theory the long-run rate of an arm is E[N] / E[T].

Proposals exist before the choice and have their own chances: an arm of proposals is judged by those of this round,
times the share that came of what they promised, in earlier texts and in this one.

A text that runs alone is held to its budget. Concurrent texts follow their `SpeculationTrial`: without speculation
nothing is explored, and between trials a round costs the router what one in mode `off` does; with it, a text whose
rounds emit too little still chooses `off`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm, drafters_of
from cluster.policies.costs import EmittedLength
from cluster.policies.experience import Experience
from cluster.policies.offers import Offer
from cluster.policies.prices import Prices
from cluster.policies.prior import NO_PRIOR, Prior, promised_tokens
from cluster.policies.replay import Ranked, RankTrace, Replay, replayed
from cluster.policies.trial import SpeculationTrial

BETA = 0.2
BUDGET = 0.01
"""What exploration may cost a text, as a share of the time of its tokens without speculation."""
HORIZON = 4.0
"""Rounds in which an arm that likely gains must make good what was lost."""
SURE_ROUNDS = 16.0
"""Most rounds by which a mean is sure: a text may change its kind."""
PROBED_TOKENS = 8
"""Unranked tokens of the text from which on a tree is drafted for their ranks."""
SPACING_GROWTH, LONGEST_SPACING = 1.5, 64.0
"""Tokens between trees that likely do not pay, by drafter: none, then one, and after each tree that did not pay so many
times as many, at most the second number. A tree that paid begins anew."""
TRUSTED = 8.0
"""Weight of what came of earlier texts' proposals beside what came of this text's, in promised tokens."""
UNPRICED = 1.5
"""Time of a round whose drafter was never timed, over that of the verifier's part."""
FIRST_ROUNDS = 2.0
"""What exploration may cost a text besides, in rounds without speculation, where no text ever tried the drafter."""
STAYING = 2
"""Rounds of `off` after which another is expected, and begun ahead: a tree is then drafted a round later."""
HELD_ROUNDS = 8
"""Rounds of `off` in a row for which an estimate holds."""
OPENING_ROUNDS = 8
"""Rounds of a drafter at first that do not count where its tree is missing: it may still be opening the text. One that
never comes must count against its arms."""
PAUSE_GROWTH = 4
"""A drafter whose tree did not come is not asked again for 1, 4, 16, ... rounds: until a drafter has opened the text,
and once it is gone, every round that asks it is plain decoding. Where proposals took the tree's place it is not."""


@dataclass(frozen=True, slots=True)
class ArmEstimate:
    """One arm's coming round."""

    arm: Arm
    tokens: float  # expected
    bonus: float  # by which the expectation may be wrong
    us: float  # predicted

    @property
    def index(self) -> float:
        return min(self.tokens + self.bonus, max(self.tokens, self.arm.depth + 1)) / self.us

    @property
    def least(self) -> float:
        return max(self.tokens - self.bonus, 1.0)


class ConservativeUCB:
    """The policy of one request."""

    def __init__(self, arms: Sequence[Arm], experience: Experience, prior: Prior = NO_PRIOR) -> None:
        self.arms = tuple(arms)
        self.experience = experience
        self._prior = prior
        self._trees = tuple(arm for arm in self.arms if not arm.off)
        self._may_be_off = OFF_ARM in self.arms
        self._proposes = any(arm.proposed for arm in self.arms)
        self._replayed = [arm for arm in self.arms if replayed(arm.shape)]
        self._trace = RankTrace()
        self._unranked = dict.fromkeys(drafters_of(self.arms), 0)  # by drafter: tokens since its last tree
        self._exploring = False  # the round's arm likely does not pay
        self._spacing = dict.fromkeys(self._unranked, 0.0)  # by drafter: tokens between trees that likely do not pay
        self._tokens = 0  # of the text's rounds
        self._lost_us = 0.0  # D
        self._promised = self._came = 0.0  # tokens of proposals that were played
        self._place = experience.concurrency.next_place()
        self._openings = dict.fromkeys(self._unranked, OPENING_ROUNDS)  # rounds left that may not count
        self._paused: dict[str, int] = {}  # rounds for which a drafter is not asked, ...
        self._pauses: dict[str, int] = {}  # ... and how many its next missing tree will cause
        self._offer: DraftTree | None = None  # proposals for the coming round
        self._held: dict[Arm, ArmEstimate] = {}  # estimates of earlier rounds
        self._excluded = False  # the trial keeps this text from guessing
        self._off_rounds = 0  # in a row, before the current one
        self._resting = False  # the round is `off`, and nothing is learned of it but its rate (`SpeculationTrial`)

    @functools.cached_property
    def lengths(self) -> dict[Arm, EmittedLength]:
        """What each arm's rounds emitted: a prior, and this text's rounds. Made when it is first read, as a text that a
        trial keeps from guessing needs none, and one that guesses late begins with what others have learned."""
        return {arm: self._first.get(arm, EmittedLength()).at_most(math.inf) for arm in self._trees}

    @functools.cached_property
    def _first(self) -> dict[Arm, EmittedLength]:
        """The priors alone."""
        return self._prior.lengths_of(self._trees)

    @functools.cached_property
    def _replays(self) -> dict[str, Replay]:
        return {
            drafter: Replay([arm.shape for arm in self._replayed if arm.maker == drafter]) for drafter in self._unranked
        }

    def estimate(self, arm: Arm, prices: Prices) -> ArmEstimate:
        """An arm's coming round. An arm of which nothing is known may emit all that its depth allows, or one token."""
        if arm.off:
            return ArmEstimate(arm, 1.0, 0.0, prices.predicted_us(arm) or 1.0)
        if arm.proposed and self._offer is not None:
            promised, (share, error) = promised_tokens(self._offer, arm.rows), self._share_that_came
            us = self._us(arm, prices, min(arm.rows, self._offer.rows))
            return ArmEstimate(arm, 1 + share * promised, error * promised, us)
        length = self.lengths[arm]
        if not length.rounds:
            length = self._guessed(arm)
        bonus = self._bonus / math.sqrt(min(length.rounds, SURE_ROUNDS)) if length.rounds else float(arm.depth)
        return ArmEstimate(arm, length.mean if length.rounds else 1.0, bonus, self._us(arm, prices))

    def choose(self, offer: Offer | None = None) -> Arm:
        trial = self.experience.concurrency.trial if self._may_be_off else None
        self._resting = trial is not None and trial.resting
        self._excluded = trial is not None and not (self._trees and self._may_guess(trial))
        if self._excluded:
            return OFF_ARM
        self._paused = {drafter: left - 1 for drafter, left in self._paused.items() if left > 1}
        self._offer = offer() if offer and self._proposes else None
        prices = self.experience.prices()
        asked = [arm for arm in self._trees if arm.maker not in self._paused]
        if self._may_be_off and not asked:
            return OFF_ARM
        estimates = self._estimates(asked or self._trees, prices)
        best = max(estimates, key=lambda each: (each.index, -each.arm.rows), default=None)
        if best is None:
            return OFF_ARM
        if not self._may_be_off:
            return best.arm
        plain, timed = self.estimate(OFF_ARM, prices), prices.predicted_us(OFF_ARM) is not None
        if trial is not None:
            if trial.pilot is not None and timed:
                trial.predict(best.index / plain.index)
            return best.arm if trial.repays(best.tokens + best.bonus) else OFF_ARM
        if not timed:
            return OFF_ARM
        return self._within_budget(best, estimates, plain)

    def _estimates(self, arms: Sequence[Arm], prices: Prices) -> list[ArmEstimate]:
        """The estimates of these arms, without arms of proposals where there are none. Those of drafted arms change
        little while the text stays `off`: they are made anew every HELD_ROUNDS."""
        if self._off_rounds % HELD_ROUNDS == 0:
            self._held.clear()
        found = []
        for arm in arms:
            if arm.proposed and self._offer is not None:
                if self._offer.guesses or not self._may_be_off:
                    found.append(self.estimate(arm, prices))
                continue
            held = self._held.get(arm)
            if held is None:
                held = self._held[arm] = self.estimate(arm, prices)
            found.append(held)
        return found

    def _within_budget(self, best: ArmEstimate, estimates: Sequence[ArmEstimate], plain: ArmEstimate) -> Arm:
        """The choice of a text that runs alone."""
        if best.index <= plain.index:
            return OFF_ARM
        likeliest = max(estimates, key=lambda each: (each.tokens / each.us, -each.arm.rows))
        pays = likeliest.tokens / likeliest.us > plain.index
        for each in [best, likeliest] if pays else [best]:
            self._exploring = each.tokens / each.us <= plain.index
            if (not self._exploring or self._rested(each.arm)) and self._affords(each, plain.us):
                return each.arm
        self._exploring = True
        if self._unranked.get(best.arm.maker, 0) >= PROBED_TOKENS and self._rested(best.arm):
            probes = [each for each in estimates if each.arm.maker == best.arm.maker and each.arm in self._replayed]
            probe = min(probes, key=lambda each: (each.us, each.arm.rows), default=None)
            if probe is not None and self._affords(probe, plain.us):
                return probe.arm
        return OFF_ARM

    def _rested(self, arm: Arm) -> bool:
        """Whether so many tokens have come since its drafter's last tree that another may be tried."""
        return arm.maker not in self._spacing or self._unranked[arm.maker] >= self._spacing[arm.maker]

    def _affords(self, each: ArmEstimate, plain_us: float) -> bool:
        loss_us = each.us - plain_us * each.least
        budget = BUDGET * self._tokens + FIRST_ROUNDS * (each.arm.maker in self._unknown)
        return self._lost_us + (HORIZON if loss_us < 0 else 1) * loss_us <= budget * plain_us

    @functools.cached_property
    def _unknown(self) -> set[str]:
        """Drafters of whose arms none has a prior."""
        return self._unranked.keys() - {arm.maker for arm in self._first}

    @property
    def stays_off(self) -> bool:
        return self._excluded or self._off_rounds >= STAYING

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        self._off_rounds = self._off_rounds + 1 if arm.off else 0
        if self._resting:
            return
        ranked = self._trace.learn(arm.maker, tree, verdict)
        self._count(arm, tree, verdict)
        if arm.drafted:
            self._pause(arm.maker, tree.missed and not tree.guesses)
        if self._openings.get(arm.maker):
            self._openings[arm.maker] -= 1
            if tree.missed and not tree.draft_us:
                return
            self._openings[arm.maker] = 0
        lengths = {} if self._excluded else self.lengths  # read first: they begin with what was known before this round
        if lengths and arm.drafted and ranked.ranks:
            self._replay(arm.maker, ranked)
        self.experience.learn(arm, tree, verdict)
        if arm in lengths and not (arm in self._replayed and self._replays[arm.maker].positions and not tree.missed):
            lengths[arm].learn(verdict.length)
        self.__dict__.pop("_bonus", None)

    def _count(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        """Add a round to what the text has lost."""
        self._tokens += verdict.length
        for drafter in self._unranked:
            self._unranked[drafter] += verdict.length
        if arm.off:
            if self._off_rounds <= STAYING < self._tokens:  # it was not begun ahead, as a tree came shortly before
                self._lost_us += self.experience.prices().ahead_us
            return
        if arm.proposed and self._offer is not None:
            self._promised += promised_tokens(self._offer, arm.rows)
            self._came += verdict.length - 1
        prices = self.experience.prices()
        plain_us = prices.predicted_us(OFF_ARM)
        if plain_us is not None:
            self._lost_us += prices.spent_us(arm, tree) - plain_us * verdict.length
        if arm.drafted and not tree.missed:
            self._unranked[arm.maker] = verdict.length
            if self._exploring and plain_us is not None:
                paid = verdict.length * plain_us > prices.spent_us(arm, tree)
                self._spacing[arm.maker] = (
                    0.0 if paid else min(max(1.0, SPACING_GROWTH * self._spacing[arm.maker]), LONGEST_SPACING)
                )

    def _replay(self, drafter: str, ranked: Ranked) -> None:
        """Advance the drafter's arms by the ranks of a trace."""
        replay = self._replays[drafter]
        if not ranked.joined:
            replay.cut()
        replay.feed(ranked.ranks)
        arms = [arm for arm in self._replayed if arm.maker == drafter]
        for arm, tokens, rounds in zip(arms, replay.tokens.tolist(), replay.rounds.tolist(), strict=True):
            prior = self._first.get(arm, EmittedLength())
            if rounds + prior.rounds:
                mean = (tokens + prior.rounds * prior.mean) / (rounds + prior.rounds)
                self.lengths[arm] = EmittedLength(mean, rounds + prior.rounds)

    @property
    def _share_that_came(self) -> tuple[float, float]:
        """The share of the tokens that this text's proposals promised that came, and its standard error."""
        came, promised = self._came + TRUSTED * self._prior.promises.share, self._promised + TRUSTED
        return came / promised, math.sqrt(came) / promised

    def _guessed(self, arm: Arm) -> EmittedLength:
        """An arm without rounds, by its drafter's best arm: one round of as much."""
        others = (length for each, length in self.lengths.items() if each.maker == arm.maker and length.rounds)
        most = max((length.mean for length in others), default=None)
        return EmittedLength() if most is None else EmittedLength(min(most, arm.depth + 1), 1.0)

    def _us(self, arm: Arm, prices: Prices, rows: float | None = None) -> float:
        us = prices.predicted_us(arm, rows)
        return max(UNPRICED * prices.verify_us(arm.rows), 1.0) if us is None else us

    @functools.cached_property
    def _bonus(self) -> float:
        """The bonus of an arm that was played once."""
        total = self._tokens + sum(length.rounds for length in self._first.values())
        return BETA * math.sqrt(2 * math.log(max(total, math.e)))

    def _pause(self, drafter: str, missed: bool) -> None:
        """Ask a drafter whose tree is missing again later, PAUSE_GROWTH times as late as after the one before."""
        if not missed:
            self._pauses.pop(drafter, None)
            return
        rounds = self._pauses.get(drafter, 1)
        self._paused[drafter], self._pauses[drafter] = 1 + rounds, PAUSE_GROWTH * rounds

    def _may_guess(self, trial: SpeculationTrial) -> bool:
        return self.experience.concurrency.may_guess(trial, self._place)
