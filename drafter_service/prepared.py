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
"""Most trees that are prepared after an answered tree, each for one outcome of its verification."""
LEAST = 0.05
"""Chance of an outcome below which no tree is prepared for it."""
MISSES = 8
"""Preparing rests after this many answered trees in a row without a use of a prepared tree: at first for as many trees.
Each further miss doubles the rest, up to LONGEST_REST trees; a use starts the count again."""
LONGEST_REST = 64
NEXT_TOKEN = LevelShape((1,))
"""The shape of the draft that finds the token after a leaf of the answered tree."""


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
    """An open text continued by the tokens of an outcome, and the tree that is prepared after them. Its text slot is a
    fork of the open text's slot."""

    first: int  # length of the open text
    of: DrafterText  # the open text, which does not change before its next call
    outcome: Outcome
    guessed: list[int]  # tokens after those of the open text
    seen: list[tuple[int, Sequence[int], Sequence[float]]] = field(default_factory=list)  # arguments of `record_rank`
    spent_us: int = 0  # time of the forwards of this tree

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
        """Keep the arguments; the open text records the ranks if a call shows that it has these tokens."""
        self.seen.append((position, candidates, scores))

    @property
    def complete(self) -> bool:
        return self.round is None or self.round.growth.finished

    @property
    def sent_by(self) -> DraftCall | None:
        """The open text's last call, if its caller takes a tree of this chance before asking for it; else None."""
        call = self.of.drafted
        if call is None or call.take_prepared is None or not 0.0 < call.prepared_from <= self.outcome.chance:
            return None
        return call

    def message(self, name: str) -> PreparedTree:
        """The complete tree, with the trace that the answer to a call would have. name: the drafter's name"""
        assert self.round is not None
        found = {position: rank_of(self.tokens(range(position, position + 1))[0], c) for position, c, _ in self.seen}
        trace = ranks(found, self.first, self.base, CANDIDATES)
        tree = DraftTree(*self.round.growth.arrays(), name, trace)
        digest = self.of.text.tokens.digest_with(self.guessed)
        return PreparedTree(self.opening, self.base, digest, tree)

    def is_next(self, shape: TreeShape) -> bool:
        """True if the open text now has exactly the tokens of this one, and the prepared tree has this shape."""
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
    prepared_us: int = 0  # time of the forwards of prepared trees
    prepared_used_us: int = 0  # time of the forwards of prepared trees that answered a call


class Preparations:
    """The texts that are prepared after the last tree of one open text, and the rule when preparing rests."""

    def __init__(self) -> None:
        self.texts: list[PreparedText] = []  # the last may be growing
        self.after: DraftRound | None = None  # the answered tree from which outcomes follow; None: none are prepared
        self._outcomes: list[Outcome] | None = None  # outcomes without a tree, the likeliest last; None: not computed
        self._misses = 0  # answered trees in a row after which no prepared tree was used
        self._rest, self._next_rest = 0, MISSES  # answered trees left of the current rest; length of the next rest

    def answered(self, draft_round: DraftRound) -> None:
        """Called after a tree has answered a call, when nothing is prepared. The tree's likely outcomes are prepared
        from now on, unless preparing rests."""
        self.after, self._outcomes = None if self._rest else draft_round, None
        self._rest = max(0, self._rest - 1)

    def claimed(self, used: bool) -> None:
        """Called at the text's next call, before `answered`. used: True if a prepared text answers the call"""
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
