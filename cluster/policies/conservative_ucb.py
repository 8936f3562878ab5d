"""A bandit that maximises tokens per second and bounds what exploration costs a text (after Wu et al., Conservative
Bandits, arXiv 1602.04282).

    index_k = (mean N_k + b_k) / T_k        b_k = beta * sqrt(2 ln t / n_k)        N_off = 1

N_k is the number of tokens that a round of arm k emits, T_k its predicted time, n_k the rounds of arm k, t the tokens
of the text plus the rounds of all priors. The arm of greatest index is played if the text stays within its budget even
when the arm emits only its lower bound, mean N_k - b_k:

    D + h * (T_k - T_off * (mean N_k - b_k)) <= T_off * (BUDGET * tokens so far + F)
    F = FIRST_ROUNDS where no text ever tried the drafter, else EARNING * (mean of earlier texts - T_k / T_off), between
        0 and MOST_RISKED
    h = HORIZON where the bracket is a gain, else 1        D = sum over earlier rounds with trees of T - T_off * N

Otherwise a probe is tried under the same condition, then `off`. D is negative once speculation has gained time, and
that gain may be spent on exploration. A plain round after a tree is longer, because the verifier did not begin it
ahead; D includes that time, and the time by which a drafter's tree takes longer if the round before had none of its
trees. Before a drafter's first tree in a text, D also includes the time that opening a text there usually adds to the
rounds meanwhile, unless EARNING rounds at earlier texts' mean earn it back: most texts then gain, and one that does not
gain loses the opening once. Likewise F lets a text lose with an arm what most texts gain with it in EARNING rounds,
since a few unlucky rounds say little about the next.

- mean N_k starts from a prior (the tenant's earlier texts, or the medians of all tenants) and adds this text's rounds.
- One text in sixteen begins without any drafter's prior if by the prior no drafted arm gains; it stays within BUDGET. A
  text that guesses nothing teaches nothing, so a first text of another kind would keep all later ones from every
  drafter. Where one drafter gains, no text begins so: it would spend what that drafter gains on the others.
- Arms of static shape also count rounds they did not play: a drafter's trace has the ranks of all tokens since its last
  tree, from which `Replay` computes what each static shape would have emitted. If no arm is affordable, the cheapest
  static arm is played as a probe for these ranks.
- Trees with a mean / T_k of at most that of `off` are spaced ever further apart until one pays.
- T_k comes from the measured costs (`Prices`), not from the time of the last round. E[N] / E[T] is an arm's long-run
  rate by renewal-reward theory.
- An arm of proposals is judged by the chances of this round's proposals, times the share of promised tokens that came
  in earlier rounds.

The budget applies to a text that runs alone. Concurrent texts follow their `SpeculationTrial`. While it turns
speculation off, no arm is tried, and between trials a round costs the router no more than one in mode `off`. While it
turns speculation on, a text whose rounds emit too few tokens still chooses `off`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies.costs import EmittedLength, Prices
from cluster.policies.experience import Experience
from cluster.policies.offers import Offer
from cluster.policies.prior import NO_PRIOR, Prior, promised_tokens
from cluster.policies.replay import Ranked, RankTrace, Replay, replayed, replayed_arms
from cluster.policies.trial import SpeculationTrial

BETA = 0.2
"""Factor of the bonus b_k."""
MOST_RISKED = 3.0
"""Most rounds without speculation that a text may lose with an arm because earlier texts gained with it."""
BUDGET = 0.01
"""Most time that exploration may cost a text, as a share of the time of its tokens without speculation."""
HORIZON = 4.0
"""Rounds within which an arm that likely gains must earn back the text's loss D."""
EARNING = 8.0
"""Rounds at earlier texts' mean: a text may lose with an arm what they gain, up to MOST_RISKED; and if they earn back
the opening of the arm's drafter, the opening does not count in D."""
SURE_ROUNDS = 16.0
"""Most rounds that n_k counts in the bonus: a text's acceptance may change as it goes on."""
LATEST_ROUNDS = 32.0
"""Most earlier rounds that weigh in the mean tokens of an arm that replay does not cover: a text may become harder."""
PROBED_TOKENS = 8
"""Least number of text tokens without a rank for which a probe may be drafted."""
SPACING_GROWTH, LONGEST_SPACING = 1.5, 64.0
"""Growth and maximum of a drafter's spacing, the tokens between trees that likely do not pay. It is 0 at first, 1 after
such a tree did not pay, then 1.5, 2.25 and so on up to 64; a tree that pays resets it to 0."""
TRUSTED = 8.0
"""Weight of the prior's share of promised tokens that came, when it is averaged with this text's: as if it had been
measured on so many promised tokens."""
UNPRICED = 1.5
"""Predicted time of a round whose drafter was never timed, as a multiple of the verifier's part of the round."""
FIRST_ROUNDS = 2.0
"""Additional budget, in rounds without speculation, for a drafter that no text has tried."""
RETRYING = 1 / 16
"""Share of texts that ignore the prior of all drafters if it predicts no gain for any of their arms."""
STAYING = 2
"""Rounds of `off` after which the next is expected to be `off`, and the verifier begins it ahead. The first tree after
them is drafted one round later."""
HELD_ROUNDS = 8
"""Rounds of `off` in a row after which a text considers drafted arms only every HELD_ROUNDS rounds, and proposals only
every second round, or every fourth after 4 * HELD_ROUNDS: a look takes processor time from the verifier."""
OPENING_ROUNDS = 8
"""First rounds of a drafter in which a missing tree is not counted, since the drafter may still be opening the text.
Later missing trees count against its arms."""
PAUSE_GROWTH = 4
"""Factor between a drafter's pauses: after its tree was missing it is not asked for 1, then 4, then 16 rounds, since
a round that asks a drafter in vain is plain decoding. No pause follows where proposals replaced the missing tree."""


