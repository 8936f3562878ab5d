"""The drafter's engine: calls in, trees out. The model runs in a thread of its own; callers wait on an event loop.

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
from drafter_service.texts import Answer, MemoryComplete, Prefilled

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TREES = 8
"""Full trees for which there are node slots, kept trees of idle sessions included."""


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
        """Answer the caller, from any thread. Does nothing if the caller was cancelled or its loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._settle, value)
        except RuntimeError:
            log.debug("an answer is discarded: the event loop of its caller is closed")

    def _settle(self, value: object) -> None:
        if self._future.done():
            return
        if isinstance(value, BaseException):
            self._future.set_exception(value)
        else:
            self._future.set_result(value)


@dataclass(frozen=True, slots=True)
class _Saved:
    """The memory of a closed session."""

    ready: MemoryComplete
    arrays: Arrays


@dataclass
class DrafterCounters:
    """Totals since the start."""

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
        """runner: has `text_slots` and `node_slots` of these limits
        longest_step_s: `fault` reports a step that takes longer
        """
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
        """Load a checkpoint. Raises BadRequest with the name of an argument that cannot be used.

        tokenizer: the folder with the tokenizer, if it is not the checkpoint's
        dtype: of weights and activations, float32, bfloat16 or float16
        threads: CPU threads of the model
        max_rows: of a tree, root included   prefill_chunk: tokens of a prompt per forward
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
        """Start the engine's thread, which also serves calls made before."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._thread = threading.Thread(target=self._work, name=f"drafter-{self._hello.model}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current forward; waiting callers get PeerLost. May be repeated."""
        if self._thread is not None and self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join()

    def stats(self) -> dict[str, int]:
        """Counters since the start, open sessions and free slots."""
        kept = asdict(self._shelf.counters)
        free = {"free_slots": self.free_slots, "free_nodes": self.free_nodes}
        return asdict(self.counters) | kept | {"sessions": self.sessions} | free

    def memory_bytes(self, longest: int) -> dict[str, int]:
        """Most bytes of all text and node slots, as `states`, if no text is longer than `longest` tokens."""
        limits, memory = self._hello, self._runner.memory
        texts, nodes = text_slots(self._max_sessions), node_slots(limits.max_rows, limits.max_depth)
        return {"states": texts * memory.text_bytes(longest) + nodes * memory.node_bytes}

    def fault(self) -> str:
        """Why this engine cannot serve; empty if it can."""
        if self._thread is not None and not self._thread.is_alive():
            return "the engine's thread has ended"
        return self._watch.fault()

    @property
    def sessions(self) -> int:
        """Number of open texts."""
        return self._scheduler.sessions

    @property
    def free_slots(self) -> int:
        """Free text slots; all but slot 0 if no text is open."""
        return self._scheduler.texts.free

    @property
    def free_nodes(self) -> int:
        """Free node slots; all but slot 0 if no tree is growing or kept."""
        return self._scheduler.nodes.free

    @property
    def held_bytes(self) -> int:
        """Most bytes of the text and node slots in use, with texts of `max_length` tokens."""
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
        """Open a text and prefill all of it but the root, from the longest saved state that is found.

        Raises BadRequest, with the field's name, and Overloaded. Cancelling it closes the opening.
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
                except Exception:  # the whole text is prefilled instead
                    log.exception("a saved state of %d tokens could not be loaded", restored)
                    self._scheduler.not_restored(session)
                    restored = 0

        try:
            consumed = await self._ask(ticket, work)
        except asyncio.CancelledError:
            self._inbox.put((ticket, lambda: self._scheduler.give_up(call.update.opening)))
            raise
        assert isinstance(consumed, Prefilled)
        return Opened(restored, consumed.processed, (time.perf_counter_ns() - arrived_ns) // 1000)

    async def draft(self, call: DraftCall) -> DraftTree:
        """A full tree of the call's shape. An unfinished earlier call of the opening is answered with its root alone.

        Raises NotFound for an opening or text that is not open here, and BadRequest, with the field's name.
        """
        self._check(call.update)
        shape, limits = call.shape, self._hello
        if not shape.off and not shape.drafted:
            raise BadRequest("shape", f"{shape} is not a shape that a drafter can grow")
        if shape.depth > limits.max_depth:
            raise BadRequest("shape", f"{shape} has depth {shape.depth}; this drafter allows {limits.max_depth}")
        if shape.rows > limits.max_rows:
            raise BadRequest("shape", f"{shape} has {shape.rows} rows; this drafter allows {limits.max_rows}")
        if shape.width > limits.vocabulary:
            raise BadRequest("shape", f"{shape} is wider than the vocabulary of {limits.vocabulary} tokens")
        ticket = _Ticket()
        tree = await self._ask(ticket, lambda: self._scheduler.draft(ticket, call))
        assert isinstance(tree, DraftTree)
        return tree

    async def close(self, call: CloseCall) -> Closed:
        """End an opening and save its memory to the state store. Raises NotFound if it is not open.

        The memory of a text that is longer than `max_length` is discarded.
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
        """Run `work` on the engine's thread and wait for the ticket's answer."""
        if self._thread is not None and not self._thread.is_alive():
            raise PeerLost(f"drafter {self._hello.model} has stopped")
        self._inbox.put((ticket, work))
        return await ticket.answer()

    def _check(self, update: TextUpdate) -> None:
        if update.base < 1:
            raise BadRequest("update.base", "the text is empty and has no root")
        if update.base > self._hello.max_length:
            limit = self._hello.max_length
            raise BadRequest("update.base", f"is {update.base} tokens; this drafter allows at most {limit}")

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        torch.set_num_threads(self._threads)  # applies to this thread; other engines of the process set their own
        with torch.inference_mode():
            idle = True
            while self._run_calls(wait=idle):
                try:
                    with self._watch.busy():
                        plan = self._scheduler.next()
                        self._fold()
                        if plan is not None:
                            self._forward(plan)
                        self._send_answers()
                        idle = plan is None and not self._prepare_noise()
                except Exception as error:
                    log.exception("the drafter's scheduler failed; all its texts are closed")
                    self._reset(EngineFailed(f"drafter: {error}"))
        self._reset(PeerLost(f"drafter {self._hello.model} has stopped"))

    def _reset(self, reason: DendroError) -> None:
        """Close every text and answer all waiting callers with `reason`."""
        for ticket in self._scheduler.tickets():
            ticket.settle(reason)
        self._scheduler = self._fresh()
        self._runner.forget_all()

    def _run_calls(self, wait: bool) -> bool:
        """Run all queued calls, with `wait` at least one; False if the engine is to stop."""
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
                log.exception("a call to the drafter's scheduler failed")
                ticket.settle(EngineFailed(f"drafter: {error}"))

    def _fold(self) -> None:
        """Run the scheduler's folds, before the nodes' slots are overwritten and memories are saved."""
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

    def _send_answers(self) -> None:
        """Send the scheduler's answers. A closing session's memory is copied before its slot is freed."""
        scheduler = self._scheduler
        assert not scheduler.folds, "folds must run before a memory is saved"
        while scheduler.answers:
            ticket, answer = scheduler.answers.pop(0)
            value: Answer | _Saved = answer
            if isinstance(answer, MemoryComplete):
                value = _Saved(answer, self._runner.memory.save(answer.slot, len(answer.ids)) if answer.ids else {})
                scheduler.forget(answer.session)
            self.counters.trees += isinstance(answer, DraftTree)
            ticket.settle(value)
        while scheduler.ended:
            self._runner.forget(scheduler.ended.pop())

    def _prepare_noise(self) -> bool:
        """Compute one row of noise for later rounds, while idle; False if there is none to compute."""
        wanted = self._scheduler.noise_wanted
        for session in list(wanted):
            if self._runner.prepare(session, wanted[session]):
                return True
            del wanted[session]
        return False


def text_slots(max_sessions: int) -> int:
    """Text slots of a drafter: slot 0, and two per text (the memory at the end of opening, and the current one)."""
    return 1 + 2 * max_sessions


def node_slots(max_rows: int, max_depth: int) -> int:
    """Node slots of a drafter: slot 0, and enough for `TREES` full trees and for any single tree.

    A dynamic tree may process more rows than it keeps: dynamic(16,16,63) processes 241 rows and keeps 63 guesses.
    """
    return 1 + max(TREES * max_rows, most_processed(max_rows, max_depth))
