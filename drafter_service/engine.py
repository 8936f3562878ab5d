"""The drafter's engine: calls in, trees out.

call -> inbox -> [ scheduler.next -> runner.run -> scheduler.apply ] -> answer
"""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from dendro.calls import PROTOCOL_VERSION, CloseCall, Closed, Deliver, DraftCall, Hello, OpenCall, Opened, TextUpdate
from dendro.clock import Clock
from dendro.engine import EngineThread, Ticket
from dendro.errors import BadRequest, DendroError, EngineFailed
from dendro.failures import described, log_failure
from dendro.grammars import TokenBytes
from dendro.guidance import LIMITS, StructureLimits
from dendro.measured import StepTotals, microseconds, totals_by_size
from dendro.shapes import MAX_ROWS
from dendro.state import ClosedMemory, Shelf, StateStore
from dendro.tree import DraftTree, IntArray
from tree_layers.launching import device_fault
from tree_layers.states import SlotPool

from drafter_service.acceptance_head import check_head, read_head
from drafter_service.grow import most_processed
from drafter_service.models import described_form, load_model
from drafter_service.models.memory import DrafterMemory
from drafter_service.options import DrafterOptions
from drafter_service.plan import DraftPlan
from drafter_service.prepared import PreparedCounters
from drafter_service.runner import DraftRunner
from drafter_service.scheduler import DraftScheduler
from drafter_service.structures import DraftStructures
from drafter_service.texts import Answer, MemoryComplete

log = logging.getLogger("dendro.drafter")

MOST_FORKED = 16 << 20
"""Most bytes of a text's memory, beyond those of one token, for which trees are prepared. Preparing copies the memory,
and a call that arrives meanwhile waits some 2 ms."""
TREES = 8
"""Number of full trees for which there are node slots, kept trees of idle sessions included."""


STEP_SIZES = tuple(1 << power for power in range(13))
"""Numbers of rows by which forwards are counted: a forward counts at the least size that holds its rows, a longer one
at the last size."""


@dataclass
class DrafterCounters:
    """Totals since the engine was loaded."""

    forwards: int = 0
    forward_us: int = 0  # time of the forwards
    rows: int = 0  # tokens that went through the model
    trees: int = 0  # trees sent