@dataclass(frozen=True, slots=True)
class ArmEstimate:
    """Predicted tokens and time of an arm's next round.

    A chain of 3 guesses that emits 2 tokens, give or take 0.4, in 12 ms has at most 200 tokens a second:

    >>> chain = ArmEstimate(Arm.parse("mamba:(1,1,1)"), tokens=2.0, bonus=0.4, us=12_000.0)
    >>> round(1e6 * chain.index), chain.least
    (200, 1.6)
    """

    arm: Arm
    tokens: float  # expected tokens, mean N_k
    bonus: float  # b_k: how far the true mean may lie from `tokens`
    us: float  # predicted time T_k of the round

    @property
    def index(self) -> float:
        """Upper bound of the arm's rate in tokens per microsecond; the tokens are at most depth + 1."""
        return min(self.tokens + self.bonus, max(self.tokens, self.arm.depth + 1)) / self.us

    @property
    def least(self) -> float:
        """Lower bound of the round's tokens, at least 1."""
        return max(self.tokens - self.bonus, 1.0)


@dataclass(slots=True)
class MakerRounds:
    """What a text has seen of one maker's trees."""

    before: int = 0  # tokens of the text before the maker's last tree
    spacing: float = 0.0  # tokens between trees that likely do not pay
    opening: int = OPENING_ROUNDS  # rounds left in which a missing tree is not counted
    charged: bool = False  # True if the opening of the text at the drafter is counted in D
    pause: int = 1  # rounds of pause that the next missing tree will cause
    resumes: int = 0  # number of the round from which on the drafter is asked again


