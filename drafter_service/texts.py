"""The texts, rounds and answers of a drafter's scheduler."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from dendro.calls import PeerText, RequestParameters, TextUpdate
from dendro.engine import Ticket
from dendro.errors import BadRequest
from dendro.grammars import Bits
from dendro.shapes import TreeShape
from dendro.tree import LAW_TOKENS, DraftTree

from drafter_service.confidence import CANDIDATES, Calibration
from drafter_service.grow import Growth, Numbers
from drafter_service.plan import EMPTY_TEXT, Level, Nodes
from drafter_service.sampled import GuessDraws
from drafter_service.structures import DraftStructure

log = logging.getLogger("dendro.drafter")


@dataclass(frozen=True, slots=True)
class MemoryComplete:
    """The memory of a closing session is complete: save its slot, then `forget` the opening."""

    opening: bytes
    slot: int
    ids: tuple[int, ...]  # tokens that the slot has consumed
    digest: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A text is open and prefilled."""

    restored: int  # tokens that a saved state covered
    processed: int


Answer = DraftTree | Prefilled | MemoryComplete | Exception


@dataclass(eq=False)
class DraftRound:
    """A draft call in progress. Its tree begins to grow with the forward of its root."""

    ticket: Ticket | None  # None: answered or stopped; the round is kept for its nodes
    shape: TreeShape
    base: int
    growth: Growth
    calibration: Calibration  # of the round's start, the same for all its rows
    slots: list[int] = field(default_factory=list)  # of the rows that go through the model, in order
    draws: GuessDraws | None = None  # where guesses are drawn, not ranked

    @property
    def width(self) -> int:
        """Candidates that each of its rows needs."""
        return self.shape.width if self.draws is None else LAW_TOKENS

    @property
    def new_rows(self) -> range:
        """The numbers of the rows that go through the model next, among those that do."""
        return range(self.growth.processed, len(self.growth.above))

    def path_of(self, ids: Sequence[int]) -> list[int]:
        """The numbers of the processed rows that the text `ids` went through after the round's, root first. The token
        after the last of them is known, too."""
        growth, path, row = self.growth, list[int](), 0
        for token in ids[self.base :]:
            if row not in growth.place:
                break
            path.append(growth.place[row])
            child = growth.child(row, token)
            if child is None:
                break
            row = child
        return path

    def extend(
        self, candidates: Sequence[Sequence[int]], scores: Sequence[Numbers], chances: Sequence[Numbers]
    ) -> None:
        """Add the children of the frontier's rows, as `Growth.extend`, and of the levels below it that are given.

        Raises ValueError for scores of more rows than the tree has.
        """
        first = 0
        while first < len(scores):
            if not self.growth.frontier:
                raise ValueError(f"scores of {len(scores) - first} rows more than the tree has")
            level = slice(first, first + len(self.growth.frontier))
            given = candidates[level], scores[level], chances[level]
            self.growth.extend(*(given if self.draws is None else self.draws.drawn(self.growth, *given[:2])))
            first = level.stop


@dataclass(frozen=True, slots=True, eq=False)
class RowMasks:
    """What may be guessed after the rows that a round puts through the model next, which a thread finds. Until it is
    done, nothing else may use the text's structure."""

    work: Future[list[Bits | None]]
    of: DraftRound
    processed: int  # rows of its tree that had gone through the model
    begun_s: float


