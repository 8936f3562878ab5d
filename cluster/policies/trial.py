"""Whether speculation pays for all concurrent requests.

A *trial* begins with a pilot where many texts run: a few of them guess, so that finding out costs little where guesses
do not pay. It fails if these texts emit too few tokens a second beside the others, or if the policies predict too
little for all; where their rounds are too few to tell, it goes on. Where the pilot succeeds, and where speculation is
in use, all texts take turns with and without it. A trial that failed is repeated after a rest so long that its loss is
at most REGRET of all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, pstdev

from dendro.smoothing import OUTLIER

LEARNING_ROUNDS = 16.0
"""Rounds per text under a new load that are not judged, while policies learn the arms."""
SETTLING_ROUNDS = 4.0
"""Rounds after a switch that are not judged: drafters are still being opened, and late drafts arrive."""
PILOT_ROUNDS, LONGEST_PILOT = 8.0, 32.0
"""Judged rounds per text of a pilot, and the most where they do not tell whether it succeeds."""
LEAST_GUESSED = 32
"""Rounds with guesses without which no pilot succeeds: a few texts happen to be easy."""
CAUTION = 1.28
"""Standard errors by which a pilot's gain must exceed SPECULATION_MARGIN: where the true gain is no larger, one pilot
in ten succeeds. The turns after a pilot slow all texts, so one that succeeds by chance costs more than a longer one."""
PLAIN_ROUNDS = 4.0
"""Rounds per text before a pilot in which no text guesses."""
DISTURBANCE = 0.25
"""Loss of rate of all texts in a pilot, in which few guess, that ends it. Smaller ones may be the machine's."""
LEAST_PILOTS, PILOT_SHARE = 2, 1 / 8
"""Texts of a pilot, and their share of all where that is more. Fewer than twice LEAST_PILOTS texts have no pilot."""
TURN_ROUNDS = 8.0
MANY_TEXTS = 4
"""Texts from which on a turn is half as long, because it has the rounds of all of them."""
TURNS = 6
"""Most turns of a trial. They alternate, so that other changes of the machine's speed affect both kinds."""
CLEAR_TURNS, CLEAR_GAIN = 3, 1.3
"""A trial ends after this many turns if speculation lost against both neighbours of each of its turns, or gained as
much as CLEAR_GAIN. A change of the machine's speed affects one neighbour alone."""
FIRST_REST, LONGEST_REST = 512.0, 8192.0
"""Rounds between two trials. The rest doubles after every trial that changes nothing."""
REGRET = 0.01
"""Most rounds that a failed trial loses, as a share of the rest after it, up to LONGEST_REST."""
DISTURBED = 0.5
"""How far a round beside a prefill advances a turn. It is judged only where most rounds without speculation are beside
prefills, too, but a trial must end even if every round is. In a pilot it counts as any other: prefills slow the texts
that guess and the others alike."""
MOSTLY_DISTURBED = 0.75
"""Share of rounds beside a prefill from which on they count as usual under this load."""
SPECULATION_MARGIN = 1.1
"""Least gain in rate for speculation, which has costs besides: drafters are opened and closed, and prompts wait for
larger steps."""


def pilot_share(texts: int) -> float:
    """The share of so many texts that guess in a pilot; 1 where there is no pilot."""
    return max(LEAST_PILOTS / texts, PILOT_SHARE) if texts >= 2 * LEAST_PILOTS else 1.0


@dataclass(slots=True)
class JudgedRounds:
    """Tokens and times of rounds that are judged together."""

    tokens: list[int] = field(default_factory=list)  # of each round
    shares_us: list[float] = field(default_factory=list)  # of each round: its time over the running texts

    @property
    def rate(self) -> float:
        """Tokens per microsecond of all texts. Outliers are cut to OUTLIER medians. A median alone would also ignore
        late drafts and full steps, which must count."""
        longest_us = OUTLIER * median(self.shares_us)
        return sum(self.tokens) / max(sum(min(share_us, longest_us) for share_us in self.shares_us), 1e-9)


@dataclass(slots=True)
class TrialTurn:
    """Rounds of one turn, all with speculation or all without."""

    rounds: JudgedRounds = field(default_factory=JudgedRounds)  # all
    undisturbed: JudgedRounds = field(default_factory=JudgedRounds)  # of them, those beside no prefill

    def add(self, tokens: int, share_us: float, disturbed: bool) -> None:
        for judged in (self.rounds,) if disturbed else (self.rounds, self.undisturbed):
            judged.tokens.append(tokens)
            judged.shares_us.append(share_us)

    @property
    def mostly_disturbed(self) -> bool:
        return len(self.undisturbed.tokens) < (1 - MOSTLY_DISTURBED) * len(self.rounds.tokens)

    def over(self, off: TrialTurn) -> float | None:
        """This turn's rate over that of a turn without speculation. Rounds beside prefills count where they are usual
        without speculation. None where a turn has no rounds that count."""
        one, other = (self.rounds, off.rounds) if off.mostly_disturbed else (self.undisturbed, off.undisturbed)
        return one.rate / other.rate if one.tokens and other.tokens else None


