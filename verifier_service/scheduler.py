"""The verifier's scheduler: chooses the rows of the next step. It handles requests, plain arrays and page numbers, no
tensors.

PendingCall -> submit(): answer a call that needs no forward, queue any other
next(): pack one step -> StepPlan
StepOutcome -> apply(): record what the memory now covers, and answer

A call may announce that the text's next round has the root alone. The scheduler then begins that round ahead of its
call, right after the verdict, and keeps the round's verdict for the call, so the way to the router and back costs no
time. At most one round of a text is ahead, and a call with a tree drops it. An opening may announce the first round:
its root is a row of the step with the prompt's last rows, so it costs no step.

A call may instead order the next round's tree, whose round then begins when the tree is there (`orders.py`).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from dendro.calls import CloseCall, Closed, OpenCall, Opened, PeerText, TextUpdate, VerifyCall
from dendro.clock import Clock
from dendro.engine import Ticket
from dendro.errors import BadRequest, DendroError, EngineFailed, NotFound, Overloaded
from dendro.failures import described
from dendro.logprobs import NOT_ECHOED, EchoedLogprobs
from dendro.measured import microseconds, smoothed, totals_by_size
from dendro.order import Missed
from dendro.text import Finish, Verdict, cut_verdict
from dendro.tree import DraftTree
from tree_kernels.tree_walk import Walk

from verifier_service.budget import StepCosts, path_in, worth_waiting, worthwhile
from verifier_service.memory import PageTable
from verifier_service.orders import OrderedRounds
from verifier_service.recurrent import StatePool, recurrent_rows_of
from verifier_service.requests import (
    Capacity,
    PendingCall,
    Saved,
    StepShare,
    VerifierCounters,
    VerifierText,
    displaced_by,
    longest_saved,
    next_in_turn,
    texts_by_tenant,
)
from verifier_service.rows import NO_ROWS, RowPaths, StepOutcome, StepPlan, TextPart, rows_of_texts
from verifier_service.walk import Draw, Echo, MasksPending, guarded

log = logging.getLogger("dendro.verifier")


class StepScheduler:
    """Owns texts, their pages and their order. The engine calls `next` and `apply` in turns."""

    def __init__(self, capacity: Capacity, clock: Clock = time.monotonic) -> None:
        self.capacity = capacity
        self.clock = clock
        arranged = capacity.recurrent
        places = StatePool(arranged.places, arranged.extent) if arranged is not None else None
        self.memory = PageTable(capacity.pages, capacity.share_prefixes, capacity.window, capacity.slack, places)
        self.counters = VerifierCounters()
        self.by_rows = totals_by_size(capacity.sizes)  # steps and their times, as in the counters
        self.costs = StepCosts()
        self.sessions: dict[bytes, VerifierText] = {}  # key: opening; oldest first
        self.orders = OrderedRounds(capacity, self.counters, self.sessions, clock)
        self._numbers = 0  # sessions opened so far
        self._restoring: list[tuple[VerifierText, Saved]] = []  # saved memories to restore before the next step
        self._leaving: deque[tuple[VerifierText, PendingCall]] = deque()  # closed texts whose memory is to be saved
        self._running: list[StepShare] = []  # shares of the last plan
        self.asked = 0  # shares of the last plan that answer a call
        # Times of the last step: its `next` began, packing began, its answers were sent.
        self._began = self._started = self._ended = 0.0
        self.linger_s = 0.0  # seconds that the engine waits for more calls before `next`, if some are pending
        self._size = 0  # rows of the last plan, padded

    def submit(self, ask: PendingCall) -> None:
        """Answer a call that needs no step, or queue it for one."""
        if ask.ticket.cancelled and not isinstance(ask.call, CloseCall):
            return
        error = guarded(partial(self._take, ask))
        if isinstance(error, EngineFailed):
            self.gone(ask.call.update.opening, error)
        if error is not None:
            ask.ticket.settle(error)

    def next(self) -> StepPlan | None:
        """Plan the next step. None if no text needs one, if the step should wait for `linger_s`, or if saved memories
        must be restored first (`take_restoring`)."""
        began = self.clock()
        if self.orders.awaited:
            self.orders.begin_late(began)
        self._admit()
        self.linger_s, self._running = 0.0, []
        if self._restoring:  # a step packed now would read checkpoints that are not restored yet
            return None
        if len(self.sessions) > 1:
            self.linger_s = worth_waiting(self.sessions.values(), self.costs, self._size, self._ended, self.clock)
        self._running = [] if self.linger_s else self._pick()
        if not self._running:
            return None
        self._began, self._started = began, self.clock()
        self.asked = sum(share.ask is not None for share in self._running)
        plan = packed(self._running, self.capacity)
        self._size = self._padded(len(plan.tokens))
        self.counters.steps += 1
        self.counters.rows += len(plan.tokens)
        self.counters.guesses += sum(draw.tree.guesses for draw in plan.draws)
        return plan

    def apply(self, outcome: StepOutcome) -> None:
        """Record the last plan's outcome and answer."""
        walks, echoed, verdicts = enumerate(outcome.walks), iter(outcome.echoed), []
        if not outcome.cold:
            self.costs.learn(self._size, outcome.run_us)
        for share in self._running:
            session = share.session
            positions = share.echoed
            scores = next(echoed) if positions else ()
            done = len(session.memory.consumed)
            self.memory.append(session.memory, session.text.ids[done : done + share.prefill])
            if isinstance(scores, DendroError):
                self._free(session, scores)
                if share.ask is not None:
                    next(walks)
                continue
            session.echoed.update(zip((1 + row for row in positions), scores, strict=True))
            if share.ask is not None:
                verdict = guarded(partial(self._verdict, share, share.ask, *next(walks), outcome))
                if isinstance(verdict, MasksPending):
                    self.counters.masks_late += 1
                    session.masks = verdict.work
                elif isinstance(verdict, BadRequest):  # no token continues its text, or its answer's structure
                    self._refuse(session, share.ask, verdict)
                elif isinstance(verdict, DendroError):
                    self._free(session, verdict)
                    continue
                else:
                    path = [session.text.ids[-1], *verdict.tokens[:-1]]  # the root and the guesses below it
                    self.memory.append(session.memory, path)
                    verdicts.append((session, share.ask, verdict))
                    session.rows = share.tree.rows if share.tree is not None else 1
            self._settle_opening(session)
        self._running = []
        self.counters.forward_us += outcome.forward_us
        self._ended = self.clock()
        took_us = microseconds(self._ended - self._began)
        self.counters.step_us += took_us
        self.by_rows[self._size].add(took_us)
        for session, ask, verdict in verdicts:  # last: the next calls may arrive at once
            session.asks.remove(ask)
            if ask is session.ahead:
                ask.ticket.settle(verdict)  # kept for the round's call
            else:
                self._answer(session, ask, verdict)

    def _refuse(self, session: VerifierText, ask: PendingCall, error: BadRequest) -> None:
        self.counters.structures_stuck += error.field == "structure"
        session.asks.remove(ask)  # nobody waits for a round begun ahead: the round's call will run, and be refused
        ask.ticket.settle(error)

    def _answer(self, session: VerifierText, ask: PendingCall, verdict: Verdict) -> None:
        """Answer a call. Ask for the next round's tree if the call ordered one, and begin that round ahead if the call
        announced its root alone."""
        assert isinstance(ask.call, VerifyCall)
        ended, order = verdict.finish is not None, ask.call.order
        session.answered = None if ended or ask.call.ahead else self._ended
        if not ended and (order is not None or ask.call.ahead):
            session.text.tokens.extend(verdict.tokens)
        if not ended and order is not None:  # The drafter is asked before the router is answered: the next round waits.
            self.orders.place(session, order)
        ask.ticket.settle(verdict)
        if not ended and ask.call.ahead:
            self._begin_ahead(session)

    def _begin_ahead(self, session: VerifierText) -> None:
        """Queue a round of the text's root alone, whose call is expected."""
        text = session.text.tokens
        call = VerifyCall(TextUpdate.of(session.name, text, len(text)), DraftTree.root_only(text.ids[-1]))
        session.ahead = PendingCall(call, Ticket(self.clock()))
        session.asks.append(session.ahead)
        self.counters.ahead += 1

    def _claim(self, session: VerifierText, ask: PendingCall, call: VerifyCall) -> bool:
        """Answer a call with the verdict of the round begun ahead of it, or let it take that round's place. False if
        there is no such round.

        The verdict's times count from the call's arrival; the step's time before that is its `ahead_us`.
        """
        begun, session.ahead = session.ahead, None
        verdict: Any = None
        if begun is not None and begun.ticket.settled:
            verdict, begun = begun.ticket.value, None
        elif begun is not None:  # it has not run: the call itself takes its place
            session.asks.remove(begun)
        wanted, text = session.ordered, session.text.tokens
        same = (call.update.base, call.update.digest) == (len(text), text.digest())
        if call.ordered and same and wanted is not None and wanted.claim is None:
            wanted.claim = ask
            return True
        self.orders.drop(session)
        if call.ordered and same and begun is not None:
            assert isinstance(begun.call, VerifyCall)
            ask.ticket.arrived_s = max(ask.ticket.arrived_s, begun.ticket.arrived_s)
            session.asks.append(replace(begun, call=replace(call, tree=begun.call.tree), ticket=ask.ticket))
            return True
        made = isinstance(verdict, Verdict)  # else nothing, or the error of a round that was refused
        if not made or call.tree.rows > 1 or not same or call.ordered is (verdict.tree is None):
            self.counters.unclaimed += made
            if call.ordered:
                session.asks.append(replace(ask, missed=Missed.UNKNOWN))
            return call.ordered
        waited_us = microseconds(self.clock() - ask.ticket.arrived_s)
        verify_us = min(verdict.verify_us, waited_us)
        queue_us = min(verdict.queue_us, waited_us - verify_us)
        left = replace(verdict, verify_us=verify_us, queue_us=queue_us, ahead_us=verdict.verify_us - verify_us)
        self._answer(session, ask, left)
        return True

    def fail(self, error: BaseException) -> None:
        """End the texts of the last plan with EngineFailed, because its forward failed; the others go on."""
        for share in self._running:
            self._free(share.session, EngineFailed(f"verifier: {described(error)}"))
        self._running = []

    def give_up(self, reason: DendroError) -> None:
        """End all texts and fail all pending calls with `reason`."""
        for _, ask in self._leaving:
            ask.ticket.settle(reason)
        self._leaving.clear()
        self._restoring.clear()
        for session in list(self.sessions.values()):
            self._free(session, reason)

    # Handling a call

    def _take(self, ask: PendingCall) -> None:
        call = ask.call
        if isinstance(call, OpenCall):
            self._open(ask, call)
            return
        session = self.sessions.get(call.update.opening)
        if session is None:
            raise NotFound("opening: unknown here; open the text again")
        if isinstance(call, CloseCall):
            if self.capacity.saves and not ask.ticket.cancelled and self._leave(session, ask, call):
                return
            self._free(session)
            ask.ticket.settle(Closed(saved=0))  # attention keys are never saved
            return
        if session.leaving:
            raise NotFound("opening: it was closed")
        if call.order is not None and session.parameters.sampling.draws_guesses:
            raise BadRequest("verify.order", "is of a text whose guesses are drawn; its trees come from the router")
        if session.answered is not None and session.ordered is None:
            session.away_s = smoothed(session.away_s, ask.ticket.arrived_s - session.answered)
            session.answered = None
        if not self._claim(session, ask, call):
            session.asks.append(ask)

    def _open(self, ask: PendingCall, call: OpenCall) -> None:
        capacity, update = self.capacity, call.update
        capacity.check_opening(update, call.parameters)
        text = PeerText()
        text.follow(update)
        self.gone(update.opening)
        if len(self.sessions) >= capacity.max_sessions + capacity.max_waiting:
            self._make_room(call.parameters.tenant)
        self._numbers += 1
        session = VerifierText.opened(self._numbers, ask, call, text, capacity)
        self.sessions[update.opening] = session
        if call.ahead:
            self._begin_ahead(session)

    def _make_room(self, tenant: str) -> None:
        """End a waiting text, so that the tenant can open one more (`displaced_by`). Raises Overloaded if none ends."""
        self.counters.refused += 1
        places, waiting = self.capacity.max_sessions, len(self.sessions) - self.capacity.max_sessions
        full = Overloaded(f"sessions: {places} texts are open and {waiting} wait, the most allowed")
        leaves = displaced_by(tenant, tuple(self.sessions.values()))
        if leaves is None:
            raise full
        self._free(leaves, full)

    def _leave(self, session: VerifierText, ask: PendingCall, call: CloseCall) -> bool:
        """Queue a closed text's memory to be saved. False if the memory does not cover the text."""
        if call.update.base > self.capacity.max_length:  # longer than any text here: do not hash its tokens
            return False
        if not self.capacity.knows(call.update.tokens):
            return False
        try:
            self._follow_text(session, call.update)
        except NotFound:
            return False
        if not session.memory.consumed or session.lacking:
            return False
        self._fail(session, NotFound("opening: it was closed"))
        session.leaving = True
        self._leaving.append((session, ask))
        return True

    def next_leaving(self) -> tuple[VerifierText, PendingCall] | None:
        """The next closed text whose memory is to be saved. Unless preempted, it keeps its memory until `gone`."""
        return self._leaving.popleft() if self._leaving else None

    def gone(self, opening: bytes, error: DendroError | None = None) -> None:
        """End a text if it is open: its memory was copied, the caller of its opening has gone, or it is opened
        again."""
        if (session := self.sessions.get(opening)) is not None:
            self._free(session, error)

    def take_restoring(self) -> list[tuple[VerifierText, Saved]]:
        """Saved memories to restore before `next` packs a step. The caller calls `restored` for each of them."""
        restoring, self._restoring = self._restoring, []
        return restoring

    def restored(self, session: VerifierText, succeeded: bool) -> None:
        """Record that a saved memory was restored, or that this failed: the text is then prefilled."""
        if session not in self.sessions.values():  # all texts were ended meanwhile
            return
        if not succeeded:
            self.memory.release(session.memory)
            session.restored = 0
        self._settle_opening(session)

    def _admit(self) -> None:
        """Admit waiting texts while there are places and pages for them: in turns by tenant, each tenant's oldest."""
        waiting = [session for session in self.sessions.values() if not session.admitted]
        if not waiting:
            return
        admitted = texts_by_tenant([session for session in self.sessions.values() if session.admitted])
        places = self.capacity.max_sessions - admitted.total()
        while waiting:
            session = next_in_turn(waiting, admitted)
            pages = self.capacity.pages_of(len(session.text.ids) + self.capacity.max_depth)
            if not places or pages > self.memory.book.free:  # strictly in turn: a short text never overtakes a long one
                for each in waiting:
                    self.counters.waited += not each.counted
                    each.counted = True
                return
            waiting.remove(session)
            session.admitted = True
            admitted[session.parameters.tenant] += 1
            places -= 1
            saved = longest_saved(session, self.sessions.values()) if self.capacity.saves else None
            if saved is not None and self.memory.restore(
                session.memory, session.text.ids[: saved.length], saved.tokens
            ):
                self._restoring.append((session, saved))
                session.restored = saved.length
                continue
            self._adopt(session)

    def _adopt(self, session: VerifierText) -> None:
        """Give an admitted text without pages, new or preempted, those of its text that others have published. They may
        be all that its opening lacks."""
        if session.admitted and not session.memory.pages:
            session.restored = self.memory.adopt(session.memory, session.shareable)
            self._settle_opening(session)

    def _settle_opening(self, session: VerifierText) -> None:
        """Answer the open call once all but the root is consumed."""
        ask = session.opening
        if ask is not None and session.lacking <= 0:  # less than 0 if the root is consumed, too
            waited = microseconds(self.clock() - ask.ticket.arrived_s)
            length, first, found = len(session.text.ids), session.parameters.echo_from, session.echoed
            processed = length - 1 - session.restored
            session.opening, session.echoed = None, {}
            echoed = NOT_ECHOED if first is None else EchoedLogprobs.of([found[each] for each in range(first, length)])
            ask.ticket.settle(Opened(session.restored, processed, waited, echoed))

    def _free(self, session: VerifierText, error: DendroError | None = None) -> None:
        """End a text, whose calls fail with an error, and release its pages. The other texts of its step go on."""
        del self.sessions[session.name]
        self.memory.release(session.memory)
        if session.structure is not None:
            self.counters.structures += 1
            self.counters.structure_items += session.structure.items
            self.counters.structure_budget += session.structure.budget
        self._fail(session, error or NotFound("opening: it was closed"))

    def _fail(self, session: VerifierText, reason: DendroError) -> None:
        self.orders.drop(session)
        for ask in (*session.asks, *([session.opening] if session.opening else [])):
            ask.ticket.settle(reason)
        session.drop_all()

    # Packing a step

    def _pick(self) -> list[StepShare]:
        """Choose the step's rows: trees first, in order of arrival, each with the rows that its text lacks; prompts
        share the remaining rows."""
        ready = []
        for session in self.sessions.values():
            if session.opening is not None:
                self._adopt(session)
            if session.opening is None and session.masked and (ask := self._followed(session)) is not None:
                ready.append((ask.ticket.arrived_s, session, ask))
            if session.asks:
                self._adopt(session)
        ready.sort(key=lambda each: each[0])
        step_rows, prefill_rows = self.capacity.step_rows, self.capacity.prefill_rows
        # Texts that need rows of prompts: being opened, or preempted and too long for one step.
        prompts = any(
            session.admitted
            and (session.opening is not None or (session.asks and session.lacking >= step_rows - prefill_rows))
            for session in self.sessions.values()
        )
        room = step_rows - (prefill_rows if prompts else 0)
        shares: list[StepShare] = []
        taken: set[int] = set()
        for _, session, ask in ready:  # the roots and the missing rows before them
            assert isinstance(ask.call, VerifyCall)
            deepest = len(session.text.ids) + ask.call.tree.depth
            needed = session.lacking + session.least_rows(ask.call.tree)
            if needed <= room and self._hold(session, deepest, taken):
                shares.append(StepShare(session, session.lacking, ask, ask.call.tree))
                taken.add(session.number)
                room -= needed
        if len(shares) > 1 or any(share.tree.guesses > room for share in shares if share.tree is not None):
            self._trim(shares, room)
        room = step_rows
        if shares:
            used = sum(share.prefill + share.tree.rows for share in shares if share.tree is not None)
            # Prompts get what the trees leave of `prefill_rows`, at least half of it, and all rows of padding.
            wanted = used + max(prefill_rows - used, prefill_rows // 2)
            room = min(self._padded(wanted), step_rows) - used
        for session in list(self.sessions.values()):  # the oldest first
            rows = min(session.lacking, room)
            if rows <= 0 or session.number in taken or not session.admitted or not session.waits:
                continue
            first = session.opening is not None and rows == session.lacking < room
            # The round that the opening announced, if it did.
            ask = self._followed(session) if first and session.masked else None
            if self._hold(session, len(session.memory.consumed) + rows + (ask is not None), taken):
                shares.append(StepShare(session, rows, ask, DraftTree.root_only(session.text.ids[-1]) if ask else None))
                taken.add(session.number)
                room -= rows + (ask is not None)
        return shares

    def _padded(self, rows: int) -> int:
        """Number of rows to which a step of `rows` rows is padded."""
        sizes = self.capacity.sizes
        return sizes[min(bisect_left(sizes, rows), len(sizes) - 1)]

    def _trim(self, shares: Sequence[StepShare], room: int) -> None:
        """Drop the guesses that do not fit and, where several texts have some, those that are not worth their rows."""
        must = sum(share.prefill + share.session.least_rows(share.tree) for share in shares if share.tree is not None)
        shares = [share for share in shares if share.session.trimmed]
        trees = [share.tree for share in shares if share.tree is not None]
        if not trees:
            return
        kept = worthwhile(trees, must, room, self.capacity.sizes, self.costs)
        for share, tree in zip(shares, kept, strict=True):
            share.tree = tree
        self.counters.trimmed += sum(tree.guesses for tree in trees) - sum(tree.guesses for tree in kept)

    def _hold(self, session: VerifierText, tokens: int, taken: set[int]) -> bool:
        """Let a text hold `tokens` tokens, preempting younger texts that are not in `taken`. False if that is not
        enough."""
        while not self.memory.grow(session.memory, tokens):
            others = [other for other in self.sessions.values() if other.memory.pages and other.number not in taken]
            if not others or others[-1].number <= session.number:
                return False
            self.memory.release(others[-1].memory)
            self.counters.preempted += 1
        return True

    def _followed(self, session: VerifierText) -> PendingCall | None:
        """The session's first valid call, after its text is updated to it. Invalid calls before it get their error."""
        while session.asks:
            ask = session.asks[0]
            if not ask.ticket.cancelled:
                assert isinstance(ask.call, VerifyCall)
                error = guarded(partial(self._follow, session, ask.call))
                if error is None:
                    return ask
                ask.ticket.settle(error)
            session.asks.remove(ask)
        return None

    def _follow(self, session: VerifierText, call: VerifyCall) -> None:
        """Update the session's text to a call, and drop the memory past the common prefix."""
        self.capacity.check_text(call.update.base, call.update.tokens)
        if call.update.base >= session.parameters.limits.max_length:
            raise BadRequest("text", f"has reached its limit of {session.parameters.limits.max_length} tokens")
        self._follow_text(session, call.update)
        if session.structure is not None:
            session.follow_structure(session.structure)
        self.capacity.check_tree(call.tree, session.text.ids, session.parameters.sampling)

    def _follow_text(self, session: VerifierText, update: TextUpdate) -> None:
        consumed = session.memory.consumed
        valid = min(session.follow(update), len(consumed))
        # The path of the last verdict, which `apply` appended, is valid as far as this call's tokens repeat it.
        ids = session.text.ids
        while valid < len(consumed) and valid < len(ids) and consumed[valid] == ids[valid]:
            valid += 1
        self.memory.cut(session.memory, min(valid, len(ids) - 1))  # the root is consumed with its tree

    def _verdict(
        self, share: StepShare, ask: PendingCall, draw: int, walked: Walk | DendroError, outcome: StepOutcome
    ) -> Verdict:
        """Make the verdict of a walk. Raises the error that ends the text, if there is one."""
        assert isinstance(ask.call, VerifyCall) and share.tree is not None
        if isinstance(walked, DendroError):
            raise walked
        session = share.session
        if session.structure is not None:
            walked = session.before_stuck(walked, session.structure)
        path, ranks = walked.path, walked.ranks
        if share.tree is not ask.call.tree:  # the step had a part of it
            path, ranks = path_in(ask.call.tree, walked.tokens[:-1])
        verdict = Verdict(
            tokens=walked.tokens,
            path=path,
            ranks=ranks,
            finish=None,
            length=len(walked.tokens),
            verify_us=outcome.run_us,
            queue_us=microseconds(self._started - ask.ticket.arrived_s),
            texts=self.asked,
            step_rows=self._size,
            trimmed=ask.call.tree.guesses - share.tree.guesses,
            cold=outcome.cold or share.prefill > 0,
            logprobs=outcome.logprobs.get(draw, ())[: len(walked.tokens)],
        )
        if ask.call.ordered:
            verdict = replace(verdict, tree=ask.call.tree, missed=ask.missed, drafted_us=ask.drafted_us)
        if session.structure is not None and (count := session.structure.take(verdict.tokens)) is not None:
            verdict = verdict.cut(count, Finish.STRUCTURE)  # The last token that is kept completes the answer.
        return cut_verdict(verdict, self.capacity.end_ids, len(session.text.ids), session.parameters.limits)


def packed(shares: Sequence[StepShare], capacity: Capacity) -> StepPlan:
    """Make the plan of a step with these shares, in this order."""
    parts, draws, echoes, wanted = list[TextPart](), list[Draw](), list[Echo](), [NO_ROWS]
    start, place = 0, 0  # rows of the step, and those of them whose logits are needed, so far
    for share in shares:
        session, tree = share.session, share.tree
        done = len(session.memory.consumed)
        if positions := share.echoed:
            tokens = session.text.ids[positions.start + 1 : positions.stop + 1]
            echoes.append(Echo(place, tuple(tokens), session.parameters.logprobs or 0))
            wanted.append(start - done + np.array(positions))
            place += len(positions)
        start += share.prefill
        if tree is not None:
            asked = session.parameters
            laws = session.warp, asked.sampling, session.history, asked.logprobs, session.structure
            draws.append(Draw(start, place, len(session.text.ids), tree, *laws))
            wanted.append(np.arange(start, start + tree.rows))
            start += tree.rows
            place += tree.rows
        committed = np.arange(done, done + share.prefill) if share.prefill else NO_ROWS
        parts.append(TextPart(session.text.ids, committed, tree))
    paths, memories = RowPaths.of(parts), [share.session.memory for share in shares]
    plan = rows_of_texts(
        paths, [memory.pages for memory in memories], capacity.first_scratch, capacity.near, capacity.window
    )
    recurrent = None
    if capacity.recurrent is not None:
        places = [memory.place for memory in memories if memory.place is not None]
        recurrent = recurrent_rows_of(paths, places, capacity.recurrent.scratch)
    return replace(plan, wanted=np.concatenate(wanted), draws=tuple(draws), recurrent=recurrent, echoes=tuple(echoes))