class DrafterEngine:
    """A drafter's engine; implements `dendro.engine.LocalDrafter`."""

    def __init__(
        self,
        hello: Hello,
        runner: DraftRunner,
        states: StateStore,
        options: DrafterOptions,
        clock: Clock = time.monotonic,
        kernels: str = "torch",
        structures: DraftStructures | None = None,
    ) -> None:
        """runner: with `text_slots` and `node_slots` slots for the limits of `options` and `hello`
        kernels: form of the model, eager or fused   structures: compiles the structures of answers; None: any token
        may be guessed"""
        self.kernels = kernels
        self._structures = structures
        self._hello = hello
        self._runner = runner
        memory = runner.memory
        names = hello.fingerprint, hello.tokenizer, memory.layout
        self._shelf = Shelf(states, *names, memory.check, memory.text_bytes)
        self._clock = clock
        self._options = options
        self._text_slots = text_slots(options.max_sessions)
        self._node_slots = node_slots(hello.max_rows, hello.max_depth)
        self._prepared = PreparedCounters()
        self._scheduler = self._fresh()
        self._thread = EngineThread(
            f"drafter {hello.model}",
            self._step,
            self._end_texts,
            setup=partial(torch.set_num_threads, options.threads),  # torch keeps it per thread
            broken=partial(device_fault, runner.device),
            longest_step_s=options.longest_step_s,
            clock=clock,
        )
        self.counters = DrafterCounters()
        self._by_rows = totals_by_size(STEP_SIZES)

    @classmethod
    def load(
        cls,
        path: str | Path,
        options: DrafterOptions,
        *,
        states: StateStore,
        clock: Clock = time.monotonic,
        token_bytes: TokenBytes | None = None,
        limits: StructureLimits = LIMITS,
    ) -> DrafterEngine:
        """Load a checkpoint. Raises BadRequest, naming the field.

        token_bytes: bytes of the tokenizer's tokens, for the structures of answers; None: any token may be guessed
        limits: of the structures
        """
        device = torch.device(options.device)
        model, checkpoint = load_model(path, options.dtype, device, options.tokenizer, options.form, options.threads)
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            model=options.name,
            fingerprint=checkpoint.fingerprint,
            tokenizer=checkpoint.facts.tokenizer,
            vocabulary=checkpoint.facts.vocabulary,
            max_length=model.max_length,
            max_rows=options.max_rows,
            max_depth=options.max_depth,
            dtype=str(options.dtype).removeprefix("torch."),
            exactness="",
            pid=os.getpid(),
            facts=checkpoint.facts.digest,
        )
        head = None
        if options.head is not None:
            head = read_head(options.head, device)
            check_head(head.facts, model, checkpoint.fingerprint)
        slots = text_slots(options.max_sessions), node_slots(options.max_rows, options.max_depth)
        form = described_form(model, checkpoint.facts.model_type, device, options.form)
        structures = None
        if token_bytes is not None:
            facts = checkpoint.facts
            structures = DraftStructures(options.name, token_bytes, facts.vocabulary, facts.end_ids, limits)
        runner = DraftRunner(model, *slots, device, head)
        with torch.inference_mode():
            if not runner.scores_are_finite():
                raise BadRequest("checkpoint", "the model's logits are not finite: no token of it could be guessed")
        return cls(hello, runner, states, options, clock, form, structures)

    async def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        await self._thread.stop()

    async def lost(self) -> str:
        return await self._thread.lost()

    def fault(self) -> str:
        return self._thread.fault()

    def stats(self) -> dict[str, int]:
        """Counters since the engine was loaded, open sessions and free slots, by name."""
        kept = asdict(self._shelf.counters)
        free = {
            "free_slots": self.free_slots,
            "free_nodes": self.free_nodes,
            "slots": self._text_slots - 1,
            "nodes": self._node_slots - 1,
            "places": self._options.max_sessions,
        }
        return asdict(self.counters) | asdict(self._prepared) | kept | {"sessions": self.sessions} | free

    def steps_by_rows(self) -> Mapping[int, StepTotals]:
        return self._by_rows

    def memory_bytes(self, longest: int) -> dict[str, int]:
        """Most bytes of all text and node slots, as `states`, if no text is longer than `longest` tokens."""
        memory = self._runner.memory
        return {"states": self._text_slots * memory.text_bytes(longest) + self._node_slots * memory.node_bytes}

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

    def _fresh(self) -> DraftScheduler:
        options, texts, nodes = self._options, SlotPool(self._text_slots), SlotPool(self._node_slots)
        return DraftScheduler(
            options.name,
            texts,
            nodes,
            options.max_sessions,
            options.prefill_chunk,
            self._clock,
            self._runner.one_forward,
            wake=lambda: self._thread.post(lambda ticket: None),
            longest_prepared=longest_forked(self._runner.memory, self._hello.max_length) if options.draft_ahead else 0,
            counters=self._prepared,
        )

    # -- the caller's side ---------------------------------------------------------------------------------------

    async def hello(self) -> Hello:
        return self._hello

    async def open(self, call: OpenCall, noise_ids: IntArray | None = None) -> Opened:
        """Open a text and prefill all of it but the root, from the longest saved state that is found.

        noise_ids [vocabulary]: for texts whose ids are not the target's, the target id whose noise each id gets; -1 for
        ids that are not guessed
        Raises BadRequest, with the field's name, and Overloaded. Cancelling the call closes the opening.
        """
        arrived_s = self._clock()
        self._check(call.update)
        vocabulary = call.parameters.vocabulary or self._hello.vocabulary
        least = min(MAX_ROWS, self._runner.model.vocabulary)
        if (guessed := self._runner.guessed(vocabulary)) < least:
            raise BadRequest(
                "vocabulary", f"is {vocabulary}: this drafter guesses {guessed} of them, not {least} or more"
            )
        structure, wanted = None, call.parameters.structure
        if wanted is not None and self._structures is not None:
            structure = await self._structures.of(wanted, call)
        restored, arrays = await self._shelf.find(call)

        @torch.inference_mode()
        def work(ticket: Ticket) -> None:
            session = self._scheduler.open(ticket, call, restored, vocabulary, structure)
            try:
                self._runner.admit(session.number, call.parameters.sampling, vocabulary, noise_ids)
            except BaseException:  # a panic of a native library is no Exception
                self._scheduler.forget(session.opening)
                raise
            if arrays is not None:
                try:
                    self._runner.memory.load(session.slot, arrays)
                except Exception as error:  # the whole text is prefilled instead
                    log_failure(log, error, "a saved state of %d tokens could not be loaded", restored)
                    self._scheduler.not_restored(session)

        opened = await self._thread.ask(work, lambda ticket: self._scheduler.forget(call.update.opening))
        assert isinstance(opened, Opened)
        return replace(opened, open_us=microseconds(self._clock() - arrived_s))

    async def draft(self, call: DraftCall, ahead: int = 0) -> DraftTree:
        """Draft a full tree of the call's shape. An unfinished earlier call of the opening is answered with its root
        alone.

        ahead: length of the text in target ids minus its length in the drafter's ids; 0 without a bridge
        Raises NotFound for an opening or text that is not open here, and BadRequest, with the field's name.
        """
        tree = await self._thread.ask(partial(self._draft, call, ahead))
        assert isinstance(tree, DraftTree)
        return tree

    def draft_for(self, call: DraftCall, deliver: Deliver) -> None:
        """Draft a tree (`draft`) for a stream, or for a verifier of this process."""
        self._thread.call(partial(self._draft, call, 0), deliver)

    def _draft(self, call: DraftCall, ahead: int, ticket: Ticket) -> None:
        """Begin a round, in the engine's thread. Raises BadRequest for a text or shape past this drafter's limits."""
        self._check(call.update)
        shape, limits = call.shape, self._hello
        if not shape.off and not shape.drafted:
            raise BadRequest("shape", f"{shape} is not a shape that a drafter can grow")
        if shape.depth > limits.max_depth:
            raise BadRequest("shape", f"{shape} has depth {shape.depth}; this drafter allows {limits.max_depth}")
        if shape.rows > limits.max_rows:
            raise BadRequest("shape", f"{shape} has {shape.rows} rows; this drafter allows {limits.max_rows}")
        if shape.width > (guessed := self._runner.model.vocabulary):
            raise BadRequest("shape", f"{shape} is wider than the {guessed} tokens that this drafter guesses")
        self._scheduler.draft(ticket, call, ahead)

    async def close(self, call: CloseCall) -> Closed:
        """End an opening and save its memory to the state store. Raises NotFound if it is not open.

        The memory is discarded if the text is longer than `max_length`, or if the call is cancelled.
        """
        if call.update.base > self._hello.max_length:
            self.forget(call.update.opening)
            return Closed(0)
        self._check(call.update)
        closed = await self._thread.ask(lambda ticket: self._scheduler.close(ticket, call))
        assert isinstance(closed, Closed | ClosedMemory)
        return closed if isinstance(closed, Closed) else Closed(await self._shelf.put(closed))

    def forget(self, opening: bytes) -> None:
        """End an opening without an answer, if it is open; nothing is saved."""
        self._thread.post(lambda ticket: self._scheduler.forget(opening))

    def _check(self, update: TextUpdate) -> None:
        if update.base < 1:
            raise BadRequest("update.base", "the text is empty and has no root")
        if update.base > self._hello.max_length:
            limit = self._hello.max_length
            raise BadRequest("update.base", f"is {update.base} tokens; this drafter allows at most {limit}")

    # -- the engine's thread -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> float | None:
        """Run one step: folds, one forward, the answers; a row of noise while idle, then levels of trees that may be
        asked for next. Returns how many seconds to wait for a call, None: until one comes."""
        step = self._scheduler.next()
        fold = partial(self._runner.fold, step.folds, step.plan)
        if not step.folds or self._succeeds("fold", fold, self._scheduler.fail_folds):
            self._send_answers()  # the forward may be of a tree that nobody waits for
            if step.plan is not None:
                self._succeeds("forward", partial(self._forward, step.plan), self._scheduler.fail)
        self._send_answers()
        self._scheduler.calibrations.learn()
        for session, positions in self._scheduler.noise_wanted.items():
            self._runner.forget_noise(session, positions.start)
        if step.plan is None and not self._scheduler.noise_wanted:
            return self._scheduler.text_masks.patience_s
        if step.plan is None:
            self._prepare_noise()
        return 0.0

    def _end_texts(self, reason: DendroError) -> None:
        self._scheduler = self._fresh()
        self._runner.forget_all()

    def _succeeds(self, part: str, work: Callable[[], None], fail: Callable[[str], None]) -> bool:
        """Run a part of a step. False if it raises, which ends the step's texts by `fail`."""
        try:
            work()
        except BaseException as error:  # a panic of a native library is no Exception
            log_failure(log, error, "a %s of the drafter failed", part)
            if not self._thread.lose_if_broken():
                fail(f"drafter: {described(error)}")
            return False
        return True

    def _forward(self, plan: DraftPlan) -> None:
        prepared = self._scheduler.planned_prepared if self._options.draft_ahead else None
        began_s = self._clock()
        self._scheduler.apply(self._runner.run(plan))
        rows, took_us = plan.rows.count, microseconds(self._clock() - began_s)
        self.counters.forwards += 1
        self.counters.forward_us += took_us
        self.counters.rows += rows
        if prepared is not None:
            self._prepared.prepared_us += took_us
            prepared.spent_us += took_us
        self._by_rows[STEP_SIZES[min(bisect_left(STEP_SIZES, rows), len(STEP_SIZES) - 1)]].add(took_us)

    def _send_answers(self) -> None:
        """Send the scheduler's answers. A closing session's memory is copied before its slot is freed."""
        scheduler = self._scheduler
        for ticket, answer in scheduler.answers:
            value: Answer | Closed | ClosedMemory = answer
            if isinstance(answer, MemoryComplete):
                value = self._copied(answer)
                scheduler.forget(answer.opening)
            self.counters.trees += isinstance(answer, DraftTree)
            ticket.settle(value)
        scheduler.answers.clear()
        for session in scheduler.closed:
            self._runner.forget(session)
        scheduler.closed.clear()

    def _copied(self, ready: MemoryComplete) -> ClosedMemory | Closed | EngineFailed:
        """A copy of a closing session's memory, or the error of its close."""
        if not ready.ids:
            return Closed(0)
        try:
            arrays = self._runner.memory.save(ready.slot, len(ready.ids))
            return ClosedMemory(ready.tenant, ready.ids, ready.digest, arrays)
        except BaseException as error:  # a panic of a native library is no Exception
            log_failure(log, error, "the memory of a closed text could not be copied")
            return EngineFailed(f"drafter: {described(error)}")

    def _prepare_noise(self) -> None:
        """Compute one row of the noise that later rounds want."""
        wanted = self._scheduler.noise_wanted
        for session in list(wanted):
            try:
                if self._runner.prepare(session, wanted[session]):
                    return
            except BaseException as error:  # the round that needs this noise computes it then, or fails
                log_failure(log, error, "noise could not be computed ahead")
            del wanted[session]


def longest_forked(memory: DrafterMemory, longest: int) -> int:
    """Most tokens of a text whose memory is copied for prepared trees, up to `longest`. States do not grow with a text;
    keys and values do."""
    most = memory.text_bytes(1) + MOST_FORKED
    return bisect_right(range(1, longest + 1), most, key=memory.text_bytes)


def text_slots(max_sessions: int) -> int:
    """Text slots of a drafter: slot 0, and two per text (the memory at the end of opening, and the current one)."""
    return 1 + 2 * max_sessions


def node_slots(max_rows: int, max_depth: int) -> int:
    """Node slots of a drafter: slot 0, and enough for `TREES` full trees and for any single tree.

    A dynamic tree may process more rows than it keeps: dynamic(16,16,63) processes 241 rows and keeps 63 guesses.
    """
    return 1 + max(TREES * max_rows, most_processed(max_rows, max_depth))
