"""Trees that a drafter prepares before they are asked for: it goes on from the likely outcomes of the verification of
the tree that it has just answered (docs/design/drafting-ahead.md#drafting-ahead).

A prepared text is a fork of an open text, with the tokens of one outcome, and grows the tree that a call with this text
would get. It is the answer to the text's next call, if that has the same text and shape; else it is thrown away.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dendro.calls import MOST_PREPARED, DraftCall, PreparedTree
from dendro.shapes import LevelShape, TreeShape
from dendro.tree import DraftTree

from drafter_service.confidence import CANDIDATES, Calibration, Calibrations
from drafter_service.grow import Growth, ranks
from drafter_service.texts import DrafterText, DraftRound, rank_of

MOST = MOST_PREPARED
"""Most trees that are prepared for one outcome each after a tree."""
LEAST = 0.05
"""Chance of an outcome below which no tree is prepared for it."""
MISSES = 8
"""Trees in a row of which no prepared one was used after which preparing rests for as many trees, then for twice as
many, up to LONGEST_REST."""
LONGEST_REST = 64
NEXT_TOKEN = LevelShape((1,))
"""The shape by which the token after a leaf is guessed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens that a text may get by a verdict: a path through its tree and, unless it ends in a leaf, the token that
    the target has in place of a guess."""

    chance: float
    tokens: tuple[int, ...]
    leaf: bool  # True if the token after the path is yet to be guessed


def likely_outcomes(growth: Growth, calibration: Calibration) -> list[Outcome]:
    """The MOST likeliest outcomes of the verification of a finished tree, of a chance of at least LEAST; the likeliest
    last.

    A path that ends in a row with candidates is followed by one that is not its child. After a leaf, the next token's
    chance is taken to be the mean chance of the guesses before it.
    """
    sent, depths = growth.sent, {0: 0}
    children: dict[int, set[int]] = {row: set() for row in sent}
    for row in sent[1:]:
        depths[row] = depths[growth.parents[row]] + 1
        children[growth.parents[row]].add(growth.tokens[row])
    found: list[Outcome] = []
    for row in sorted(sent, key=growth.values.__getitem__, reverse=True):
        reached = growth.values[row]
        if math.exp(reached) < max(LEAST, found[0].chance if len(found) == MOST else 0.0):
            break
        path = path_to(growth, row)
        if row not in growth.place:
            found.append(Outcome(math.exp(reached + reached / depths[row]), path, True))
        else:
            place = growth.place[row]
            chances = calibration.confidences([growth.scores[place]])[0]
            for token, chance in zip(growth.candidates[place], chances, strict=True):
                if token not in children[row]:
                    found.append(Outcome(math.exp(reached + chance), (*path, token), False))
        found = sorted((each for each in found if each.chance >= LEAST), key=_chance)[-MOST:]
    return found


def _chance(outcome: Outcome) -> float:
    return outcome.chance


def path_to(growth: Growth, row: int) -> tuple[int, ...]:
    """Tokens of the guesses from below the root to a row, itself included."""
    path: list[int] = []
    while row:
        path.append(growth.tokens[row])
        row = growth.parents[row]
    return tuple(reversed(path))


@dataclass(eq=False, kw_only=True)
class PreparedText(DrafterText):
    """An open text with the tokens of an outcome, and its tree. Its slot is a fork of the text's."""

    first: int  # tokens of the open text
    of: DrafterText  # the open text, which does not change before its next call
    outcome: Outcome
    guessed: list[int]  # tokens after the first
    seen: list[tuple[int, Sequence[int], Sequence[float]]] = field(default_factory=list)  # arguments of `record_rank`
    spent_us: int = 0  # time of its forwards

    @property
    def base(self) -> int:
        return self.first + len(self.guessed)

    def tokens(self, span: range) -> list[int]:
        before = self.of.text.ids[span.start : self.first]
        return before + self.guessed[max(0, span.start - self.first) : span.stop - self.first]

    def record_rank(
        self,
        position: int,
        candidates: Sequence[int],
        scores: Sequence[float],
        calibrations: Calibrations,
    ) -> None:
        """Keep what the text records once it has these tokens."""
        self.seen.append((position, candidates, scores))

    @property
    def complete(self) -> bool:
        return self.round is None or self.round.growth.finished

    @property
    def sent_by(self) -> DraftCall | None:
        """The call whose caller takes the tree before it is asked for; None if it does not."""
        call = self.of.drafted
        if call is None or call.take_prepared is None or not 0.0 < call.prepared_from <= self.outcome.chance:
            return None
        return call

    def message(self, name: str) -> PreparedTree:
        """The complete tree, with the trace that a call would give it. name: of the drafter"""
        assert self.round is not None
        found = {position: rank_of(self.tokens(range(position, position + 1))[0], c) for position, c, _ in self.seen}
        trace = ranks(found, self.first, self.base, CANDIDATES)
        tree = DraftTree(*self.round.growth.arrays(), name, trace)
        digest = self.of.text.tokens.digest_with(self.guessed)
        return PreparedTree(self.opening, self.base, digest, tree)

    def is_next(self, shape: TreeShape) -> bool:
        """True if this is the open text, as it is now, with a tree of this shape."""
        assert self.round is not None
        same = self.round.shape == shape and self.ahead == self.of.ahead and self.base == self.of.base
        return same and self.of.text.ids[self.first :] == self.guessed


@dataclass
class PreparedCounters:
    """Totals of prepared trees since the engine was loaded."""

    prepared: int = 0  # trees that were begun
    prepared_used: int = 0  # trees that answered a call, complete or not
    prepared_dropped: int = 0  # trees that were thrown away
    prepared_sent: int = 0  # trees that were sent before their call
    prepared_us: int = 0  # time of their forwards
    prepared_used_us: int = 0  # time of the forwards of those that answered a call


class Preparations:
    """What is prepared for one open text after a tree, and whether that pays."""

    def __init__(self) -> None:
        self.texts: list[PreparedText] = []  # the last may be growing
        self.after: DraftRound | None = None  # the answered tree from which outcomes follow; None: none are prepared
        self._outcomes: list[Outcome] | None = None  # outcomes without a tree, the likeliest last; None: not computed
        self._misses = 0  # trees in a row of which no prepared one was used
        self._rest, self._next_rest = 0, MISSES  # trees after which nothing is prepared

    def answered(self, draft_round: DraftRound) -> None:
        """Called when a tree is answered, with nothing prepared: prepare what may follow it, unless it does not pay."""
        self.after, self._outcomes = None if self._rest else draft_round, None
        self._rest = max(0, self._rest - 1)

    def claimed(self, used: bool) -> None:
        """Called with the next call, before `answered`: whether it was answered by one of the texts."""
        if used:
            self._misses, self._next_rest = 0, MISSES
        elif self.texts:
            self._misses += 1
            if self._misses >= MISSES:
                self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self.after = None

    @property
    def growing(self) -> PreparedText | None:
        return self.texts[-1] if self.texts and not self.texts[-1].complete else None

    def next_outcome(self) -> Outcome | None:
        """Take the likeliest outcome without a tree; None if there is none, or enough trees are prepared."""
        if self.after is None or len(self.texts) >= MOST:
            return None
        if self._outcomes is None:
            self._outcomes = likely_outcomes(self.after.growth, self.after.calibration)
        return self._outcomes.pop() if self._outcomes else None

    def put_back(self, outcome: Outcome) -> None:
        if self._outcomes is not None and outcome.chance >= LEAST:
            bisect.insort(self._outcomes, outcome, key=_chance)
