"""Which rows of which texts the next step takes. Sees requests, plain arrays and page numbers; never a tensor.

ask ->  inbox  -> next(): settle what needs no forward, then pack one step -> Plan
Outcome -> apply(): what the memory now covers, and the answers
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from dendro.calls import CloseCall, Closed, OpenCall, Opened, PeerText, Terms, VerifyCall
from dendro.errors import BadRequest, DendroError, EngineFailed, NotFound, Overloaded, PeerLost
from dendro.text import Verdict, cut_verdict
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE, near_window
from tree_kernels.tree_walk import Walk
from tree_kernels.warp import Warp
from tree_layers.memory import PageBook, pages_for

from verifier_service.rows import NO_ROWS, Outcome, Plan, pack, text_rows
from verifier_service.walk import Draw

Call = OpenCall | VerifyCall | CloseCall


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the engine holds and runs at once. Computed when it is loaded."""

    vocabulary: int
    max_length: int  # tokens of a text
    max_rows: int  # rows of a tree
    max_depth: int
    max_sessions: int
    step_rows: int  # rows of a step
    prefill_rows: int  # rows of a step that are kept for prompts while trees wait, and their limit beside trees
    pages: int  # for texts
    first_scratch: int  # the slots for guesses begin here
    end_ids: frozenset[int]

    @property
    def near(self) -> int:
        return near_window(self.max_depth)


class Reply(Protocol):
    """Where an answer goes: an asyncio future, or anything like it."""

    def done(self) -> bool: ...
    def set_result(self, answer: Any) -> None: ...
    def set_exception(self, error: BaseException) -> None: ...


@dataclass(slots=True, eq=False)
class Ask:
    """A call that waits for its answer."""

    call: Call
    reply: Reply
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def given_up(self) -> bool:
        """Its caller waits no longer."""
        return self.reply.done()

    def answer(self, answer: Any) -> None:
        if not self.reply.done():
            self.reply.set_result(answer)

    def fail(self, error: BaseException) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


@dataclass(slots=True, eq=False)
class Session:
    """One opening of one text."""

    number: int
    terms: Terms
    warp: Warp
    text: PeerText
    pages: list[int]  # for the longest that the text may become
    consumed: list[int] = field(default_factory=list)  # tokens whose keys are in their places
    opening: Ask | None = None  # until the prompt is consumed
    asks: deque[Ask] = field(default_factory=deque)  # verifications, in order of arrival

    @property
    def lacking(self) -> int:
        """Committed tokens before the root that the memory has not consumed."""
        return len(self.text.ids) - 1 - len(self.consumed)

    def append(self, tokens: Sequence[int]) -> None:
        """The keys of these tokens are in their places now: what follows what was consumed, certain or drawn."""
        self.consumed += tokens

    def drop(self, length: int) -> None:
        """Forget what was consumed past `length` tokens. An index only: the keys are written over."""
        del self.consumed[length:]


@dataclass(slots=True, eq=False)
class _Share:
    """What one session has in a step."""

    session: Session
    prefill: int  # committed rows, from `covered` on
    ask: Ask | None  # with its tree


