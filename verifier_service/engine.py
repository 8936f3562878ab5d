"""The verifier's engine: calls in, verdicts out.

call -> inbox -> [ scheduler.next -> runner.run -> scheduler.apply ] -> answer
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from dendro.calls import (
    PROTOCOL_VERSION,
    CloseCall,
    Closed,
    Deliver,
    DraftCall,
    DrafterLinks,
    Hello,
    OpenCall,
    Opened,
    PreparedTree,
    VerifyCall,
)
from dendro.clock import Clock
from dendro.daemon_threads import in_thread
from dendro.engine import LONGEST_STEP_S, EngineThread, Ticket
from dendro.errors import BadRequest
from dendro.failures import described, log_failure
from dendro.grammars import Grammars, GrammarText, TokenBytes
from dendro.guidance import LIMITS, PATIENCE, StructureLimits
from dendro.measured import StepTotals
from dendro.state import ClosedMemory, NoStates, Shelf, StateStore
from dendro.structure import Structure
from dendro.text import Verdict
from dendro.tree import DraftTree
from tree_kernels import ARITHMETIC
from tree_kernels.tree_attention import PAGE, near_window
from tree_kernels.tree_attention.splits import first_positions
from tree_layers.launching import device_fault
from tree_layers.linear import kept_dtype
from tree_layers.memory import pages_for

from verifier_service.memory import most_pages, working_bytes
from verifier_service.models import LoadedTarget, load_target
from verifier_service.options import VerifierOptions
from verifier_service.recurrent import Arrangement
from verifier_service.requests import Call, Capacity, OrderedRound, PendingCall, Saved, VerifierText
from verifier_service.runner import StepRunner, buckets_up_to, with_few_rows
from verifier_service.runners import runner_for
from verifier_service.scheduler import StepScheduler
from verifier_service.shards import Bounds, Crew, Starter, free_bytes
from verifier_service.walk import MasksPending
from verifier_service.worker import start_processes

log = logging.getLogger("dendro.verifier")


class VerifierEngine:
    """Implements `dendro.engine.LocalVerifier` for one target."""

    def __init__(
        self,
        scheduler: StepScheduler,
        runner: StepRunner,
        hello: Hello,
        shelf: Shelf | None = None,
        longest_step_s: float = LONGEST_STEP_S,
        dependent: Sequence[str] = (),
        kernels: str = "",
        token_bytes: TokenBytes | None = None,
        limits: StructureLimits = LIMITS,
    ) -> None:
        """token_bytes: bytes of the target's tokens, for `Grammars`; without them no answer has a structure.

        shelf: store of the states of texts; None if no text of the target is saved. longest_step_s:
        seconds after which a step counts as hung. dependent: names of products, and numbers of rows, with which a row's
        bits depend on other rows; empty where the exactness is `bitwise`. kernels: in words, how many of the model's
        products have which form, and the form of its attention."""
        self.scheduler = scheduler
        self.runner = runner
        self._hello = hello
        self._shelf = shelf
        self._grammars = (
            Grammars(token_bytes, scheduler.capacity.vocabulary, limits, PATIENCE) if token_bytes is not None else None
        )
        self.dependent = tuple(dependent)
        self.kernels = kernels
        self._thread = EngineThread(
            "verifier",
            self._step,
            scheduler.give_up,
            setup=partial(torch.set_num_threads, runner.target.run.threads),  # torch keeps it per thread
            broken=partial(device_fault, runner.device),
            longest_step_s=longest_step_s,
            clock=scheduler.clock,
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        options: VerifierOptions,
        *,
        states: StateStore | None = None,
        start_workers: Starter = start_processes,
        host: str = "127.0.0.1",
        clock: Clock = time.monotonic,
        token_bytes: TokenBytes | None = None,
        limits: StructureLimits = LIMITS,
    ) -> Self:
        """Load a checkpoint and check the engine's rows; takes seconds. Raises BadRequest, naming the field.

        states: store of the memory of closed texts of a state-space target; a target with attention saves nothing.
        start_workers: starts the other workers of a sharded target, which connect to `host`, an address of this
        machine. On a CPU, `MKL_CBWR=AUTO,STRICT` must be in the environment before torch is imported; without it the
        engine works and reports the exactness `margin`.
        """
        device = torch.device(options.device)
        if device.type == "cpu":
            torch.set_num_threads(options.threads)
        buckets = buckets_up_to(options.prefill_chunk)
        depth, loading = options.max_depth, (options.dtype, device, buckets, options.threads)
        with contextlib.ExitStack() as undo:  # stops the crew where a later line fails
            crew = None
            if options.tensor_parallel == 1:
                target = load_target(path, *loading, tokenizer=options.tokenizer)
            else:
                crew = Crew.start(options.tensor_parallel, start_workers, host)
                undo.callback(crew.stop)
                target = crew.load(Path(path), *loading, host, options.tokenizer)
            if options.max_length > target.max_positions:
                raise BadRequest("max_length", f"{options.max_length}; the model has {target.max_positions} positions")
            arrangement = Arrangement.of(options.max_sessions, near_window(depth), depth, buckets[-1])
            states_bytes = target.recurrent_bytes(arrangement.tokens, arrangement.states)
            pages = _pool_pages(options, target, device, states_bytes, crew)
            longest = pages_for(options.max_length + depth)
            capacity = Capacity(
                vocabulary=target.vocabulary,
                max_length=options.max_length,
                max_rows=options.max_rows,
                max_depth=depth,
                max_sessions=options.max_sessions,
                max_waiting=options.max_waiting,
                step_rows=options.prefill_chunk,
                sizes=buckets,
                prefill_rows=options.prefill_chunk // 4,
                pages=pages,
                share_prefixes=options.share_prefixes,
                first_scratch=(1 + pages + longest) * PAGE,
                end_ids=target.facts.end_ids,
                window=target.window,
                saves=bool(target.mixers) and not target.layouts and crew is None,
                recurrent=arrangement if target.mixers else None,
            )
            bounds = Bounds(capacity.near, pages, longest, options.max_sessions, depth, arrangement)
            if crew is not None:
                crew.make_runners(bounds)
            few = crew is None and device.type == "cpu" and not target.linear.why_padded
            runner = runner_for(target, bounds, with_few_rows(buckets) if few else buckets, crew)
            if target.packing is not None:
                target.packing.settle(runner.run_rows)
            reports = crew.reports if crew is not None else ()
            dependent = [product for report in reports for product in report.dependent]
            rows = runner.check_rows()
            if rows and few:
                log.info(
                    "verifier %s: steps are padded: rows of shorter ones differ (%s)", options.name, ", ".join(rows)
                )
                runner.buckets, few = buckets, False
                rows = runner.check_rows()
            capacity = replace(capacity, sizes=runner.buckets)
            differ = [*target.linear.failed, *dependent, *rows]
            runner.warm_up()
            if not runner.logits_are_finite():
                cause = ": its numbers are too large for float16; take bfloat16"
                raise BadRequest(
                    "dtype",
                    f"{_name_of(options.dtype)}: the model's logits are not finite"
                    + (cause if options.dtype == torch.float16 else ""),
                )
            kernels = str(target.linear) + (f"; quantised: {target.quantised}" if target.quantised else "")
            kernels += f"; attention: {target.attention}" if target.attention else ""
            log.info(
                "verifier %s: linear layers: %s; rows %s; %d pages, %.1f kB per token, %.1f MB of states",
                options.name,
                kernels,
                f"differ: {', '.join(differ)}" if differ else "bitwise independent",
                pages,
                runner.pages.token_bytes / 1e3,
                states_bytes / 1e6,
            )
            timed = runner.timed_steps()
            log.info("verifier %s: microseconds of steps by rows: %s", options.name, dict(timed))
            undo.pop_all()
        others = [report.arithmetic for report in reports]
        hello = _hello_of(options, target, "margin" if differ else "bitwise", capacity.sizes, others)
        hello = replace(hello, timed_steps=timed)
        shelf = None
        if capacity.saves and capacity.recurrent is not None and (memory := target.run.recurrent) is not None:
            block = capacity.recurrent.extent.block
            names = hello.fingerprint, hello.tokenizer, memory.layout(block)
            shelf = Shelf(
                states or NoStates(),
                *names,
                check=lambda arrays, tokens: memory.check(arrays, 2 * block),
                most_bytes=lambda tokens: memory.saved_bytes(2 * block),
            )
        scheduler = StepScheduler(capacity, clock)
        return cls(scheduler, runner, hello, shelf, options.longest_step_s, differ, kernels, token_bytes, limits)

    # The peer

    async def hello(self) -> Hello:
        return self._hello

    async def open(self, call: OpenCall) -> Opened:
        """Consume a text up to its root. Raises BadRequest, or Overloaded with `max_sessions + max_waiting` texts."""
        saved = None
        if self._shelf is not None and call.parameters.echo_from is None:
            length, arrays = await self._shelf.find(call)
            saved = Saved(length, len(arrays["dt.0"]), arrays) if arrays is not None else None
        wanted = call.parameters.structure
        structure = None if wanted is None else await self._structure_of(wanted, call)
        opened: Opened = await self._ask(call, saved, structure)
        return opened

    async def _structure_of(self, wanted: Structure, call: OpenCall) -> GrammarText:
        """The structure of an opened text's answer, after the tokens that it has. Compiled in a thread."""
        given, end_ids = call.parameters, self.scheduler.capacity.end_ids
        if self._grammars is None:
            raise BadRequest("structure", "this verifier was loaded without a tokenizer for structures")
        grammar = await self._grammars.compiled(wanted, given.tenant)
        text = grammar.text(given.prompt_length, () if given.limits.ignore_end else end_ids, given.limits.stop_ids)
        if call.update.base > given.prompt_length:
            await in_thread("structure-of-opening", lambda: text.follow(call.update.tokens))
        return text

    async def verify(self, call: VerifyCall) -> Verdict:
        """Verify a tree. Raises NotFound for an unknown opening or another text, BadRequest for a tree or text that
        cannot be verified; the opening stays open."""
        verdict: Verdict = await self._ask(call)
        return verdict

    def verify_for(self, call: VerifyCall, deliver: Deliver) -> None:
        """Verify a tree (`verify`) for a stream."""
        self._thread.call(lambda ticket: self.scheduler.submit(PendingCall(call, ticket)), deliver)

    async def close(self, call: CloseCall) -> Closed:
        """End an opening. A state-space target's memory of the text is saved first, unless the call is cancelled;
        attention keys are never saved."""
        closed = await self._ask(call)
        if isinstance(closed, Closed):
            return closed
        assert isinstance(closed, ClosedMemory) and self._shelf is not None
        try:
            return Closed(await self._shelf.put(closed))
        except Exception as error:  # a state that is not saved costs time, but changes no token
            log_failure(log, error, "verifier: the memory of a closed text could not be saved")
            return Closed(0)

    async def _ask(self, call: Call, saved: Saved | None = None, structure: GrammarText | None = None) -> Any:
        def submit(ticket: Ticket) -> None:
            self.scheduler.submit(PendingCall(call, ticket, saved, structure))

        def abandon(ticket: Ticket) -> None:
            if isinstance(call, OpenCall):  # the opening may have been answered just now: no caller is left to close it
                self.scheduler.gone(call.update.opening)

        return await self._thread.ask(submit, abandon)

    # Start and stop

    def link(self, links: DrafterLinks) -> None:
        def ask(wanted: OrderedRound, call: DraftCall) -> None:
            def deliver(outcome: object) -> None:
                self._thread.post(lambda ticket: self.scheduler.orders.drafted(wanted, outcome, ticket.arrived_s))

            sent = replace(call, take_prepared=take_prepared, alone=self.scheduler.asked == 1)
            links.draft(wanted.order.drafter, sent, deliver)

        def take_prepared(sent: object) -> None:
            assert isinstance(sent, PreparedTree)
            self._thread.post(lambda ticket: self.scheduler.orders.prepared(sent, ticket.arrived_s))

        self.scheduler.orders.link(ask)
        self._hello = replace(self._hello, orders=True)

    async def start(self) -> None:
        self._thread.start()
        if self.runner.crew is not None:
            self.runner.crew.watch(self._lose)

    async def stop(self) -> None:
        await self._thread.stop()
        if self.runner.crew is not None:
            await asyncio.to_thread(self.runner.crew.stop)

    async def lost(self) -> str:
        return await self._thread.lost()

    def fault(self) -> str:
        return self._thread.fault()

    def _lose(self, reason: str) -> None:
        """Fail all calls with PeerLost at once, so that their texts go on at another replica."""
        if self._thread.lose(reason):
            log.error("verifier: %s; this replica answers no more calls", reason)

    # The engine's thread

    def _step(self) -> float | None:
        """Run one step of the model, if one is wanted, and answer; then copy the memory of closed texts. Returns how
        many seconds to wait for calls before the next step; None for no limit."""
        plan = self.scheduler.next()
        if restoring := self.scheduler.take_restoring():
            for session, saved in restoring:
                self.scheduler.restored(session, self._restore(session, saved))
            return 0.0
        if plan is not None:
            try:
                outcome = self.runner.run(plan)
            except BaseException as error:  # a panic of a native library is no Exception
                log_failure(log, error, "verifier: a step of %d rows failed", len(plan.tokens))
                if self.runner.crew is not None:  # the workers are no longer in step
                    self._lose(described(error))
                elif not self._thread.lose_if_broken():
                    self.scheduler.fail(error)
                return 0.0
            self.scheduler.apply(outcome)
            for each in outcome.walks:
                if isinstance(each, MasksPending):
                    each.work.add_done_callback(lambda _: self._thread.post(lambda ticket: None))  # wakes it
        idle = plan is None
        while (leaving := self.scheduler.next_leaving()) is not None:
            self._leave(*leaving)
            idle = False
        if not idle:
            return 0.0
        until = self.scheduler.linger_s or None, self.scheduler.orders.late_in_s()
        return min((each for each in until if each is not None), default=None)

    def _restore(self, session: VerifierText, saved: Saved) -> bool:
        """Restore a saved memory, or copy another text's. False if that fails, which is logged: the text is then
        prefilled."""
        assert session.memory.place is not None
        try:
            arrays = self.runner.save(saved.source, saved.length) if saved.source is not None else saved.arrays
            self.runner.restore(session.memory.place, saved.length, saved.tokens, arrays)
        except BaseException as error:  # a panic of a native library is no Exception
            log_failure(log, error, "verifier: a saved memory of %d tokens could not be restored", saved.length)
            return False
        return True

    def _leave(self, session: VerifierText, ask: PendingCall) -> None:
        """Copy a closed text's memory, release it, and answer the call to close, whose handler saves the copy."""
        closed: ClosedMemory | Closed = Closed(0)
        ids = tuple(session.memory.consumed)
        digest = session.text.tokens.digest(len(ids))
        if session.memory.place is not None and ids:
            try:
                arrays = self.runner.save(session.memory.place, len(ids))
                closed = ClosedMemory(session.parameters.tenant, ids, digest, arrays)
            except BaseException as error:  # a panic of a native library is no Exception
                log_failure(log, error, "verifier: the memory of a closed text could not be copied")
        self.scheduler.gone(ask.call.update.opening)
        ask.ticket.settle(closed)

    def steps_by_rows(self) -> Mapping[int, StepTotals]:
        return self.scheduler.by_rows

    def stats(self) -> dict[str, int]:
        """Counters since the engine was loaded, and numbers of pages, states and texts held now, by name."""
        memory, capacity = self.scheduler.memory, self.scheduler.capacity
        places = memory.places
        return {
            **asdict(self.scheduler.counters),
            **(asdict(self._shelf.counters) if self._shelf is not None else {}),
            "shared_tokens": memory.shared_tokens,
            "pages": memory.book.pages,
            "pages_held": memory.held,
            "pages_held_at_most": memory.peak,
            "states": places.count if places is not None else 0,
            "states_held": places.count - places.free if places is not None else 0,
            "sessions": self.sessions,
            "waiting": sum(not session.admitted for session in list(self.scheduler.sessions.values())),
            "places": capacity.max_sessions,
            "waiting_places": capacity.max_waiting,
            "structures_compiled": self._grammars.compiles if self._grammars is not None else 0,
            "structures_refused": self._grammars.refused if self._grammars is not None else 0,
        }

    def memory_bytes(self, longest: int) -> dict[str, int]:
        """Bytes that this process holds beside the weights, whatever `longest` is: `pages` and `states` of texts, and
        the `head`'s copy of its rows for the tokenizer's tokens, packed or not."""
        target, arrangement = self.runner.target, self.runner.arrangement
        head = target.model.get_output_embeddings()
        return {
            "head": min(target.vocabulary, head.out_features) * head.in_features * kept_dtype(head.weight).itemsize,
            "pages": self.runner.pages.nbytes,
            "states": target.recurrent_bytes(arrangement.tokens, arrangement.states),
        }

    @property
    def sessions(self) -> int:
        """Number of open texts, those that wait for memory included."""
        return len(self.scheduler.sessions)

    # -- the target's own logits, for checks, without a session

    def logits_of(self, ids: Sequence[int], tree: DraftTree) -> torch.Tensor:
        """Logits [rows, vocabulary] float32, on the host, of every row of a tree whose root is the last token of the
        text `ids`.

        For drafters made from the target itself, certify and tests, not for serving: costs a prefill of the tokens
        after the common prefix with the last call's text. Blocks until the model's thread is free; may be called from
        any thread, and before `start`.
        """
        return self._thread.run(lambda: self.runner.tree_logits(ids, tree).cpu())


