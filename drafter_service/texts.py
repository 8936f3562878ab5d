"""Texts, rounds and answers of a drafter's scheduler, and the masks of texts with a structure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from dendro.calls import DraftCall, Opened, PeerText, PreparedTree, RequestParameters, TextUpdate
from dendro.clock import Clock
from dendro.daemon_threads import MaskThreads
from dendro.engine import Ticket
from dendro.errors import BadRequest
from dendro.failures import described
from dendro.grammars import Bits
from dendro.shapes import TreeShape
from dendro.tree import LAW_TOKENS, DraftTree

from drafter_service.confidence import CANDIDATES, Calibration, Calibrations
from drafter_service.grow import FixedForm, Growth, Numbers, growth_of
from drafter_service.plan import EMPTY_TEXT, Level, Levels, Nodes
from drafter_service.sampled import GuessDraws
from drafter_service.structures import DraftStructure

log = logging.getLogger("dendro.drafter")

LATE_S = 1.0
"""Seconds of waiting for masks after which a text is drafted without its structure for good."""


@dataclass(frozen=True, slots=True)
class MemoryComplete:
    """Says that the memory of a closing session is complete: the engine saves the slot, then `forget`s the opening."""

    opening: bytes
    slot: int  # text slot
    ids: tuple[int, ...]  # tokens that the slot has consumed
    digest: int
    tenant: str


Answer = DraftTree | PreparedTree | Opened | MemoryComplete | Exception


@dataclass(eq=False)
class DraftRound:
    """A draft call in progress. Its tree begins to grow with the forward of its root."""

    ticket: Ticket | None  # None: answered or stopped; the round is kept for its nodes
    shape: TreeShape
    base: int  # length of the text at the start of the round
    growth: Growth
    calibration: Calibration  # the calibration at the start of the round, for all its rows
    slots: list[int] = field(default_factory=list)  # node slots of the processed rows, in order
    draws: GuessDraws | None = None  # None: guesses are ranked, not drawn
    calibrated: bool = True  # False if an acceptance head computes the chances

    @property
    def width(self) -> int:
        """Number of candidates that each processed row needs."""
        return self.shape.width if self.draws is None else LAW_TOKENS

    def path_of(self, following: Sequence[int]) -> list[int]:
        """Numbers of the processed rows on the path of a text that goes on by `following` after the root, root first.
        Only rows whose next token the text has are on the path."""
        growth, path, row = self.growth, list[int](), 0
        for token in following:
            if row not in growth.place:
                break
            path.append(growth.place[row])
            child = growth.child(row, token)
            if child is None:
                break
            row = child
        return path

    def recalibrated(self, calibration: Calibration) -> bool:
        """Compute the chances of the rows so far again by another calibration. Returns False, with the round unchanged,
        if by the new chances other rows would have gone through the model."""
        if self.calibration == calibration or not self.calibrated:
            return True
        old, growth = self.growth, growth_of(self.growth.root, self.shape)
        forwarded = [old.tokens[row] for row in old.place]  # token of each processed row
        while growth.processed < old.processed:
            level = slice(growth.processed, len(growth.above))
            new = [growth.tokens[row] for row in growth.frontier]
            if not new or forwarded[level] != new or old.above[level] != growth.above[level]:
                return False
            scores = old.scores[level]
            growth.extend(old.candidates[level], scores, calibration.confidences(scores))
        self.growth, self.calibration = growth, calibration
        return True

    def extend(
        self, candidates: Sequence[Sequence[int]], scores: Sequence[Numbers], chances: Sequence[Numbers]
    ) -> None:
        """Add the children of the frontier's rows, and of further levels if their rows are given (`Growth.extend`).

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
    """Masks of the rows that a round puts through the model next, which a thread computes. Until the thread is done,
    nothing else may use the text's structure."""

    work: Future[list[Bits | None]]
    of: DraftRound
    processed: int  # rows of the tree that had gone through the model when the work began
    begun_s: float