@dataclass(slots=True)
class Pilot:
    """The rounds of a pilot, and of a short turn without speculation before it."""

    before: TrialTurn = field(default_factory=TrialTurn)
    during: TrialTurn = field(default_factory=TrialTurn)
    tokens: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # by whether the text guessed
    us: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    guessed: list[int] = field(default_factory=list)  # tokens of each round that guessed
    predicted: list[float] = field(default_factory=list)  # rate of a text over that without speculation, if all guess

    @property
    def in_doubt(self) -> bool:
        """Whether it would succeed by its gain, but that may be chance."""
        gain, least = self.gain(), self.gain(CAUTION)
        if gain is None or least is None or gain < SPECULATION_MARGIN:
            return False
        return least < SPECULATION_MARGIN or len(self.guessed) < LEAST_GUESSED

    def gain(self, caution: float = 0.0) -> float | None:
        """The least of the gains that are known: the predicted one, and the rate of texts that guessed over that of the
        others, less so many of its standard errors. Each leaves out some costs, such as what drafts take from the
        verifier; where the pilot slowed all texts by more than DISTURBANCE, the ratio of their rates counts too. None
        where no text guessed."""
        known = [fmean(self.predicted)] if self.predicted else []
        if self.us[True] and self.tokens[False]:
            measured = (self.tokens[True] / self.us[True]) / (self.tokens[False] / self.us[False])
            error = pstdev(self.guessed) / math.sqrt(len(self.guessed)) / fmean(self.guessed)
            known.append(measured * max(1 - caution * error, 0.0))
        during, before = self.during.undisturbed, self.before.undisturbed  # a router's first texts open one by one
        if known and during.tokens and before.tokens:
            slower = during.rate / before.rate
            known += [slower] if slower < 1 - DISTURBANCE else []
        return min(known, default=None)