def _pool_pages(
    options: VerifierOptions, target: LoadedTarget, device: torch.device, states_bytes: int, crew: Crew | None
) -> int:
    """Pages of keys and values for all open texts. Raises BadRequest where there is no room for one."""
    depth = options.max_depth
    most = most_pages(options.max_length + depth, target.window, depth + 1, options.prefill_chunk + depth)
    pages = options.max_sessions * most
    if options.pool_tokens is not None:
        pages = pages_for(options.pool_tokens)
    elif options.memory_fraction is not None:
        sharing = crew.size if crew is not None and crew.memory_is_shared else 1  # workers on one machine
        beside = states_bytes + (_working_bytes(options, target) if device.type != "cpu" else 0)
        taken = sharing * beside
        bytes_left = int(options.memory_fraction * free_bytes(device)) - taken
        if bytes_left < 0:
            steps = f" and steps of {options.prefill_chunk} rows" if beside > states_bytes else ""
            raise BadRequest(
                "memory_fraction",
                f"the states of max_sessions = {options.max_sessions} texts{steps} take {taken / 1e6:.0f} MB, "
                f"{-bytes_left / 1e6:.0f} MB more than {options.memory_fraction} of what is free",
            )
        if target.token_bytes:  # pages of a target without attention only count tokens
            room = bytes_left // (target.token_bytes * PAGE)
            pages = room if crew is None else crew.pages(options.memory_fraction, room, beside)
    if pages < 1 or options.max_length < 2:
        reason = f"{pages} pages and {options.max_length} leave no room for a text"
        raise BadRequest("pool_tokens, max_length", reason)
    return pages


