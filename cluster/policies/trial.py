"""Whether speculation pays for all concurrent requests, found by taking turns with and without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median

from dendro.smoothing import OUTLIER

LEARNING_ROUNDS = 16.0
"""Rounds per text under a new load that are not judged, while policies learn the arms."""
SETTLING_ROUNDS = 4.0
"""Rounds after a switch that are not judged: drafters are still being opened, and late drafts arrive."""
TURN_ROUNDS = 8.0
MANY_TEXTS = 4
"""Texts from which on a turn is half as long, because it has the rounds of all of them."""
TURNS = 6
"""Turns of a trial. They alternate, so that other changes of the machine's speed affect both kinds."""
FIRST_REST, LONGEST_REST = 512.0, 8192.0
"""Rounds between two trials. A trial costs as much as a dozen rounds, about a fiftieth at most. The rest doubles after
every trial that changes nothing."""
DISTURBED = 0.25
"""How far a round beside a prefill advances a trial. It is not judged, but a trial must end even if every round is
beside a prefill."""
SPECULATION_MARGIN = 1.1
"""Least gain in rate for speculation, which has costs besides: drafters are opened and closed, and prompts wait for
larger steps."""


@dataclass(slots=True)
class TrialTurn:
    """Rounds judged in one turn, all with speculation or all without."""

    tokens: list[int] = field(default_factory=list)  # of each round
    shares_us: list[float] = field(default_factory=list)  # of each round: its time over the running texts

    @property
    def rate(self) -> float:
        """Tokens per microsecond of all texts. Outliers are cut to OUTLIER medians. A median alone would also ignore
        late drafts and full steps, which must count."""
        longest_us = OUTLIER * median(self.shares_us)
        return sum(self.tokens) / max(sum(min(share_us, longest_us) for share_us in self.shares_us), 1e-9)


@dataclass(slots=True)
class SpeculationTrial:
    """Whether concurrent texts speculate under one load class: they do if that emits more tokens a second. All of them
    take the same turn at a time. Rounds are counted per text."""

    speculating: bool = True
    gain: float | None = None  # rate with speculation over the rate without; None: not measured yet
    usual_tokens: float = 1.0  # mean tokens of a round with speculation
    rounds: float = -LEARNING_ROUNDS  # of this turn or rest; not judged below zero
    last_round: float = TURN_ROUNDS  # after which this turn or rest ends
    turns_left: int = TURNS  # remaining in the trial, with the current one; 0: between trials
    settled: bool | None = None  # whether to speculate between trials; None: no trial has ended
    rest_rounds: float = FIRST_REST
    _turns: list[TrialTurn] = field(default_factory=lambda: [TrialTurn()])  # of this trial, with the current one

    def learn(self, tokens: int, took_us: float, texts: int, disturbed: bool = False) -> None:
        """Record a round of one of the running texts; `took_us` includes its waits. disturbed: beside a prefill, which
        takes longer than any guess and is no evidence about speculation"""
        if texts >= MANY_TEXTS and self.rounds < -LEARNING_ROUNDS / 2:
            self.rounds = -LEARNING_ROUNDS / 2
        before, self.rounds = self.rounds, self.rounds + (DISTURBED if disturbed else 1) / texts
        if before < 0:
            return
        if self.turns_left and not disturbed:
            self._turns[-1].tokens.append(tokens)
            self._turns[-1].shares_us.append(took_us / texts)
        if self.rounds >= (self.last_round / 2 if self.turns_left and texts >= MANY_TEXTS else self.last_round):
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
        """Begin the next turn or rest."""
        if not self.turns_left:
            self._turns = [TrialTurn()]
            self.turns_left = TURNS
            self._begin(not self.speculating, TURN_ROUNDS)
            return
        self.turns_left -= 1
        if self.turns_left:
            self._turns.append(TrialTurn())
            self._begin(not self.speculating, TURN_ROUNDS)
            return
        better = self._compare()
        self.rest_rounds = min(2 * self.rest_rounds, LONGEST_REST) if better is self.settled else FIRST_REST
        self.settled = better
        self._begin(better, self.rest_rounds)

    def _compare(self) -> bool:
        """Whether speculation is better, by the median ratio of neighbouring turns, which the machine's speed affects
        alike. Without a gain it is not, if rounds without it were judged: drafters were being opened all the time."""
        last, before = self._turns[1::2], self._turns[::2]  # `last` are of the current kind
        pairs = list(zip(*((last, before) if self.speculating else (before, last)), strict=True))
        measured = [(speculative, off) for speculative, off in pairs if speculative.tokens and off.tokens]
        if measured:
            gain = median(speculative.rate / off.rate for speculative, off in measured)
            self.gain = gain if self.gain is None else math.sqrt(self.gain * gain)
            self.usual_tokens = fmean(fmean(speculative.tokens) for speculative, _ in measured)
        if self.gain is None:
            return not any(off.tokens for _, off in pairs)
        return self.gain >= SPECULATION_MARGIN

    def _begin(self, speculating: bool, rounds: float) -> None:
        self.rounds = -SETTLING_ROUNDS if speculating is not self.speculating else 0.0
        self.speculating, self.last_round = speculating, rounds