class Scheduler:
    """Owns the sessions, their pages and the order of things. `next` and `apply` alternate."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.book = PageBook(capacity.pages)
        self.sessions: dict[bytes, Session] = {}
        self._inbox: deque[Ask] = deque()
        self._numbers = 0
        self._closed: list[int] = []
        self._running: list[_Share] = []
        self._started = 0.0

    def submit(self, ask: Ask) -> None:
        """Take in a call; it is looked at by the next `next`."""
        self._inbox.append(ask)

    def next(self) -> Plan | None:
        """The next step, or None where nothing needs one. Answers at once what needs none."""
        while self._inbox:
            ask = self._inbox.popleft()
            if ask.given_up and not isinstance(ask.call, CloseCall):
                continue
            try:
                self._take(ask)
            except DendroError as error:
                ask.fail(error)
        for opening, session in list(self.sessions.items()):
            if session.opening is not None and session.opening.given_up:
                self._free(opening)
        self._running = self._pick()
        if not self._running:
            return None
        self._started = time.perf_counter()
        return self._pack(self._running)

    def apply(self, outcome: Outcome) -> list[tuple[int, int]]:
        """Take in what came of the last plan and answer. Returns (session, base) of the rounds likely to come next and
        to need noise."""
        walks = iter(outcome.walks)
        likely = []
        for share in self._running:
            session = share.session
            done = len(session.consumed)
            session.append(session.text.ids[done : done + share.prefill])
            if share.ask is not None:
                verdict = self._verdict(session, share.ask, next(walks), outcome.run_us)
                session.append([session.text.ids[-1], *verdict.tokens[:-1]])  # the root and the path below it
                session.asks.remove(share.ask)
                share.ask.answer(verdict)
                if not session.warp.greedy:
                    likely.append((session.number, len(session.text.ids) + len(verdict.tokens)))
            self._settle_opening(session)
        self._running = []
        return likely

    def fail(self, error: Exception) -> None:
        """The last plan's forward failed: its texts are lost, the others go on."""
        for share in self._running:
            for opening, session in list(self.sessions.items()):
                if session is share.session:
                    self._free(opening, EngineFailed(f"verifier: {error}"))
        self._running = []

    def stop(self) -> None:
        """Fail whatever waits."""
        for ask in self._inbox:
            ask.fail(PeerLost("verifier: it was stopped"))
        self._inbox.clear()
        for opening in list(self.sessions):
            self._free(opening, PeerLost("verifier: it was stopped"))

    def take_closed(self) -> tuple[int, ...]:
        """Numbers of sessions that ended since they were last taken."""
        closed, self._closed = tuple(self._closed), []
        return closed

    # What a call does when it is taken in

    def _take(self, ask: Ask) -> None:
        call = ask.call
        if isinstance(call, OpenCall):
            self._open(ask, call)
            return
        session = self.sessions.get(call.update.opening)
        if session is None:
            raise NotFound("opening: unknown here; open the text again")
        if isinstance(call, CloseCall):
            self._free(call.update.opening)
            ask.answer(Closed(saved=0))  # the keys of a Transformer stay on no shelf
            return
        session.asks.append(ask)

    def _open(self, ask: Ask, call: OpenCall) -> None:
        capacity, update = self.capacity, call.update
        self._check_text(update.base, update.tokens)
        longest = call.terms.limits.max_length
        if longest > capacity.max_length:
            raise BadRequest("limits.max_length", f"{longest} tokens; a text here has at most {capacity.max_length}")
        if longest <= update.base:
            raise BadRequest("limits.max_length", f"{longest} tokens leave no room after a text of {update.base}")
        sampling = call.terms.sampling
        try:
            warp = Warp(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        except ValueError as error:
            raise BadRequest("sampling", str(error)) from error
        text = PeerText()
        text.follow(update)
        needed = pages_for(longest + capacity.max_depth)
        if needed > capacity.pages:
            raise BadRequest("limits.max_length", f"needs {needed} pages of {PAGE} tokens; there are {capacity.pages}")
        self._free(update.opening)
        if len(self.sessions) >= capacity.max_sessions:
            raise Overloaded(f"sessions: all {capacity.max_sessions} are taken")
        if needed > self.book.free:
            raise Overloaded(f"pages: {needed} wanted, {self.book.free} of {capacity.pages} free")
        self._numbers += 1
        session = Session(self._numbers, call.terms, warp, text, self.book.take(needed), opening=ask)
        self.sessions[update.opening] = session
        self._settle_opening(session)

    def _check_text(self, base: int, tokens: Sequence[int]) -> None:
        if base < 1:
            raise BadRequest("text", "is empty: there is no token to go on from")
        if base >= self.capacity.max_length:
            raise BadRequest(
                "text", f"has {base} tokens; at most {self.capacity.max_length - 1} leave room for one more"
            )
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.capacity.vocabulary:
            raise BadRequest("text", f"has a token outside the vocabulary of {self.capacity.vocabulary}")

    def _settle_opening(self, session: Session) -> None:
        """Answer the open call once all but the root is consumed."""
        ask = session.opening
        if ask is not None and not session.lacking:
            waited = int(1e6 * (time.perf_counter() - ask.arrived))
            ask.answer(Opened(restored=0, processed=len(session.consumed), open_us=waited))
            session.opening = None

    def _free(self, opening: bytes, error: DendroError | None = None) -> None:
        """End an opening, if there is one: its pages are free at once."""
        session = self.sessions.pop(opening, None)
        if session is None:
            return
        self.book.give(session.pages)
        self._closed.append(session.number)
        reason = error or NotFound("opening: it was closed")
        for ask in (*session.asks, *([session.opening] if session.opening else [])):
            ask.fail(reason)

    # What goes into a step

    def _pick(self) -> list[_Share]:
        """Trees first, in order of arrival, each with what its text lacks before it; prompts share what is left."""
        ready = []
        for session in self.sessions.values():
            if session.opening is None and (ask := self._followed(session)) is not None:
                ready.append((ask.arrived, session, ask))
        ready.sort(key=lambda each: each[0])
        prompts = any(session.opening is not None for session in self.sessions.values())
        room = self.capacity.step_rows - (self.capacity.prefill_rows if prompts else 0)
        shares: list[_Share] = []
        for _, session, ask in ready:
            assert isinstance(ask.call, VerifyCall)
            rows = session.lacking + ask.call.tree.rows
            if rows <= room:
                shares.append(_Share(session, session.lacking, ask))
                room -= rows
        room = self.capacity.prefill_rows if shares else self.capacity.step_rows
        taken = {share.session.number for share in shares}
        for session in self.sessions.values():  # the oldest first
            rows = min(session.lacking, room)
            if rows and session.number not in taken and (session.opening is not None or session.asks):
                shares.append(_Share(session, rows, None))
                room -= rows
        return shares

    def _followed(self, session: Session) -> Ask | None:
        """The session's first call that is in order, its text brought up to it."""
        while session.asks:
            ask = session.asks[0]
            if not ask.given_up:
                assert isinstance(ask.call, VerifyCall)
                try:
                    self._follow(session, ask.call)
                    return ask
                except DendroError as error:
                    ask.fail(error)
            session.asks.popleft()
        return None

    def _follow(self, session: Session, call: VerifyCall) -> None:
        """Bring the session's text up to a call; what the memory holds past the common part is dropped."""
        self._check_text(call.update.base, call.update.tokens)
        if call.update.base >= session.terms.limits.max_length:
            raise BadRequest("text", f"has reached its limit of {session.terms.limits.max_length} tokens")
        stands = min(session.text.follow(call.update), len(session.consumed))
        # The last verdict's path was appended at once: it stands as far as its tokens came back with this call.
        ids = session.text.ids
        while stands < len(session.consumed) and stands < len(ids) and session.consumed[stands] == ids[stands]:
            stands += 1
        session.drop(min(stands, len(ids) - 1))  # the root is consumed with its tree
        self._check_tree(call, ids[-1])

    def _check_tree(self, call: VerifyCall, root: int) -> None:
        tree, capacity = call.tree, self.capacity
        if tree.tokens[0] != root:
            raise BadRequest("tree.tokens", f"begins with {tree.tokens[0]}, the text ends with {root}")
        if tree.rows > capacity.max_rows:
            raise BadRequest("tree.tokens", f"{tree.rows} rows; a tree here has at most {capacity.max_rows}")
        if int(tree.tokens.max()) >= capacity.vocabulary:
            raise BadRequest("tree.tokens", f"a token lies outside the vocabulary of {capacity.vocabulary}")
        if int(tree.depths.max()) > capacity.max_depth:
            raise BadRequest("tree.parents", f"depth {tree.depths.max()}; a tree here has at most {capacity.max_depth}")

    def _pack(self, shares: Sequence[_Share]) -> Plan:
        parts, draws = [], []
        start, guesses, wanted = 0, 0, [NO_ROWS]
        for share in shares:
            session, tree = share.session, None
            committed = np.arange(len(session.consumed), len(session.consumed) + share.prefill)
            scratch = self.capacity.first_scratch + guesses
            if share.ask is not None:
                assert isinstance(share.ask.call, VerifyCall)
                tree = share.ask.call.tree
                first = start + share.prefill
                draws.append(self._draw(session, tree, first, sum(map(len, wanted))))
                wanted.append(np.arange(first, first + tree.rows))
                guesses += tree.guesses
            part = text_rows(session.text.ids, committed, tree, session.pages, scratch, self.capacity.near)
            parts.append(part)
            start += len(part.tokens)
        return pack(parts, np.concatenate(wanted), draws)

    def _draw(self, session: Session, tree: DraftTree, first: int, wanted: int) -> Draw:
        sampling = session.terms.sampling
        return Draw(
            session=session.number,
            first=first,
            wanted=wanted,
            base=len(session.text.ids),
            tokens=tree.tokens,
            parents=tree.parents,
            depths=tree.depths,
            warp=session.warp,
            seed=sampling.seed,
            sample_index=sampling.sample_index,
        )

    def _verdict(self, session: Session, ask: Ask, walked: Walk, run_us: int) -> Verdict:
        verdict = Verdict(
            tokens=walked.tokens,
            path=walked.path,
            ranks=walked.ranks,
            finish=None,
            length=len(walked.tokens),
            verify_us=run_us,
            queue_us=max(int(1e6 * (self._started - ask.arrived)), 0),
        )
        return cut_verdict(verdict, self.capacity.end_ids, len(session.text.ids), session.terms.limits)