@dataclass(eq=False)
class DrafterText:
    """One opening of a text. `slot` has consumed `ids[:covers]`; a tree's nodes continue from there."""

    number: int  # the session's number at the runner
    opening: bytes
    parameters: RequestParameters
    vocabulary: int  # the target's: ids of the text are below it
    structure: DraftStructure | None = None  # structure of the answer; None: any token may be guessed
    text: PeerText = field(default_factory=PeerText)
    slot: int = EMPTY_TEXT
    covers: int = 0  # tokens that `slot` has consumed
    first_slot: int = EMPTY_TEXT  # the memory at the end of opening, from which a text restarts after a deep cut
    first_covers: int = 0  # tokens that `first_slot` has consumed
    round: DraftRound | None = None  # the unfinished round
    kept: DraftRound | None = None  # the last finished or stopped round, whose nodes are kept
    drafted: DraftCall | None = None  # the last call for a tree
    traced: int | None = None  # length of the text at the last tree answered; None: no tree yet
    ranks: dict[int, int] = field(default_factory=dict)  # text position -> rank of the token there
    opened: tuple[Ticket, int] | None = None  # the caller of `open`, and the number of restored tokens
    ahead: int = 0  # length of the text in the target's ids minus its length in these ids
    closing: Ticket | None = None
    ended: bool = False  # True while the memory is being saved
    begun: RowMasks | None = None  # the masks begun last, for this round or an earlier round
    structured: bool = field(init=False)  # True if the answer has a structure, even one that is no longer followed

    def __post_init__(self) -> None:
        self.structured = self.structure is not None

    @property
    def base(self) -> int:
        return len(self.text.tokens.ids)

    @property
    def is_growing(self) -> bool:
        """True if rows of the round's tree have gone through the model."""
        return self.round is not None and self.round.growth.processed > 0

    def tokens(self, span: range) -> list[int]:
        """Tokens of the text at these positions."""
        return self.text.ids[span.start : span.stop]

    def is_drafted(self, chunk: int) -> bool:
        """True if the tree can begin or go on in the next forward, once the text `has_masks`. chunk: most tokens of a
        text in a forward"""
        if self.round is None:
            return False
        return self.is_growing or (self.opened is None and self.base - self.covers <= chunk)

    def record_rank(
        self,
        position: int,
        candidates: Sequence[int],
        scores: Sequence[float],
        calibrations: Calibrations,
    ) -> None:
        """Record the rank of the text's token at `position` among a row's candidates, and note it for calibration."""
        shown = candidates[:CANDIDATES]
        self.ranks[position] = rank = rank_of(self.text.ids[position], shown)
        sampling = self.parameters.sampling
        # Not fitted where candidates were removed, or drawn: drawn ones are in another order than their scores.
        removed = self.structured and len(shown) < CANDIDATES
        if not sampling.allowed_ids and not sampling.draws_guesses and not removed:
            calibrations.note(self.scored_by, scores, rank)

    @property
    def has_masks(self) -> bool:
        """True if the masks of the rows that the round puts through the model next are known or not needed."""
        if self.structure is None or self.round is None:
            return True
        begun, of = self.begun, (self.round, self.round.growth.processed)
        return begun is not None and (begun.of, begun.processed) == of and begun.work.done()

    def masks(self, first: int) -> list[Bits | None]:
        """Masks of the rows that the round puts through the model next: the text's tokens from `first` on, or the
        tree's frontier. Called only while the text `has_masks`."""
        assert self.round is not None and self.has_masks
        if self.structure is not None and self.begun is not None:
            try:
                return self.begun.work.result()
            except BaseException as error:  # a panic of a native library is no Exception
                self.structure = None
                log.warning("a text is drafted without its structure, which failed: %s", described(error))
        growth = self.round.growth
        return [None for _ in (growth.frontier if growth.processed else range(first, self.base))]

    @property
    def needs_prefill(self) -> bool:
        """True if a caller waits and the memory does not reach up to the root."""
        waits = self.opened is not None or self.closing is not None or self.round is not None
        return waits and self.covers < self.base - 1

    @property
    def waiting(self) -> list[Ticket]:
        """Tickets of the callers that wait for this text."""
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
        """Kind of the candidates' scores, each with its own calibration: `logits`, `noise` or `temperature`."""
        return "logits" if self.greedy else "noise" if self.parameters.sampling.shares_noise else "temperature"


