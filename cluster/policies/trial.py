"""Whether speculation pays for all requests that run together, found by taking turns with and without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median

from cluster.policies.step_time import OUTLIER

LEARNING_ROUNDS = 16.0
"""Rounds in which a house's texts get to know the arms under a new load, before what they reach is measured."""
SETTLING_ROUNDS = 4.0
"""Rounds after a change of sides that are of both: drafters are opened in them, and late drafts come in."""
TURN_ROUNDS = 8.0
MANY_TEXTS = 4
"""Texts from which on a turn is half as long: it has the rounds of all of them."""
TURNS = 6
"""Of a trial, the two sides one after the other: what else the machine does meanwhile befalls both."""
FIRST_REST, LONGEST_REST = 512.0, 8192.0
"""Rounds until the next trial: one costs what a dozen rounds do, a fiftieth of them at most. It doubles with every
trial that changes nothing."""
DISTURBED = 0.25
"""What a round counts for in which a prompt was processed: it is not judged, but a house that always has one must not
be caught in a trial."""
SPECULATION_MARGIN = 1.1
"""How much faster rounds must be with guesses: drafters are opened and closed besides, and prompts wait for larger
steps."""


@dataclass(slots=True)
class TrialTurn:
    """What a house came to in a turn, guessing or not."""

    tokens: list[int] = field(default_factory=list)  # of each round
    shares_us: list[float] = field(default_factory=list)  # of the house's time

    @property
    def rate(self) -> float:
        """Tokens per microsecond of the whole trial. A hiccup means nothing for the choice; but late drafts and full
        steps, which the median would pass over, do."""
        longest_us = OUTLIER * median(self.shares_us)
        return sum(self.tokens) / max(sum(min(share_us, longest_us) for share_us in self.shares_us), 1e-9)


@dataclass(slots=True)
class SpeculationTrial:
    """Whether the texts that run together under one load guess: the side under which they emitted more tokens a second,
    all of them on one side at a time. Rounds are counted as those of one text."""

    guessing: bool = True
    gain: float | None = None  # how many times as many tokens a second they emit if they guess; None: not tried yet
    usual: float = 1.0  # tokens of a round in which they do
    rounds: float = -LEARNING_ROUNDS  # of this turn or rest; below zero they are not judged
    until: float = TURN_ROUNDS
    turns: int = TURNS  # that are left of a trial, this one among them; 0: the house rests
    settled: bool | None = None  # whether it guesses while it rests
    rest: float = FIRST_REST
    _sides: list[TrialTurn] = field(
        default_factory=lambda: [TrialTurn()]
    )  # of the trial's turns so far, and of this one

    def learn(self, tokens: int, took_us: float, texts: int, disturbed: bool = False) -> None:
        """Take in one of its rounds, which took so long with all its waits, while so many texts ran. A round is
        disturbed by the prompt of another text, which takes longer than any guess and says nothing of them."""
        if texts >= MANY_TEXTS and self.rounds < -LEARNING_ROUNDS / 2:
            self.rounds = -LEARNING_ROUNDS / 2
        before, self.rounds = self.rounds, self.rounds + (DISTURBED if disturbed else 1) / texts
        if before < 0:
            return
        if self.turns and not disturbed:
            self._sides[-1].tokens.append(tokens)
            self._sides[-1].shares_us.append(took_us / texts)
        if self.rounds >= (self.until / 2 if self.turns and texts >= MANY_TEXTS else self.until):
            self._next()

    def repays(self, tokens: float) -> bool:
        """Whether a text guesses with the others from which a round draws so many tokens: what a round with guesses
        takes is known by what the house emits in its own."""
        return bool(self.turns) or self.gain is None or tokens * self.gain >= self.usual

    def _next(self) -> None:
        """What comes after a turn or a rest."""
        if not self.turns:
            self._sides = [TrialTurn()]
            self.turns = TURNS
            self._turn(not self.guessing, TURN_ROUNDS)
            return
        self.turns -= 1
        if self.turns:
            self._sides.append(TrialTurn())
            self._turn(not self.guessing, TURN_ROUNDS)
            return
        better = self._compare()
        self.rest = min(2 * self.rest, LONGEST_REST) if better is self.settled else FIRST_REST
        self.settled = better
        self._turn(better, self.rest)

    def _compare(self) -> bool:
        """Whether guesses are better: each turn beside the one after it, which the machine was alike to; of these, the
        median. Where drafters were opened for as long as they were wanted, they are not."""
        last, before = self._sides[1::2], self._sides[::2]  # a trial ends on the side that is tried now
        pairs = list(zip(*((last, before) if self.guessing else (before, last)), strict=True))
        found = [(guessing, off) for guessing, off in pairs if guessing.tokens and off.tokens]
        if found:
            gain = median(guessing.rate / off.rate for guessing, off in found)
            self.gain = gain if self.gain is None else math.sqrt(self.gain * gain)
            self.usual = fmean(fmean(guessing.tokens) for guessing, _ in found)
        if self.gain is None:
            return not any(off.tokens for _, off in pairs)
        return self.gain >= SPECULATION_MARGIN

    def _turn(self, guessing: bool, until: float) -> None:
        self.rounds = -SETTLING_ROUNDS if guessing is not self.guessing else 0.0
        self.guessing, self.until = guessing, until
