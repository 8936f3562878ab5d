"""Trials that measure whether speculation pays for all concurrent requests.

1. Pilot, where many texts run: a few of them guess, which costs little if guesses do not pay. It fails if these texts
   emit too few tokens a second beside the others, or if policies predict too little for all. It goes on if its rounds
   are too few to tell.
2. Turns, after a pilot that succeeded, or without a pilot where texts speculate already: all texts guess for a turn,
   then none does.
3. Rest until the next trial. After a failed trial the rest is long enough that the trial's loss is at most REGRET of
   the rest's rounds.

A round of one of n running texts counts 1/n, so numbers of rounds below are per text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median, pstdev

from dendro.measured import OUTLIER

LEARNING_ROUNDS = 16.0
"""First rounds under a new load, which are not judged while policies learn the arms."""
SETTLING_ROUNDS = 4.0
"""Rounds after a switch that are not judged: drafters are still being opened, and late drafts arrive."""
PILOT_ROUNDS, LONGEST_PILOT = 8.0, 32.0
"""Judged rounds of a pilot, and the most rounds if it is extended because they leave its outcome open."""
LEAST_GUESSED = 32
"""Least guessed rounds, over all texts, of a pilot that succeeds: a few texts may happen to be easy."""
CAUTION = 1.28
"""Standard errors by which a pilot's gain must exceed SPECULATION_MARGIN: if the true gain is no larger, one pilot in
ten succeeds. A pilot that succeeds by chance costs more than a longer one, as the turns after it slow all texts."""
PLAIN_ROUNDS = 4.0
"""Rounds before a pilot in which no text guesses."""
DISTURBANCE = 0.25
"""Loss of all texts' rate during a pilot that makes it fail, though few texts guess. Smaller losses may have another
cause on the machine."""
LEAST_PILOTS, PILOT_SHARE = 2, 1 / 8
"""Least number of texts that guess in a pilot, and their share of many texts. Fewer than twice LEAST_PILOTS texts have
no pilot."""
TURN_ROUNDS = 8.0
"""Judged rounds of a turn."""
MANY_TEXTS = 4
"""Running texts from which on a turn is half as long, because it has the rounds of all of them."""
TURNS = 6
"""Most turns of a trial. They alternate, so that other changes of the machine's speed affect both kinds."""
CLEAR_TURNS, CLEAR_GAIN = 3, 1.3
"""Number of turns after which a trial may end early: if speculation lost against both neighbours of each of its turns,
or gained at least CLEAR_GAIN against them. A change of the machine's speed would affect one neighbour only."""
FIRST_REST, LONGEST_REST = 512.0, 8192.0
"""Rounds between two trials. The rest doubles after every trial that changes nothing."""
REGRET = 0.01
"""Most rounds that a failed trial loses, as a share of the rest after it, up to LONGEST_REST."""
DISTURBED = 0.5
"""Weight with which a round beside a prefill advances a turn. Such a round is judged only if most rounds without
speculation are beside prefills, too, but a trial must end even if every round is. In a pilot it has weight 1: prefills
slow texts that guess and texts that do not alike."""
MOSTLY_DISTURBED = 0.75
"""Share of rounds beside a prefill above which such rounds count as usual under the load."""
SPECULATION_MARGIN = 1.1
"""Least gain in rate with which speculation wins. It has costs outside rounds: drafters are opened and closed, and
prompts wait for larger steps."""


def pilot_share(texts: int) -> float:
    """Share of the running texts that guess in a pilot; 1 if there is no pilot.

    >>> [pilot_share(texts) for texts in (3, 4, 16, 64)]
    [1.0, 0.5, 0.125, 0.125]
    """
    return max(LEAST_PILOTS / texts, PILOT_SHARE) if texts >= 2 * LEAST_PILOTS else 1.0


@dataclass(slots=True)
class JudgedRounds:
    """Tokens and times of rounds that are judged together."""

    tokens: list[int] = field(default_factory=list)  # emitted tokens of each round
    shares_us: list[float] = field(default_factory=list)  # each round's time over the running texts

    @property
    def rate(self) -> float:
        """Tokens per microsecond of all texts. Times above OUTLIER medians are cut. A rate by the median time would
        also ignore late drafts and full steps, which must count."""
        longest_us = OUTLIER * median(self.shares_us)
        return sum(self.tokens) / max(sum(min(share_us, longest_us) for share_us in self.shares_us), 1e-9)


