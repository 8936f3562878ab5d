"""What a drafter's scheduler is asked, what it answers, and what it knows of a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from dendro.calls import PeerText, Terms, TextUpdate
from dendro.errors import BadRequest
from dendro.shapes import TreeShape
from dendro.tree import DraftTree

from drafter_service.confidence import Calibration
from drafter_service.grow import Growth
from drafter_service.plan import EMPTY_TEXT, BoolArray


class Ticket(Protocol):
    """One caller that waits for an answer."""

    @property
    def cancelled(self) -> bool: ...

    @property
    def waited_us(self) -> int:
        """Microseconds since the call arrived."""
        ...

    def settle(self, value: object) -> None:
        """Answer the caller, from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Ready:
    """The memory of a closing session is complete: save its slot, then `forget` the session."""

    session: int
    slot: int
    ids: tuple[int, ...]  # what the slot has consumed
    digest: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Consumed:
    """Opening is done."""

    processed: int


Answer = DraftTree | Consumed | Ready | Exception


@dataclass(eq=False)
class DraftRound:
    """A draft call at work. Its tree grows once the chain through the root is planned."""

    ticket: Ticket | None  # none: the tree is answered or given up, and kept for its nodes
    shape: TreeShape
    base: int
    growth: Growth
    calibration: Calibration  # as it was when the round came: one for all of its rows
    slots: list[int] = field(default_factory=list)  # of the rows that go through the model, in order
    lines: BoolArray = field(default_factory=lambda: np.zeros((0, 0), np.bool_))  # as a Level's, of all its slots


@dataclass(eq=False)
class DrafterText:
    """One opening. `slot` has consumed `ids[:covers]`; the nodes of a tree hang off it."""

    number: int
    opening: bytes
    terms: Terms
    vocabulary: int  # the target's: ids of the text are below it
    text: PeerText = field(default_factory=PeerText)
    slot: int = EMPTY_TEXT
    covers: int = 0
    first_slot: int = EMPTY_TEXT  # the memory as it was when opening was done: where to start again after a deep cut
    first_covers: int = 0
    round: DraftRound | None = None
    kept: DraftRound | None = None
    traced: int | None = None  # text length at the last answered tree
    ranks: dict[int, int] = field(default_factory=dict)  # of text positions, among the drafter's own candidates
    opened: tuple[Ticket, int] | None = None  # who waits for opening, and the tokens that were restored
    closing: Ticket | None = None
    ended: bool = False  # its memory is being saved

    @property
    def base(self) -> int:
        return len(self.text.tokens)

    @property
    def greedy(self) -> bool:
        return self.terms.sampling.temperature == 0


def _check_tokens(session: DrafterText, update: TextUpdate) -> None:
    if update.tokens and not 0 <= min(update.tokens) <= max(update.tokens) < session.vocabulary:
        raise BadRequest("update.tokens", f"a token lies outside the vocabulary of {session.vocabulary}")
