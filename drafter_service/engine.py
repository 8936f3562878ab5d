"""The drafter's engine: calls in, trees out. The model runs in one thread of its own; callers wait on their loop.

call -> inbox -> [ scheduler.next -> runner.run -> scheduler.apply ] -> answer
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from dendro.calls import PROTOCOL_VERSION, CloseCall, Closed, DraftCall, Hello, OpenCall, Opened, TextUpdate
from dendro.errors import BadRequest, DendroError, EngineFailed, PeerLost
from dendro.health import LONGEST_STEP_S, StepWatch
from dendro.shapes import MAX_ROWS
from dendro.shelf import Arrays, Shelf
from dendro.state import StateStore
from dendro.tree import DraftTree
from tree_layers.states import SlotPool

from drafter_service.grow import most_processed
from drafter_service.models import load_model
from drafter_service.plan import DraftPlan
from drafter_service.runner import DraftRunner
from drafter_service.scheduler import DraftScheduler
from drafter_service.texts import Answer, Consumed, Ready

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TREES = 8
"""Full trees whose nodes fit at once, the kept ones of idle sessions among them."""


class _Ticket:
    """A caller on an event loop, waiting for an answer from the engine's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[object] = self._loop.create_future()
        self._arrived_ns = time.perf_counter_ns()

    @property
    def cancelled(self) -> bool:
        return self._future.cancelled()

    @property
    def waited_us(self) -> int:
        return (time.perf_counter_ns() - self._arrived_ns) // 1000

    async def answer(self) -> object:
        return await self._future

    def settle(self, value: object) -> None:
        """From any thread. A caller that has gone, or whose loop has closed, is not there to be told."""
        try:
            self._loop.call_soon_threadsafe(self._settle, value)
        except RuntimeError:
            log.debug("the loop of a caller is closed")

    def _settle(self, value: object) -> None:
        if self._future.done():
            return
        if isinstance(value, BaseException):
            self._future.set_exception(value)
        else:
            self._future.set_result(value)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A closed session's memory."""

    ready: Ready
    arrays: Arrays


@dataclass
class DrafterCounters:
    """What happened since the start; only ever grows."""

    forwards: int = 0
    rows: int = 0  # tokens through the model
    trees: int = 0