@dataclass(slots=True)
class TrialTurn:
    """Rounds of one turn, all with speculation or all without."""

    rounds: JudgedRounds = field(default_factory=JudgedRounds)  # all rounds
    undisturbed: JudgedRounds = field(default_factory=JudgedRounds)  # rounds while no text was being opened

    def add(self, tokens: int, share_us: float, disturbed: bool) -> None:
        for judged in (self.rounds,) if disturbed else (self.rounds, self.undisturbed):
            judged.tokens.append(tokens)
            judged.shares_us.append(share_us)

    @property
    def mostly_disturbed(self) -> bool:
        """True if more than MOSTLY_DISTURBED of the rounds were beside a prefill."""
        return len(self.undisturbed.tokens) < (1 - MOSTLY_DISTURBED) * len(self.rounds.tokens)

    def over(self, off: TrialTurn) -> float | None:
        """Ratio of this turn's rate to the rate of a turn without speculation. Rounds beside prefills count if most
        rounds of `off` were beside prefills. None if one of the turns has no round that counts."""
        one, other = (self.rounds, off.rounds) if off.mostly_disturbed else (self.undisturbed, off.undisturbed)
        return one.rate / other.rate if one.tokens and other.tokens else None


@dataclass(slots=True)
class Pilot:
    """Rounds of a pilot, and of a short turn without speculation before it.

    Guessed rounds emit 1 or 3 tokens in 12 ms, the others 1 token in 10 ms: a gain of 2 / 1.2. Its standard error after
    8 guessed rounds is (1 / sqrt 8) / 2 = 18 %, so CAUTION lowers the gain to 1.29. That passes SPECULATION_MARGIN, but
    8 rounds are fewer than LEAST_GUESSED:

    >>> pilot = Pilot(tokens={True: 16, False: 8}, us={True: 96_000.0, False: 80_000.0}, guessed=[1, 3] * 4)
    >>> round(pilot.gain(), 2), round(pilot.gain(CAUTION), 2), pilot.in_doubt
    (1.67, 1.29, True)
    """

    before: TrialTurn = field(default_factory=TrialTurn)
    during: TrialTurn = field(default_factory=TrialTurn)
    tokens: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # key: True for guessed rounds
    us: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})  # key: True for guessed rounds
    guessed: list[int] = field(default_factory=list)  # tokens of each guessed round
    predicted: float = 0.0  # sum of the gains that texts' policies predicted, if all texts guess
    predictions: int = 0  # number of these

    @property
    def in_doubt(self) -> bool:
        """True if the gain reaches SPECULATION_MARGIN, but not by CAUTION standard errors and LEAST_GUESSED rounds."""
        gain, least = self.gain(), self.gain(CAUTION)
        if gain is None or least is None or gain < SPECULATION_MARGIN:
            return False
        return least < SPECULATION_MARGIN or len(self.guessed) < LEAST_GUESSED

    def gain(self, caution: float = 0.0) -> float | None:
        """The least of the known gains in rate; None if none is known:

        - the mean gain that policies predicted;
        - the rate of guessed rounds over that of the others, lowered by `caution` standard errors;
        - the rate of all texts during the pilot over that before, if it is below 1 - DISTURBANCE.

        Each leaves out some costs: the second, for one, what drafts take from a verifier on the same machine.
        """
        known = [self.predicted / self.predictions] if self.predictions else []
        if self.us[True] and self.tokens[False]:
            measured = (self.tokens[True] / self.us[True]) / (self.tokens[False] / self.us[False])
            error = pstdev(self.guessed) / math.sqrt(len(self.guessed)) / fmean(self.guessed)
            known.append(measured * max(1 - caution * error, 0.0))
        # Rounds beside prefills are left out: a router's first texts open one by one.
        during, before = self.during.undisturbed, self.before.undisturbed
        if known and during.tokens and before.tokens:
            slower = during.rate / before.rate
            known += [slower] if slower < 1 - DISTURBANCE else []
        return min(known, default=None)