def level_of(sessions: Sequence[DrafterText]) -> Level:
    """The next level of each session's tree; the root is the first level."""
    grown = [(session.round.growth, session.round.slots) for session in sessions if session.round is not None]
    return Level(
        tokens=np.array([growth.tokens[row] for growth, _ in grown for row in growth.frontier], np.int64),
        counts=[len(growth.frontier) for growth, _ in grown],
        texts=[session.slot for session in sessions],
        starts=[session.base - 1 for session in sessions],
        depths=[growth.level for growth, _ in grown],
        trees=[Nodes(slots[: len(growth.above)], growth.above[:]) for growth, slots in grown],
    )


def levels_of(session: DrafterText, form: FixedForm, source: int) -> Levels:
    """The remaining levels of a session's tree of this form, after the tokens before the root that its memory lacks.
    source: text slot from which these start"""
    draft_round = session.round
    assert draft_round is not None
    growth, before = draft_round.growth, session.tokens(range(session.covers, session.base - 1))
    return Levels(
        tokens=[*before, *[growth.tokens[row] for row in growth.frontier]],
        source=source,
        text=session.slot,
        start=session.covers,
        depth=growth.level,
        nodes=Nodes(draft_round.slots[: len(form.above)], form.above),
        counts=form.counts[growth.level :],
        ranks=form.ranks[growth.processed :],
    )


def rank_of(token: int, candidates: Sequence[int]) -> int:
    """Place of a token among a row's candidates; CANDIDATES if it is not among the first of so many."""
    shown = candidates[:CANDIDATES]
    return shown.index(token) if token in shown else CANDIDATES


def check_tokens(session: DrafterText, update: TextUpdate) -> None:
    """Raise BadRequest if a token of the update lies outside the session's vocabulary."""
    if update.tokens and not 0 <= min(update.tokens) <= max(update.tokens) < session.vocabulary:
        raise BadRequest("update.tokens", f"a token lies outside the vocabulary of {session.vocabulary}")


class TextMasks:
    """Finds the masks of texts that wait for a forward, in threads, and says which texts can take part in it. A text
    whose masks are late waits alone; the others go on."""

    def __init__(self, clock: Clock, wake: Callable[[], None]) -> None:
        """wake: called, from any thread, when a text that was left out has its masks"""
        self._threads = MaskThreads()
        self._clock = clock
        self._wake = wake
        self.patience_s: float | None = None
        """Seconds until a text that the last `ready` left out is drafted without its structure; None if it left out
        none."""

    def ready(self, texts: Sequence[DrafterText]) -> Sequence[DrafterText]:
        """The texts that need no masks, or whose masks are known after a short wait."""
        self.patience_s = None
        if any([text.structure is not None for text in texts]):
            return self._masked(texts)
        return texts

    def _masked(self, texts: Sequence[DrafterText]) -> Sequence[DrafterText]:
        """The texts whose masks are known after a short wait. Texts whose masks took longer the last time are not
        waited for, so that they delay the others only once."""
        now_s, begun, awaited = self._clock(), [], []
        for text in texts:
            quick = text.structure is not None and text.structure.quick  # read before a thread measures again
            if (masks := self._begun(text, now_s)) is not None:
                begun.append(masks.work)
                awaited += [masks.work] if quick else []
        self._threads.wait(awaited)
        for work in begun:
            if not work.done():
                work.add_done_callback(lambda _: self._wake())
        late = {text: text.begun.begun_s for text in texts if not text.has_masks and text.begun is not None}
        if late:
            self.patience_s = max(0.0, min(late.values()) + LATE_S - now_s)
        return [text for text in texts if text not in late]

    def _begun(self, text: DrafterText, now_s: float) -> RowMasks | None:
        """Begin to find the masks that the text's round needs. None if nothing was begun: none are needed, or they are
        known or on the way."""
        if text.has_masks or text.structure is None or text.round is None:
            return None
        if text.begun is not None and not text.begun.work.done():
            if now_s - text.begun.begun_s >= LATE_S:
                text.structure = None
                log.warning("a text is drafted without its structure, whose masks take more than %g s", LATE_S)
            return None
        growth = text.round.growth
        if growth.processed:
            work = partial(text.structure.of_level, growth)
        else:
            work = partial(text.structure.after_text, list(text.text.ids), text.covers)
        text.begun = RowMasks(self._threads.begin(work), text.round, growth.processed, now_s)
        return text.begun