class ConservativeUCB:
    """Chooses the arms of one request's rounds.

    A plain step takes 10 ms, and a chain's draft adds 2 ms. The chain is played if earlier texts' rounds emitted
    2 tokens on average (2 / 12 ms beats 1 / 10 ms), but not if they emitted 1.1:

    >>> chain, experience = Arm.parse("mamba:(1,1,1)"), Experience()
    >>> experience.costs.step.learn(1, 10_000.0, experience.concurrency.target)
    >>> for _ in range(2):
    ...     experience.costs.learn_draft(chain, us=2_000.0)
    >>> for mean in (2.0, 1.1):
    ...     policy = ConservativeUCB([OFF_ARM, chain], experience, Prior({chain: EmittedLength(mean, rounds=8.0)}))
    ...     print(policy.choose())
    mamba:(1,1,1)
    off
    """

    def __init__(self, arms: Sequence[Arm], experience: Experience, prior: Prior = NO_PRIOR) -> None:
        """arms: `off` is among them"""
        self.arms = tuple(arms)
        self.experience = experience
        self._prior = prior
        self._trees = tuple(arm for arm in self.arms if not arm.off)
        self._proposes = any(arm.proposed for arm in self._trees)
        self._makers = {arm.maker: MakerRounds() for arm in self._trees}
        self._trace = RankTrace()
        self._replays: dict[str, Replay] = {}  # by drafter: the replay of its ranks, made with its first trace
        self._place = experience.concurrency.next_place()
        self._rounds = 0  # rounds of the text so far
        self._tokens = 0  # tokens emitted by them
        self._off_rounds = 0  # consecutive rounds of `off` before the current one
        self._last_maker = ""  # maker of the previous round's tree; empty without a tree
        self._lost_us = 0.0  # D: microseconds that rounds with trees took beyond those of plain rounds for their tokens
        self._promised = self._came = 0.0  # tokens that played proposals promised; tokens accepted of them
        self._offer: DraftTree | None = None  # proposals for the current round
        self._drafted: list[ArmEstimate] = []  # estimates of drafted arms, kept while the text stays `off`
        self._least = 0.0  # chance of a first guess below which no proposal pays, kept while the text stays `off`
        self._wanted: Arm | None = None  # the last choice if it was a tree, which may be drafted a round later
        self._exploring = False  # True if the current round's arm likely does not pay
        self._excluded = False  # True while the trial keeps this text from guessing
        self._passed = False  # True if the round is `off`, no arm could be chosen, and only tokens are counted
        self._resting = False  # True if the round is `off` and only its rate is learned (`SpeculationTrial`)

    @functools.cached_property
    def lengths(self) -> dict[Arm, EmittedLength]:
        """Mean tokens of a round by arm, from the prior and this text's rounds. Computed when first read: a text that a
        trial keeps from guessing never needs it, and one that guesses late starts from a newer prior."""
        return {arm: self._first.get(arm, EmittedLength()).at_most(math.inf) for arm in self._trees}

    @functools.cached_property
    def _first(self) -> dict[Arm, EmittedLength]:
        """Mean tokens of a round by arm, from the prior alone; arms without a prior are left out, and drafted arms of a
        text that ignores their prior."""
        found = self._prior.lengths_of(self._trees)
        if self._place < 1 - RETRYING:  # the highest places ignore their prior, since the lowest ones are in pilots
            return found
        prices = self.experience.prices()
        plain_us = prices.predicted_us(OFF_ARM) or math.inf
        if any(arm.drafted and length.mean * plain_us > _us(arm, prices) for arm, length in found.items()):
            return found
        return {arm: length for arm, length in found.items() if not arm.drafted}

    def estimate(self, arm: Arm, prices: Prices) -> ArmEstimate:
        """Predict an arm's next round. An arm without any data gets 1 token and a bonus of its whole depth."""
        if arm.off:
            return ArmEstimate(arm, 1.0, 0.0, prices.predicted_us(arm) or 1.0)
        if arm.proposed and self._offer is not None:
            promised, (share, error) = promised_tokens(self._offer, arm.rows), self._share_that_came
            us = _us(arm, prices, min(arm.rows, self._offer.rows))
            return ArmEstimate(arm, 1 + share * promised, error * promised, us)
        length = self.lengths[arm]
        if not length.rounds:
            length = self._guessed(arm)
        bonus = self._bonus / math.sqrt(min(length.rounds, SURE_ROUNDS)) if length.rounds else float(arm.depth)
        return ArmEstimate(arm, length.mean if length.rounds else 1.0, bonus, _us(arm, prices))

    def choose(self, offer: Offer | None = None) -> Arm:
        concurrency = self.experience.concurrency
        trial = concurrency.trial
        self._resting = trial is not None and trial.resting
        self._excluded = trial is not None and not (self._trees and concurrency.may_guess(trial, self._place))
        self._passed = False
        if self._excluded:
            chosen = OFF_ARM
        else:
            chosen = self._choice_alone(offer) if trial is None else self._choice_beside_others(trial, offer)
        self._wanted = None if chosen.off else chosen
        return chosen

    def _choice_beside_others(self, trial: SpeculationTrial, offer: Offer | None) -> Arm:
        """Choose the arm of a text that the trial lets guess."""
        prices = self.experience.prices()
        estimates = self._estimates(prices, offer)
        self._drafted = []  # prices change with the number of texts
        if not estimates:
            return OFF_ARM
        best, plain_us = estimates[0], prices.predicted_us(OFF_ARM)
        if plain_us is not None:
            trial.predict(best.index * plain_us)
        return best.arm if trial.repays(best.tokens + best.bonus) else OFF_ARM

    def _choice_alone(self, offer: Offer | None) -> Arm:
        """Choose the arm of a text that runs alone, by index and budget."""
        off = self._off_rounds
        held = off > HELD_ROUNDS and off % HELD_ROUNDS > 0 and self._wanted is None
        self._passed = held and off % (2 if off < 4 * HELD_ROUNDS else 4) > 0
        if self._passed:
            return OFF_ARM
        prices = self.experience.prices()
        plain_us = prices.predicted_us(OFF_ARM)
        if plain_us is None:
            return OFF_ARM
        if off == 1 or off % HELD_ROUNDS == 0:
            self._least = self._least_chance(prices, plain_us)
        estimates = self._estimates(prices, offer, self._least if off else 0.0, held)
        self._passed = held and not estimates
        if not estimates or estimates[0].index <= 1 / plain_us:
            return OFF_ARM
        best = estimates[0]
        seen = self._makers[best.arm.maker]
        unranked = self._tokens - seen.before
        rested = unranked >= seen.spacing
        self._exploring = best.tokens / best.us <= 1 / plain_us
        if (rested or not self._exploring) and self._affords(best, prices, plain_us):
            return best.arm
        self._exploring = True
        if rested and unranked >= PROBED_TOKENS:
            probes = [each for each in estimates if each.arm.maker == best.arm.maker and replayed(each.arm.shape)]
            probe = min(probes, key=lambda each: (each.us, each.arm.rows), default=None)
            if probe is not None and self._affords(probe, prices, plain_us):
                return probe.arm
        return OFF_ARM

    def _estimates(
        self, prices: Prices, offer: Offer | None, least: float = 0.0, held: bool = False
    ) -> list[ArmEstimate]:
        """Look at proposals, and estimate the arms that this round may play, the one of greatest index first. Drafted
        arms keep their estimates for up to HELD_ROUNDS rounds of `off`, since they change little meanwhile.

        least: chance of a first guess below which no proposal is played   held: True to leave out drafted arms
        """
        if not self._drafted or self._off_rounds % HELD_ROUNDS == 0:
            self._drafted = [self.estimate(arm, prices) for arm in self._trees if arm.drafted]
        found = [] if held else [each for each in self._drafted if self._makers[each.arm.maker].resumes <= self._rounds]
        self._offer = offer(least) if offer and self._proposes else None
        if self._offer is not None and self._offer.guesses:
            found += [self.estimate(arm, prices) for arm in self._trees if arm.proposed]
        return sorted(found, key=lambda each: (-each.index, each.arm.rows))

    def _least_chance(self, prices: Prices, plain_us: float) -> float:
        """Chance of a first guess below which no arm of proposals pays: a tree of n guesses promises at most n times
        that many tokens."""
        share = sum(self._share_that_came)
        needed = (
            (_us(arm, prices, rows) / plain_us - 1) / (share * (rows - 1))
            for arm in self._trees
            for rows in (2, arm.rows)
            if arm.proposed
        )
        return max(min(needed, default=0.0), 0.0)

    def _affords(self, each: ArmEstimate, prices: Prices, plain_us: float) -> bool:
        """True if a round of this arm that emits only its lower bound stays within the text's budget."""
        loss_us, known = each.us - plain_us * each.least, self._first.get(each.arm)
        if known is not None:
            first = min(max(EARNING * (known.mean - each.us / plain_us), 0.0), MOST_RISKED)
        else:
            first = FIRST_ROUNDS if each.arm.maker in self._unknown else 0.0
        budget_us = (BUDGET * self._tokens + first) * plain_us
        lost_us = self._lost_us + self._opening_us(each, plain_us) + prices.switching_us(each.arm, self._last_maker)
        return lost_us + (HORIZON if loss_us < 0 else 1) * loss_us <= budget_us

    @functools.cached_property
    def _unknown(self) -> set[str]:
        """Names of drafters that no text of the prior has tried. Kept, as `_first` is: the prior learns meanwhile."""
        return {arm.maker for arm in self._trees if arm.drafted and not self._prior.knows(arm.maker)}

    def _opening_us(self, each: ArmEstimate, plain_us: float) -> float:
        """Microseconds of opening the text at the arm's drafter that count as lost: 0 if they are counted already, or
        if the arm has a prior and EARNING rounds are predicted to earn them back."""
        if not each.arm.drafted or self._makers[each.arm.maker].charged:
            return 0.0
        opening_us = self.experience.costs.opening.us
        earned = each.arm in self._first and EARNING * (plain_us * each.tokens - each.us) >= opening_us
        return 0.0 if earned else opening_us

    @property
    def next_arm(self) -> Arm | None:
        if self._wanted is not None:
            return None if self._exploring else self._wanted
        return OFF_ARM if self._excluded or self._off_rounds >= STAYING else None

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        self._off_rounds = self._off_rounds + 1 if arm.off else 0
        last_maker, self._last_maker = self._last_maker, "" if tree.missed else arm.maker
        if self._resting:
            return
        self._rounds += 1
        ranked = self._trace.learn(arm.maker, tree, verdict)
        self._count(arm, tree, verdict, last_maker)
        if self._passed or (arm.drafted and self._opens(self._makers[arm.maker], tree)):
            return
        if not arm.off:
            self._learn_length(arm, tree, verdict, ranked)
        self.experience.learn(arm, tree, verdict)
        self.__dict__.pop("_bonus", None)

    def _count(self, arm: Arm, tree: DraftTree, verdict: Verdict, last_maker: str) -> None:
        """Add a round's loss, T - T_off * N microseconds, to `_lost_us`, and update tokens, promises and spacings."""
        before = self._tokens
        self._tokens += verdict.length
        if arm.off:
            if self._off_rounds <= STAYING < self._tokens:  # a tree came shortly before: the round was not begun ahead
                self._lost_us += self.experience.costs.ahead.us
            return
        if arm.proposed and self._offer is not None:
            self._promised += promised_tokens(self._offer, arm.rows)
            self._came += verdict.length - 1
        prices, seen = self.experience.prices(), self._makers[arm.maker]
        plain_us = prices.predicted_us(OFF_ARM) or 0.0
        if arm.drafted and not seen.charged:
            self._lost_us += self._opening_us(self.estimate(arm, prices), plain_us)
            seen.charged = True
        spent_us = prices.spent_us(arm, tree, last_maker)
        if plain_us:
            self._lost_us += spent_us - plain_us * verdict.length
        if arm.drafted and not tree.missed:
            seen.before = before
            if self._exploring and plain_us:
                paid = verdict.length * plain_us > spent_us
                seen.spacing = 0.0 if paid else min(max(1.0, SPACING_GROWTH * seen.spacing), LONGEST_SPACING)

    def _opens(self, seen: MakerRounds, tree: DraftTree) -> bool:
        """Pause a drafter whose tree is missing. True if the round counts for no arm, since the drafter may still be
        opening the text."""
        if not tree.missed:
            seen.opening, seen.pause = 0, 1
            return False
        if not tree.guesses:
            seen.resumes, seen.pause = self._rounds + seen.pause, PAUSE_GROWTH * seen.pause
        seen.opening = 0 if tree.draft_us else seen.opening - 1
        return seen.opening >= 0 and not tree.draft_us

    def _learn_length(self, arm: Arm, tree: DraftTree, verdict: Verdict, ranked: Ranked) -> None:
        """Learn the mean tokens of the drafter's static arms from a trace's ranks, by replay, and those of any other
        arm from its round."""
        if ranked.ranks:
            self._replay(arm.maker, ranked)
        replay = self._replays.get(arm.maker)
        if replay is None or tree.missed or arm.shape not in replay.shapes:
            length = self.lengths[arm] = self.lengths[arm].at_most(LATEST_ROUNDS)
            length.learn(verdict.length)

    def _replay(self, drafter: str, ranked: Ranked) -> None:
        """Replay a trace's ranks and set the mean tokens of the drafter's static arms from it."""
        arms = replayed_arms(self._trees, drafter)
        if drafter not in self._replays:
            self._replays[drafter] = Replay([arm.shape for arm in arms])
        replay = self._replays[drafter]
        if not ranked.joined:
            replay.cut()
        replay.feed(ranked.ranks)
        for arm, tokens, rounds in zip(arms, replay.tokens.tolist(), replay.rounds.tolist(), strict=True):
            prior = self._first.get(arm, EmittedLength())
            if rounds + prior.rounds:
                mean = (tokens + prior.rounds * prior.mean) / (rounds + prior.rounds)
                self.lengths[arm] = EmittedLength(mean, rounds + prior.rounds)

    @property
    def _share_that_came(self) -> tuple[float, float]:
        """Tokens that came over tokens that proposals promised, and the standard error of this share."""
        came, promised = self._came + TRUSTED * self._prior.promises.share, self._promised + TRUSTED
        return came / promised, math.sqrt(came) / promised

    def _guessed(self, arm: Arm) -> EmittedLength:
        """Length assumed for an arm without rounds: its drafter's best mean, at most depth + 1 tokens, as one round."""
        others = (length for each, length in self.lengths.items() if each.maker == arm.maker and length.rounds)
        most = max((length.mean for length in others), default=None)
        return EmittedLength() if most is None else EmittedLength(min(most, arm.depth + 1), 1.0)

    @functools.cached_property
    def _bonus(self) -> float:
        """BETA * sqrt(2 ln t), the bonus of an arm that was played once."""
        total = self._tokens + sum(length.rounds for length in self._first.values())
        return BETA * math.sqrt(2 * math.log(max(total, math.e)))


def _us(arm: Arm, prices: Prices, rows: float | None = None) -> float:
    """Predicted microseconds of a round of this arm, also if its drafter was never timed."""
    us = prices.predicted_us(arm, rows)
    return max(UNPRICED * prices.costs.verify_us(arm.rows, prices.target), 1.0) if us is None else us