@dataclass(slots=True)
class SpeculationTrial:
    """Decides for one load class, by trials, whether concurrent texts speculate: they do if that emits more tokens a
    second. In a turn all texts do the same. Rounds are counted per text.

    Two texts emit 2 tokens in 12 ms with speculation and 1 in 10 ms without. After 96 rounds of both, 16 learning
    rounds and three turns of 8 with 4 settling rounds before each switched one, the gain of 2 / 1.2 is clear:

    >>> trial, rounds = SpeculationTrial(), 0
    >>> while trial.settled is None:
    ...     tokens, us = (2, 12_000.0) if trial.speculating else (1, 10_000.0)
    ...     trial.learn(tokens, us, texts=2, guessed=trial.speculating)
    ...     rounds += 1
    >>> rounds, round(trial.gain, 2), trial.speculating
    (96, 1.67, True)
    """

    pilots: float = 1.0  # share of the texts that guess in a pilot; 1: trials have no pilot
    pilot: Pilot | None = None  # the pilot, while one runs
    speculating: bool = True  # True while texts may guess
    gain: float | None = None  # rate with speculation over the rate without; None: not measured yet
    estimated: bool = False  # True if the gain is a pilot's or another load's; the next measured gain replaces it
    usual_tokens: float = 1.0  # mean tokens of a round with speculation
    rounds: float = -LEARNING_ROUNDS  # rounds so far of the current pilot, turn or rest; not judged below zero
    last_round: float = TURN_ROUNDS  # number of rounds after which the current pilot, turn or rest ends
    turns_left: int = TURNS  # turns remaining in the trial, the current one included; 0: between trials
    settled: bool | None = None  # True: speculate between trials; None: no trial has ended
    rest_rounds: float = FIRST_REST
    _turns: list[TrialTurn] = field(default_factory=lambda: [TrialTurn()])  # the trial's turns, the current one last
    _guessed_rounds: float = 0.0  # guessed rounds of the trial

    def __post_init__(self) -> None:
        if self.pilots < 1 and self.gain is None:
            self.pilot, self.last_round = Pilot(), PILOT_ROUNDS

    @classmethod
    def begun(cls, pilots: float, gain: float) -> SpeculationTrial:
        """Begin with a rest and a gain measured elsewhere. The gain is measured anew after the rest."""
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

    def as_settled(self) -> SpeculationTrial:
        """A copy that rests after the last outcome, for rounds that no turn judges."""
        return replace(self, pilot=None, speculating=bool(self.settled), turns_left=0)

    def includes(self, place: float) -> bool:
        """True if a text may guess now. place: the text's place in [0, 1); a pilot includes places below its share"""
        if self.pilot is None:
            return self.speculating
        return place < self.pilots and self.rounds >= -SETTLING_ROUNDS

    def predict(self, gain: float) -> None:
        """Record the gain that the policy of a pilot's text predicts. Ignored if infinite: the policy is exploring."""
        if self.pilot is not None and self.rounds >= 0 and math.isfinite(gain):
            self.pilot.predicted += gain
            self.pilot.predictions += 1

    def learn(self, tokens: int, took_us: float, texts: int, disturbed: bool = False, guessed: bool = False) -> None:
        """Record a round of one of the running texts, and begin the next turn, pilot or rest if this one is over.

        took_us: the round's time with all waits   guessed: True if the round's arm was not `off`
        disturbed: True if the round was beside a prefill, whose time hides what speculation gains or costs
        """
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
        """True between trials if speculation lost. Until the next trial nothing is learned of arms, and no text needs
        a drafter."""
        return not self.speculating and not self.turns_left

    def repays(self, tokens: float) -> bool:
        """True if a text with this upper bound of tokens per round should speculate when the others do. A usual round
        emits `usual_tokens` and gains `gain`, so this text's round gains tokens * gain / usual_tokens."""
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
        """Rest if the pilot failed, else begin turns of all texts. The first turn is without speculation, so that the
        first turn with it has two neighbours to compare with."""
        self.pilot = None
        gain = pilot.gain(CAUTION)
        if gain is None or gain >= SPECULATION_MARGIN:
            self._begin(False, TURN_ROUNDS)
            return
        self.gain, self.estimated, self.turns_left = gain, True, 0
        self._settle(False)

    def _settle(self, better: bool) -> None:
        """Rest until the next trial. better: True to speculate in the rest"""
        self.rest_rounds = min(2 * self.rest_rounds, LONGEST_REST) if better is self.settled else FIRST_REST
        if not better and self.gain is not None:
            lost_rounds = self._guessed_rounds * max(1 / max(self.gain, REGRET) - 1, 0.0)
            self.rest_rounds = min(max(self.rest_rounds, lost_rounds / REGRET), LONGEST_REST)
        self.settled = better
        self._begin(better, self.rest_rounds)

    def _gains(self) -> list[float]:
        """Ratios of the rate of each turn with speculation to the rate of each neighbouring turn without, if both have
        rounds that count. A change of the machine's speed affects neighbours alike."""
        gains = []
        for place, (one, other) in enumerate(pairwise(self._turns), start=2):
            first_speculates = self.speculating is ((len(self._turns) - place) % 2 == 1)
            gains.append(one.over(other) if first_speculates else other.over(one))
        return [gain for gain in gains if gain is not None]

    def _is_clear(self, gains: Sequence[float]) -> bool:
        """True if the turns so far decide the trial. gains: one for each pair of neighbouring turns"""
        if len(self._turns) < CLEAR_TURNS or len(gains) < len(self._turns) - 1:
            return False
        return max(gains) < 1 or min(gains) >= CLEAR_GAIN

    def _judge(self, gains: Sequence[float]) -> bool:
        """True if the median gain reaches SPECULATION_MARGIN, after its geometric mean with the earlier trials' gain.
        If no gain is known, False if undisturbed rounds without speculation were judged: drafters were then opened all
        the time."""
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