@dataclass(slots=True)
class SpeculationTrial:
    """Whether concurrent texts speculate under one load class: they do if that emits more tokens a second. In a turn
    all of them do the same. Rounds are counted per text."""

    pilots: float = 1.0  # share of the texts that guess in a pilot; 1: trials have none
    pilot: Pilot | None = None  # the running one
    speculating: bool = True
    gain: float | None = None  # rate with speculation over the rate without; None: not measured yet
    estimated: bool = False  # the gain is a pilot's or was measured elsewhere; the next measured one replaces it
    usual_tokens: float = 1.0  # mean tokens of a round with speculation
    rounds: float = -LEARNING_ROUNDS  # of this turn or rest; not judged below zero
    last_round: float = TURN_ROUNDS  # after which this turn or rest ends
    turns_left: int = TURNS  # remaining in the trial, with the current one; 0: between trials
    settled: bool | None = None  # whether to speculate between trials; None: no trial has ended
    rest_rounds: float = FIRST_REST
    _turns: list[TrialTurn] = field(default_factory=lambda: [TrialTurn()])  # of this trial, with the current one
    _guessed_rounds: float = 0.0  # of this trial

    def __post_init__(self) -> None:
        if self.pilots < 1 and self.gain is None:
            self.pilot, self.last_round = Pilot(), PILOT_ROUNDS

    @classmethod
    def begun(cls, pilots: float, gain: float) -> SpeculationTrial:
        """Begin with a gain that was measured elsewhere: with a rest, after which it is measured here."""
        better = gain >= SPECULATION_MARGIN
        return cls(
            pilots,
            gain=gain,
            estimated=True,
            speculating=better,
            settled=better,
            turns_left=0,
            last_round=FIRST_REST,
        )

    def includes(self, place: float) -> bool:
        """Whether a text may guess now. place: of the text among all, in [0, 1)"""
        if self.pilot is None:
            return self.speculating
        return place < self.pilots and self.rounds >= -SETTLING_ROUNDS

    def predict(self, gain: float) -> None:
        """Record what the policy of a pilot's text predicts. Infinite, and ignored, while it explores."""
        if self.pilot is not None and self.rounds >= 0 and math.isfinite(gain):
            self.pilot.predicted.append(gain)

    def learn(self, tokens: int, took_us: float, texts: int, disturbed: bool = False, guessed: bool = False) -> None:
        """Record a round of one of the running texts; `took_us` includes its waits. disturbed: beside a prefill, which
        takes longer than any guess and is no evidence about speculation; guessed: with another arm than `off`, which a
        pilot distinguishes"""
        if texts >= MANY_TEXTS and self.rounds < -LEARNING_ROUNDS / 2:
            self.rounds = -LEARNING_ROUNDS / 2
        self._guessed_rounds += guessed / texts
        pilot, share_us = self.pilot, took_us / texts
        before, self.rounds = self.rounds, self.rounds + (DISTURBED if disturbed and pilot is None else 1) / texts
        if pilot is not None and before < -SETTLING_ROUNDS:
            pilot.before.add(tokens, share_us, disturbed)
        if before < 0:
            return
        if pilot is not None:
            pilot.during.add(tokens, share_us, disturbed)
            pilot.tokens[guessed] += tokens
            pilot.us[guessed] += took_us
            if guessed:
                pilot.guessed.append(tokens)
        elif self.turns_left:
            self._turns[-1].add(tokens, share_us, disturbed)
        halved = self.turns_left and texts >= MANY_TEXTS and pilot is None
        if self.rounds >= (self.last_round / 2 if halved else self.last_round):
            self._next()

    @property
    def resting(self) -> bool:
        """Whether rounds without speculation won, and no trial runs: nothing is learned of arms, and no text needs a
        drafter, until the next trial."""
        return not self.speculating and not self.turns_left

    def repays(self, tokens: float) -> bool:
        """Whether a text whose rounds emit so many tokens speculates with the others. The time of a round with
        speculation is inferred from the mean tokens of such rounds and the gain."""
        return bool(self.turns_left) or self.gain is None or tokens * self.gain >= self.usual_tokens

    def _next(self) -> None:
        """Begin the next turn, pilot or rest."""
        if self.pilot is not None:
            if self.pilot.in_doubt and self.last_round < LONGEST_PILOT:
                self.last_round += PILOT_ROUNDS
            else:
                self._end_pilot(self.pilot)
            return
        if not self.turns_left:
            self._turns, self._guessed_rounds = [TrialTurn()], 0.0
            self.turns_left = TURNS
            if self.pilots < 1 and not self.speculating:
                self.pilot = Pilot()
                self._begin(True, PILOT_ROUNDS)
                self.rounds -= PLAIN_ROUNDS
            else:
                self._begin(not self.speculating, TURN_ROUNDS)
            return
        self.turns_left -= 1
        gains = self._gains()
        if self.turns_left and not self._is_clear(gains):
            self._turns.append(TrialTurn())
            self._begin(not self.speculating, TURN_ROUNDS)
            return
        self.turns_left = 0
        self._settle(self._judge(gains))

    def _end_pilot(self, pilot: Pilot) -> None:
        """Go on with turns of all texts, unless the pilot failed. The first is without speculation, so that the first
        with it can already be compared with both its neighbours."""
        self.pilot = None
        gain = pilot.gain(CAUTION)
        if gain is None or gain >= SPECULATION_MARGIN:
            self._begin(False, TURN_ROUNDS)
            return
        self.gain, self.estimated, self.turns_left = gain, True, 0
        self._settle(False)

    def _settle(self, better: bool) -> None:
        """Rest until the next trial, with speculation if that is better."""
        self.rest_rounds = min(2 * self.rest_rounds, LONGEST_REST) if better is self.settled else FIRST_REST
        if not better and self.gain is not None:
            lost_rounds = self._guessed_rounds * max(1 / max(self.gain, REGRET) - 1, 0.0)
            self.rest_rounds = min(max(self.rest_rounds, lost_rounds / REGRET), LONGEST_REST)
        self.settled = better
        self._begin(better, self.rest_rounds)

    def _gains(self) -> list[float]:
        """The rate of each turn with speculation over that of each neighbour without, where both have rounds that
        count. The machine's speed affects neighbours alike."""
        gains = []
        for place, (one, other) in enumerate(pairwise(self._turns), start=2):
            first_speculates = self.speculating is ((len(self._turns) - place) % 2 == 1)
            gains.append(one.over(other) if first_speculates else other.over(one))
        return [gain for gain in gains if gain is not None]

    def _is_clear(self, gains: Sequence[float]) -> bool:
        """Whether the turns so far suffice for the outcome."""
        if len(self._turns) < CLEAR_TURNS or len(gains) < len(self._turns) - 1:
            return False
        return max(gains) < 1 or min(gains) >= CLEAR_GAIN

    def _judge(self, gains: Sequence[float]) -> bool:
        """Whether speculation is better, by the median gain. Without one it is not, if rounds without it were judged:
        drafters were being opened all the time."""
        with_it, without = self._turns[::-2], self._turns[-2::-2]
        if not self.speculating:
            with_it, without = without, with_it
        if gains:
            gain = median(gains)
            self.gain = gain if self.gain is None or self.estimated else math.sqrt(self.gain * gain)
            self.estimated = False
            self.usual_tokens = fmean(fmean(turn.rounds.tokens) for turn in with_it if turn.rounds.tokens)
        if self.gain is None:
            return not any(turn.undisturbed.tokens for turn in without)
        return self.gain >= SPECULATION_MARGIN

    def _begin(self, speculating: bool, rounds: float) -> None:
        self.rounds = -SETTLING_ROUNDS if speculating is not self.speculating else 0.0
        self.speculating, self.last_round = speculating, rounds