@dataclass(eq=False)
class DrafterText:
    """One opening. `slot` has consumed `ids[:covers]`; a tree's nodes continue from there."""

    number: int
    opening: bytes
    parameters: RequestParameters
    vocabulary: int  # the target's: ids of the text are below it
    structure: DraftStructure | None = None  # of its answer; None: guesses are of any tokens
    text: PeerText = field(default_factory=PeerText)
    slot: int = EMPTY_TEXT
    covers: int = 0
    first_slot: int = EMPTY_TEXT  # the memory at the end of opening, from which a text restarts after a deep cut
    first_covers: int = 0
    round: DraftRound | None = None
    kept: DraftRound | None = None
    traced: int | None = None  # length of the text at the last tree answered; None: no tree yet
    ranks: dict[int, int] = field(default_factory=dict)  # text position -> rank of its token
    opened: tuple[Ticket, int] | None = None  # the caller of `open`, and the number of restored tokens
    ahead: int = 0  # tokens that the text has more, or fewer where negative, in the target's ids
    closing: Ticket | None = None
    ended: bool = False  # its memory is being saved
    begun: RowMasks | None = None  # the last ones, of this round or of one before
    structured: bool = field(init=False)  # its answer has a structure, even if it is drafted without it by now

    def __post_init__(self) -> None:
        self.structured = self.structure is not None

    @property
    def base(self) -> int:
        return len(self.text.tokens)

    def is_drafted(self, chunk: int) -> bool:
        """Whether its tree can begin or go on with the next forward, of up to `chunk` tokens, once it `has_masks`."""
        if self.round is None:
            return False
        return bool(self.round.growth.processed) or (self.opened is None and self.base - self.covers <= chunk)

    def record_rank(
        self,
        position: int,
        candidates: Sequence[int],
        scores: Sequence[float],
        calibrations: MutableMapping[str, Calibration],
    ) -> None:
        """Record the rank of its token at `position` among a row's candidates, and fit its calibration to it."""
        token, shown = self.text.ids[position], candidates[:CANDIDATES]
        rank = shown.index(token) if token in shown else CANDIDATES
        self.ranks[position] = rank
        sampling = self.parameters.sampling
        # Allowed ids and structures may remove some candidates; drawn ones are in another order than their scores.
        removed = self.structured and len(shown) < CANDIDATES
        if not sampling.allowed_ids and not sampling.draws_guesses and not removed:
            calibrations[self.scored_by] = calibrations[self.scored_by].learn(scores, rank)

    @property
    def has_masks(self) -> bool:
        """Whether the masks of the rows that its round puts through the model next are known, or there are none."""
        if self.structure is None or self.round is None:
            return True
        begun, of = self.begun, (self.round, self.round.growth.processed)
        return begun is not None and (begun.of, begun.processed) == of and begun.work.done()

    def masks(self, first: int) -> list[Bits | None]:
        """What may be guessed after the rows that its round puts through the model next: the text's tokens from `first`
        on, and then levels of the tree. Only while it `has_masks`."""
        assert self.round is not None and self.has_masks
        if self.structure is not None and self.begun is not None:
            try:
                return self.begun.work.result()
            except BaseException as error:  # a panic of a native library is no Exception
                self.structure = None
                log.warning("a text is drafted without its structure, which failed: %r", error)
        growth = self.round.growth
        return [None for _ in (growth.frontier if growth.processed else range(first, self.base))]

    @property
    def lag(self) -> int:
        """Tokens before the root that an idle text's memory lacks; 0 if it is busy."""
        idle = self.round is None and self.closing is None
        return self.base - 1 - self.covers if idle else 0

    @property
    def needs_prefill(self) -> bool:
        """Whether a caller waits and the memory does not reach up to the root."""
        waits = self.opened is not None or self.closing is not None or self.round is not None
        return waits and self.covers < self.base - 1

    @property
    def waiting(self) -> list[Ticket]:
        """Of the callers that wait for it."""
        tickets = [
            self.round.ticket if self.round is not None else None,
            self.opened[0] if self.opened is not None else None,
            self.closing,
        ]
        return [ticket for ticket in tickets if ticket is not None]

    @property
    def greedy(self) -> bool:
        return self.parameters.sampling.temperature == 0

    @property
    def scored_by(self) -> str:
        """What its candidates' scores have beside logits, by which they are calibrated."""
        return "logits" if self.greedy else "noise" if self.parameters.sampling.shares_noise else "temperature"


def level_of(sessions: Sequence[DrafterText]) -> Level:
    """The next level of each session's tree; a root is one."""
    rounds = [session.round for session in sessions if session.round is not None]
    grown = [(each.growth, each.slots) for each in rounds]
    return Level(
        tokens=np.array([growth.tokens[row] for growth, _ in grown for row in growth.frontier], np.int64),
        counts=[len(each.new_rows) for each in rounds],
        texts=[session.slot for session in sessions],
        starts=[session.covers for session in sessions],
        depths=[growth.level for growth, _ in grown],
        trees=[Nodes(slots[: len(growth.above)], growth.above[:]) for growth, slots in grown],
    )


def check_tokens(session: DrafterText, update: TextUpdate) -> None:
    if update.tokens and not 0 <= min(update.tokens) <= max(update.tokens) < session.vocabulary:
        raise BadRequest("update.tokens", f"a token lies outside the vocabulary of {session.vocabulary}")