def _working_bytes(options: VerifierOptions, target: LoadedTarget) -> int:
    """Most bytes that the results of one step take on an accelerator."""
    layers = zip(target.run.probed, target.layouts, strict=True)
    on_tensor_cores = [(layer.group, layout) for layer, layout in layers if layout.dtype != torch.float32]
    longest = pages_for(options.max_length + options.max_depth) * PAGE
    splits = len(first_positions(longest)) - 1
    # Attention stores for each head its best score, the sum of its weights, and the weighted sums of its values.
    widest = max((group * each.kv_heads * (each.value_dim + 2) for group, each in on_tensor_cores), default=0)
    return working_bytes(target.vocabulary, buckets_up_to(options.prefill_chunk)[-1], splits, widest)


def _hello_of(
    options: VerifierOptions,
    target: LoadedTarget,
    exactness: str,
    step_sizes: tuple[int, ...],
    others: Sequence[str] = (),
) -> Hello:
    """others: `LoadedTarget.arithmetic` of the other workers of a sharded target, in the order of ranks"""
    arithmetic = target.arithmetic
    if any(each != arithmetic for each in others):  # a row's bits depend on the arithmetic of each worker
        arithmetic = ",".join([arithmetic, *others])
    # Sums of shards round differently: texts move only between replicas of one degree.
    degree = f"-tp{options.tensor_parallel}" if options.tensor_parallel > 1 else ""
    return Hello(
        protocol=PROTOCOL_VERSION,
        model=options.name,
        fingerprint=f"{target.fingerprint}-arithmetic{ARITHMETIC}-{arithmetic}{degree}",
        tokenizer=target.facts.tokenizer,
        vocabulary=target.vocabulary,
        max_length=options.max_length,
        max_rows=options.max_rows,
        max_depth=options.max_depth,
        dtype=_name_of(options.dtype),
        exactness=exactness,
        pid=os.getpid(),
        end_ids=tuple(sorted(target.facts.end_ids)),
        attends=bool(target.layouts),
        facts=target.facts.digest,
        step_sizes=step_sizes,
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
