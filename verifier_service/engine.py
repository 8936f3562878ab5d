"""The verifier as a peer: an asyncio loop schedules calls, and the model runs in one thread.

open, verify, close -> StepScheduler.submit -> loop: plan = next(); outcome = run(plan); apply(outcome) -> answers
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from dendro.calls import PROTOCOL_VERSION, CloseCall, Closed, Hello, OpenCall, Opened, VerifyCall
from dendro.errors import BadRequest, EngineFailed, PeerLost
from dendro.health import LONGEST_STEP_S, StepWatch
from dendro.shelf import Arrays, Shelf
from dendro.state import NoStates, StateStore
from dendro.text import Verdict
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE, near_window
from tree_layers.memory import pages_for

from verifier_service.memory import most_pages
from verifier_service.models import LoadedTarget, load_target
from verifier_service.options import VerifierOptions
from verifier_service.recurrent import Arrangement
from verifier_service.requests import Call, Capacity, PendingCall, Saved, VerifierText
from verifier_service.runner import StepRunner, buckets_up_to
from verifier_service.runners import runner_for
from verifier_service.scheduler import StepScheduler
from verifier_service.shards import Bounds, Crew, Starter, free_bytes
from verifier_service.worker import start_processes

log = logging.getLogger("dendro.verifier")

NOISE_AHEAD = 6
"""Positions past the next base whose noise is computed in idle time: about the depth of the deepest drafted trees."""


class VerifierEngine:
    """Implements `dendro.calls.VerifierPeer` for one target. Bound to one event loop, from `start` to `stop`."""

    def __init__(
        self,
        scheduler: StepScheduler,
        runner: StepRunner,
        hello: Hello,
        shelf: Shelf | None = None,
        longest_step_s: float = LONGEST_STEP_S,
        dependent: Sequence[str] = (),
    ) -> None:
        """shelf: store of the states of texts, where the capacity `saves` them. longest_step_s: a longer step counts as
        hung. dependent: products, and numbers of rows, with which a row's bits depend on other rows; empty where the
        exactness is `bitwise`."""
        self._watch = StepWatch(longest_step_s)
        self.scheduler = scheduler
        self.runner = runner
        self._hello = hello
        self._shelf = shelf
        self.dependent = tuple(dependent)
        self._saving: set[asyncio.Task[None]] = set()
        # torch keeps its number of threads per thread; a new thread starts with the last one set in this process.
        self._thread = ThreadPoolExecutor(1, "verifier", torch.set_num_threads, (runner.target.run.threads,))
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._lost: str | None = None  # why it answers no more calls
        self._ended = asyncio.Event()

    @classmethod
    def load(
        cls,
        path: str | Path,
        options: VerifierOptions,
        *,
        states: StateStore | None = None,
        start_workers: Starter = start_processes,
        host: str = "127.0.0.1",
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
            runner = runner_for(target, bounds, buckets, crew)
            reports = crew.reports if crew is not None else ()
            dependent = [product for report in reports for product in report.dependent]
            differ = [*target.linear.failed, *dependent, *runner.check_rows()]
            runner.warm_up()
            if not runner.logits_are_finite():
                cause = ": its numbers are too large for float16; take bfloat16"
                raise BadRequest(
                    "dtype",
                    f"{_name_of(options.dtype)}: the model's logits are not finite"
                    + (cause if options.dtype == torch.float16 else ""),
                )
            log.info(
                "verifier %s: linear layers: %s; rows %s; %d pages, %.1f kB per token, %.1f MB of states",
                options.name,
                target.linear,
                f"differ: {', '.join(differ)}" if differ else "bitwise independent",
                pages,
                runner.pages.token_bytes / 1e3,
                states_bytes / 1e6,
            )
            undo.pop_all()
        hello = _hello_of(options, target, "margin" if differ else "bitwise")
        shelf = None
        if capacity.saves and capacity.recurrent is not None and (memory := target.run.recurrent) is not None:
            block = capacity.recurrent.extent.block

            def check(arrays: Arrays, tokens: int) -> None:
                memory.check(arrays, 2 * block)

            shelf = Shelf(states or NoStates(), hello.fingerprint, hello.tokenizer, memory.layout(block), check)
        return cls(StepScheduler(capacity), runner, hello, shelf, options.longest_step_s, differ)

    # The peer

    async def hello(self) -> Hello:
        return self._hello

    async def open(self, call: OpenCall) -> Opened:
        """Consume a text up to its root. Raises BadRequest, or Overloaded with `max_sessions + max_waiting` texts."""
        saved = None
        if self._shelf is not None:
            length, arrays = await self._shelf.find(call)
            saved = Saved(length, len(arrays["dt.0"]), arrays) if arrays is not None else None
        return await self._ask(call, saved)

    async def verify(self, call: VerifyCall) -> Verdict:
        """Verify a tree. Raises NotFound for an unknown opening or another text, BadRequest for a tree or text that
        cannot be verified; the opening stays open."""
        return await self._ask(call)

    async def close(self, call: CloseCall) -> Closed:
        """End an opening. A state-space target's memory of the text is saved first; attention keys are never saved."""
        return await self._ask(call)

    async def _ask(self, call: Call, saved: Saved | None = None) -> Any:
        if self._lost is not None:
            raise PeerLost(f"verifier: {self._lost}")
        if self._loop is None or self._loop.done():
            raise PeerLost("verifier: it is not running")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.scheduler.submit(PendingCall(call, reply, saved=saved))
        self._work.set()
        try:
            return await reply
        except asyncio.CancelledError:
            if isinstance(call, OpenCall):  # it may have been answered just now: no caller is left to close it
                discarded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                discarded.cancel()
                self.scheduler.submit(PendingCall(CloseCall(call.update), discarded))
            self._work.set()  # its memory is released by the next `next`
            raise

    # Start and stop

    async def start(self) -> None:
        """Start the loop that answers calls."""
        if self._loop is not None:
            raise RuntimeError("the engine was started before")
        self._loop = asyncio.create_task(self._run())
        if self.runner.crew is not None:
            loop = asyncio.get_running_loop()

            def lose(reason: str) -> None:
                with contextlib.suppress(RuntimeError):  # the event loop is closed
                    loop.call_soon_threadsafe(self._lose, reason)

            self.runner.crew.watch(lose)

    async def stop(self) -> None:
        """Fail pending calls and end the thread. May be called twice, and without `start`."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self.scheduler.give_up(PeerLost("verifier: it was stopped"))
        await asyncio.gather(*self._saving, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        if self.runner.crew is not None:
            await asyncio.to_thread(self.runner.crew.stop)

    def fault(self) -> str:
        """Why this engine cannot serve now; empty where it can."""
        ended = self._loop is not None and self._loop.done()
        return self._lost or ("its loop has ended" if ended else self._watch.fault())

    async def lost(self) -> str:
        """Wait until a worker of a sharded target, and so the engine, is lost; returns the reason."""
        await self._ended.wait()
        return str(self._lost)

    def _lose(self, reason: str) -> None:
        """Fail all calls with PeerLost at once, so that their texts go on at another replica."""
        if self._lost is None:
            log.error("verifier: %s; this replica answers no more calls", reason)
            self._lost = reason
            self.scheduler.give_up(PeerLost(f"verifier: {reason}"))
            self._ended.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        ahead: list[tuple[int, int]] = []  # (session, position) of noise to compute in idle time
        while self._lost is None:
            self._work.clear()  # any call from now on wakes the loop
            try:
                plan = self.scheduler.next()
            except Exception as error:
                self._give_up(error)
                continue
            if closed := self.scheduler.take_closed():
                self._thread.submit(self.runner.forget, closed)
            if restoring := self.scheduler.take_restoring():
                for session, saved in restoring:
                    self.scheduler.restored(session, await self._restore(session, saved))
                continue
            if plan is not None:
                try:
                    with self._watch.busy():
                        outcome = await loop.run_in_executor(self._thread, self.runner.run, plan)
                except Exception as error:
                    log.exception("verifier: a step of %d rows failed", len(plan.tokens))
                    if self.runner.crew is not None:  # its workers are no longer in step
                        self._lose(str(error))
                        return
                    self.scheduler.fail(error)
                    continue
                try:
                    likely = self.scheduler.apply(outcome)
                except Exception as error:
                    self._give_up(error)
                    continue
                ahead = [(session, base + step) for step in range(NOISE_AHEAD) for session, base in likely]
                # Callers get their answers before anything else starts.
                await asyncio.sleep(0)
            idle = plan is None
            while (leaving := self.scheduler.next_leaving()) is not None:
                await self._save(*leaving)
                idle = False
            if not idle:
                continue
            if ahead:
                try:
                    with self._watch.busy():
                        await loop.run_in_executor(self._thread, self.runner.prepare, *ahead.pop(0))
                except Exception:  # the round that needs this noise computes it then, or fails
                    log.exception("verifier: noise could not be computed ahead")
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.scheduler.linger_s or None):
                        await self._work.wait()

    async def _restore(self, session: VerifierText, saved: Saved) -> bool:
        """Restore a saved memory; false where that fails, which is logged: the text is then computed."""
        place, loop = session.memory.place, asyncio.get_running_loop()
        if place is None:  # all texts were ended meanwhile
            return False
        try:
            with self._watch.busy():
                await loop.run_in_executor(
                    self._thread, self.runner.restore, place, saved.length, saved.tokens, saved.arrays
                )
        except Exception:
            log.exception("verifier: a saved memory of %d tokens could not be restored", saved.length)
            return False
        return True

    async def _save(self, session: VerifierText, ask: PendingCall) -> None:
        """Copy a closed text's memory, release it, and save the copy in the background."""
        assert isinstance(ask.call, CloseCall) and self._shelf is not None
        shelf, arrays = self._shelf, None
        ids = list(session.memory.consumed)
        digest = session.text.tokens.digest(len(ids))
        if (place := session.memory.place) is not None and ids:
            copied = asyncio.get_running_loop().run_in_executor(self._thread, self.runner.save, place, len(ids))
            try:
                with self._watch.busy():
                    arrays = await copied
            except Exception:
                log.exception("verifier: the memory of a closed text could not be copied")
            except asyncio.CancelledError:
                ask.fail(PeerLost("verifier: it was stopped"))
                raise
        self.scheduler.gone(ask.call)

        async def save() -> None:
            covered = 0
            try:
                covered = await shelf.put(session.terms.tenant, ids, digest, arrays) if arrays else 0
            except Exception:  # a state that is not saved costs time, but changes no token
                log.exception("verifier: the memory of a closed text could not be saved")
            ask.answer(Closed(covered))

        task = asyncio.create_task(save())
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    def _give_up(self, error: Exception) -> None:
        """The scheduler raised: its state is unreliable, so all texts end; the replica goes on."""
        log.exception("verifier: the scheduler failed; all its texts end")
        self.scheduler.give_up(EngineFailed(f"verifier: {error}"))

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now."""
        memory = self.scheduler.memory
        return {
            **asdict(self.scheduler.counters),
            **(asdict(self._shelf.counters) if self._shelf is not None else {}),
            "shared_tokens": memory.shared_tokens,
            "pages": memory.book.pages,
            "pages_held": memory.held,
            "pages_held_at_most": memory.peak,
            "sessions": len(self.scheduler.sessions),
        }

    # For checks: the target's own logits, without a session

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this process holds beside the weights: `pages` and `states` of texts, and the `head`'s float32
        copy of its rows for the tokenizer's tokens, packed or not."""
        target, arrangement = self.runner.target, self.runner.arrangement
        head = target.model.get_output_embeddings()
        return {
            "head": min(target.vocabulary, head.out_features) * head.in_features * torch.float32.itemsize,
            "pages": self.runner.pages.nbytes,
            "states": target.recurrent_bytes(arrangement.tokens, arrangement.states),
        }

    def logits_of(self, ids: Sequence[int], tree: DraftTree) -> torch.Tensor:
        """Logits [rows, vocabulary] float32, on the host, of every row of a tree whose root is the last token of the
        text `ids`.

        For drafters made from the target itself, certify and tests, not for serving: costs a prefill of the tokens
        after the common prefix with the last call's text. Blocks until the model's thread is free; may be called from
        any thread, and before `start`.
        """
        return self._thread.submit(self.runner.tree_logits, ids, tree).result().cpu()


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
        taken = sharing * states_bytes
        bytes_left = int(options.memory_fraction * free_bytes(device)) - taken
        if bytes_left < 0:
            raise BadRequest(
                "memory_fraction",
                f"the states of max_sessions = {options.max_sessions} texts take {taken / 1e6:.0f} MB, "
                f"{-bytes_left / 1e6:.0f} MB more than {options.memory_fraction} of what is free",
            )
        if target.token_bytes:  # without attention, pages only count tokens
            room = bytes_left // (target.token_bytes * PAGE)
            pages = room if crew is None else crew.pages(options.memory_fraction, room, states_bytes)
    if pages < 1 or options.max_length < 2:
        reason = f"{pages} pages and {options.max_length} leave no room for a text"
        raise BadRequest("pool_tokens, max_length", reason)
    return pages


def _hello_of(options: VerifierOptions, target: LoadedTarget, exactness: str) -> Hello:
    # Sums of shards round differently: texts move only between replicas of one degree.
    degree = f"-tp{options.tensor_parallel}" if options.tensor_parallel > 1 else ""
    return Hello(
        protocol=PROTOCOL_VERSION,
        model=options.name,
        fingerprint=target.fingerprint + degree,
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
        ordinary_tokens=target.facts.ordinary_tokens,
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