class DrafterEngine:
    """A drafter in this process; implements `dendro.calls.DrafterPeer`."""

    def __init__(
        self,
        hello: Hello,
        runner: DraftRunner,
        states: StateStore,
        max_sessions: int,
        prefill_chunk: int,
        threads: int,
        longest_step_s: float = LONGEST_STEP_S,
    ) -> None:
        """`runner` has `text_slots` and `node_slots` of these limits. An engine with a step that takes longer than
        `longest_step_s` counts as hung."""
        self._watch = StepWatch(longest_step_s)
        self._hello = hello
        self._runner = runner
        memory = runner.memory
        self._shelf = Shelf(states, hello.fingerprint, hello.tokenizer, memory.layout, memory.check)
        self._threads = threads
        self._max_sessions = max_sessions
        self._chunk = prefill_chunk
        self._scheduler = self._fresh()
        self._inbox: queue.SimpleQueue[tuple[_Ticket, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.counters = DrafterCounters()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        tokenizer: Path | None = None,
        name: str,
        states: StateStore,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int = 1,
        max_sessions: int = 64,
        max_rows: int = MAX_ROWS,
        max_depth: int = 16,
        prefill_chunk: int = 64,
        longest_step_s: float = LONGEST_STEP_S,
    ) -> DrafterEngine:
        """Load a checkpoint. Raises BadRequest, naming the argument, for one that cannot be used.

        tokenizer: the folder with the tokenizer, where that is not the checkpoint
        dtype: of weights and activations, float32, bfloat16 or float16
        threads: the model's share of the processor's cores
        max_rows: of a tree, its root among them   prefill_chunk: tokens of a prompt per forward
        """
        if dtype not in DTYPES:
            raise BadRequest("dtype", f"must be one of {sorted(DTYPES)}, got {dtype!r}")
        least = {
            "threads": threads,
            "max_sessions": max_sessions,
            "max_depth": max_depth,
            "prefill_chunk": prefill_chunk,
        }
        for field, value in least.items():
            if value < 1:
                raise BadRequest(field, f"must be at least 1, got {value}")
        if not 1 <= max_rows <= MAX_ROWS:
            raise BadRequest("max_rows", f"must be 1 to {MAX_ROWS}, got {max_rows}")
        try:
            place = torch.device(device)
        except RuntimeError as error:
            raise BadRequest("device", str(error)) from error
        model, checkpoint = load_model(path, DTYPES[dtype], place, tokenizer)
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            model=name,
            fingerprint=checkpoint.fingerprint,
            tokenizer=checkpoint.facts.tokenizer,
            vocabulary=model.vocabulary,
            max_length=model.max_length,
            max_rows=max_rows,
            max_depth=max_depth,
            dtype=dtype,
            exactness="",
            pid=os.getpid(),
            facts=checkpoint.facts.digest,
            ordinary_tokens=checkpoint.facts.ordinary_tokens,
        )
        runner = DraftRunner(model, text_slots(max_sessions), node_slots(max_rows, max_depth), place)
        return cls(hello, runner, states, max_sessions, prefill_chunk, threads, longest_step_s)

    def start(self) -> None:
        """Start the engine's thread. Calls that came before are served now."""
        if self._thread is not None:
            raise RuntimeError("the engine has started already")
        self._thread = threading.Thread(target=self._work, name=f"drafter-{self._hello.model}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop once the forward at work is done. Who still waits is told PeerLost. May be repeated."""
        if self._thread is not None and self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()

    def stats(self) -> dict[str, int]:
        """What was done since the start, and what is held now."""
        kept = asdict(self._shelf.counters)
        free = {"free_slots": self.free_slots, "free_nodes": self.free_nodes}
        return asdict(self.counters) | kept | {"sessions": self.sessions} | free

    def memory_bytes(self, longest: int) -> dict[str, int]:
        """Bytes of all text and node slots at most, as `states`, where no text is longer than `longest` tokens."""
        limits, memory = self._hello, self._runner.memory
        texts, nodes = text_slots(self._max_sessions), node_slots(limits.max_rows, limits.max_depth)
        return {"states": texts * memory.text_bytes(longest) + nodes * memory.node_bytes}

    def fault(self) -> str:
        """Why this engine cannot serve; empty while it can."""
        if self._thread is not None and not self._thread.is_alive():
            return "its thread has ended"
        return self._watch.fault()

    @property
    def sessions(self) -> int:
        """Texts that are open."""
        return self._scheduler.sessions

    @property
    def free_slots(self) -> int:
        """Text slots that nothing holds; all but one where no text is open."""
        return self._scheduler.texts.free

    @property
    def free_nodes(self) -> int:
        """Node slots that nothing holds; all but one where no tree is grown or kept."""
        return self._scheduler.nodes.free

    @property
    def held_bytes(self) -> int:
        """Memory of the texts and trees that are held."""
        limits, memory = self._hello, self._runner.memory
        texts = text_slots(self._max_sessions) - 1 - self.free_slots
        nodes = node_slots(limits.max_rows, limits.max_depth) - 1 - self.free_nodes
        return texts * memory.text_bytes(limits.max_length) + nodes * memory.node_bytes

    def _fresh(self) -> DraftScheduler:
        limits = self._hello
        texts, nodes = text_slots(self._max_sessions), node_slots(limits.max_rows, limits.max_depth)
        return DraftScheduler(limits.model, SlotPool(texts), SlotPool(nodes), self._max_sessions, self._chunk)

    # -- the caller's side ---------------------------------------------------------------------------------------

    async def hello(self) -> Hello:
        return self._hello

    async def open(self, call: OpenCall) -> Opened:
        """Open a text and consume all of it but the root, from the longest saved state that is found.

        Raises BadRequest, naming the field, and Overloaded. Cancelling it closes the opening.
        """
        arrived_ns = time.perf_counter_ns()
        self._check(call.update)
        vocabulary = call.terms.vocabulary or self._hello.vocabulary
        least = min(MAX_ROWS, self._hello.vocabulary)
        if vocabulary < least:
            raise BadRequest("vocabulary", f"is {vocabulary}; must be at least {least} for this drafter")
        restored, arrays = await self._shelf.find(call)
        ticket = _Ticket()

        def work() -> None:
            nonlocal restored
            session = self._scheduler.open(ticket, call, restored, vocabulary)
            try:
                self._runner.admit(session.number, call.terms.sampling, vocabulary)
            except ValueError as error:
                field, _, reason = str(error).partition(": ")
                self._scheduler.forget(session.number, BadRequest(field, reason))
                return
            if arrays is not None:
                try:
                    self._runner.memory.load(session.slot, arrays)
                except Exception:  # a text without its state costs time alone
                    log.exception("a saved state of %d tokens could not be loaded", restored)
                    self._scheduler.not_restored(session)
                    restored = 0

        try:
            consumed = await self._ask(ticket, work)
        except asyncio.CancelledError:
            self._inbox.put((ticket, lambda: self._scheduler.give_up(call.update.opening)))
            raise
        assert isinstance(consumed, Consumed)
        return Opened(restored, consumed.processed, (time.perf_counter_ns() - arrived_ns) // 1000)

    async def draft(self, call: DraftCall) -> DraftTree:
        """A tree of the shape asked for, in full. A call of the same opening that is still at work gives way.

        Raises NotFound for an opening or text that is not held, and BadRequest, naming the field.
        """
        self._check(call.update)
        shape, limits = call.shape, self._hello
        if not shape.off and not shape.drafted:
            raise BadRequest("shape", f"{shape} is nothing that a drafter makes")
        if shape.depth > limits.max_depth:
            raise BadRequest("shape", f"{shape} is {shape.depth} deep; this drafter goes to {limits.max_depth}")
        if shape.rows > limits.max_rows:
            raise BadRequest("shape", f"{shape} has {shape.rows} rows; this drafter's trees have {limits.max_rows}")
        if shape.width > limits.vocabulary:
            raise BadRequest("shape", f"{shape} is wider than the vocabulary of {limits.vocabulary} tokens")
        ticket = _Ticket()
        tree = await self._ask(ticket, lambda: self._scheduler.draft(ticket, call))
        assert isinstance(tree, DraftTree)
        return tree

    async def close(self, call: CloseCall) -> Closed:
        """End an opening and put its memory by, under its name. Raises NotFound where it is not open.

        A text that has outgrown the model is forgotten instead.
        """
        ticket = _Ticket()
        if call.update.base > self._hello.max_length:
            self._inbox.put((ticket, lambda: self._scheduler.give_up(call.update.opening)))
            return Closed(0)
        self._check(call.update)
        saved = await self._ask(ticket, lambda: self._scheduler.close(ticket, call))
        assert isinstance(saved, _Saved)
        ids = saved.ready.ids
        if not ids:
            return Closed(0)
        return Closed(await self._shelf.put(saved.ready.tenant, ids, saved.ready.digest, saved.arrays))

    async def _ask(self, ticket: _Ticket, work: Callable[[], None]) -> object:
        """Have the engine's thread do `work`, and wait until the ticket is settled."""
        if self._thread is not None and not self._thread.is_alive():
            raise PeerLost(f"drafter {self._hello.model} has stopped")
        self._inbox.put((ticket, work))
        return await ticket.answer()

    def _check(self, update: TextUpdate) -> None:
        if update.base < 1:
            raise BadRequest("update.base", "the text is empty: there is no root")
        if update.base > self._hello.max_length:
            limit = self._hello.max_length
            raise BadRequest("update.base", f"is {update.base} tokens; a text of this drafter has at most {limit}")

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # this thread's share; other engines of the process set their own
        with torch.inference_mode():
            idle = True
            while self._take_in(wait=idle):
                try:
                    with self._watch.busy():
                        plan = self._scheduler.next()
                        self._fold()
                        if plan is not None:
                            self._forward(plan)
                        self._give_out()
                        idle = plan is None and not self._prepare_noise()
                except Exception as error:
                    log.exception("the drafter's scheduler broke; all its texts are given up")
                    self._begin_anew(EngineFailed(f"drafter: {error}"))
        self._begin_anew(PeerLost(f"drafter {self._hello.model} has stopped"))

    def _begin_anew(self, reason: DendroError) -> None:
        """Forget every text, and tell who waits for one."""
        for ticket in self._scheduler.tickets():
            ticket.settle(reason)
        self._scheduler = self._fresh()
        self._runner.forget_all()

    def _take_in(self, wait: bool) -> bool:
        """Do what callers ask, waiting for one where there is nothing else to do; false when it is time to stop."""
        while True:
            try:
                item = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if item is None:
                return False
            wait = False
            ticket, work = item
            try:
                with self._watch.busy():
                    work()
            except DendroError as error:
                ticket.settle(error)
            except Exception as error:
                log.exception("a call broke the drafter's scheduler")
                ticket.settle(EngineFailed(f"drafter: {error}"))

    def _fold(self) -> None:
        """Fold what texts went through, before the nodes' slots are written again and memories are saved."""
        if self._scheduler.folds:
            self._runner.fold(self._scheduler.folds)
            self._scheduler.folds.clear()

    def _forward(self, plan: DraftPlan) -> None:
        try:
            self._scheduler.apply(self._runner.run(plan))
        except Exception as error:
            log.exception("a forward of the drafter failed")
            self._scheduler.fail(f"drafter: {error}")
            return
        self.counters.forwards += 1
        self.counters.rows += plan.rows.count

    def _give_out(self) -> None:
        """Settle what has been answered. A closing session's memory is copied out before its slot is free."""
        scheduler = self._scheduler
        assert not scheduler.folds, "a memory would be saved before it is complete"
        while scheduler.answers:
            ticket, answer = scheduler.answers.pop(0)
            value: Answer | _Saved = answer
            if isinstance(answer, Ready):
                value = _Saved(answer, self._runner.memory.save(answer.slot, len(answer.ids)) if answer.ids else {})
                scheduler.forget(answer.session)
            self.counters.trees += isinstance(answer, DraftTree)
            ticket.settle(value)
        while scheduler.ended:
            self._runner.forget(scheduler.ended.pop())

    def _prepare_noise(self) -> bool:
        """With nothing else to do, compute one row of noise of the rounds to come; whether there was one to compute."""
        wanted = self._scheduler.noise_wanted
        for session in list(wanted):
            if self._runner.prepare(session, wanted[session]):
                return True
            del wanted[session]
        return False


def text_slots(max_sessions: int) -> int:
    """Text slots of a drafter: the empty memory, and two per text (as opened, and up to date)."""
    return 1 + 2 * max_sessions


def node_slots(max_rows: int, max_depth: int) -> int:
    """Node slots of a drafter: nobody's, those of `TREES` full trees, and no fewer than any one tree takes.

    A dynamic tree processes rows that it drops again: dynamic(16,16,63) keeps 63 guesses and has processed 241 rows.
    """
    return 1 + max(TREES * max_rows, most_processed(max_rows, max_depth))
