"""Engines: peers in this process. An engine's scheduler and model run in one thread; callers wait on event loops.

call -> inbox -> [ all queued calls, then one step: plan, forward, answers ] -> ticket -> caller
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from dendro.calls import Deliver, DraftCall, DrafterLinks, DrafterPeer, Peer, VerifierPeer, VerifyCall
from dendro.clock import Clock
from dendro.errors import DendroError, EngineFailed, PeerLost
from dendro.failures import described, log_failure
from dendro.measured import StepTotals

log = logging.getLogger("dendro.engine")

LONGEST_STEP_S = 60.0
"""The time limit of one step. A long prompt is processed in many steps, each with this limit."""

Result = TypeVar("Result")


class Engine(Peer, Protocol):
    """A drafter or verifier of this process, with its life and its measurements."""

    async def start(self) -> None:
        """Begin to answer calls; those made before are answered, too. Raises RuntimeError if it was started before."""
        ...

    async def stop(self) -> None:
        """Fail waiting calls with PeerLost, and wait for the step in progress. May be repeated, also before `start`."""
        ...

    async def lost(self) -> str:
        """Wait until the engine answers no more calls, because a part is gone or it was stopped. Returns the reason."""
        ...

    def fault(self) -> str:
        """Reason why the engine cannot serve now, such as a step that does not return; empty if it can. May be called
        from any thread."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters since the engine was loaded, and numbers of what it holds now, by name."""
        ...

    def steps_by_rows(self) -> Mapping[int, StepTotals]:
        """Steps of the model since the engine was loaded, by their padded number of rows. May be called from any
        thread."""
        ...

    def memory_bytes(self, longest: int) -> dict[str, int]:
        """Most bytes of memory beside the weights, by kind, if no text is longer than `longest` tokens."""
        ...

    @property
    def kernels(self) -> str:
        """Text for a person: the forms of products and layers that run on this machine, and why not the fastest."""
        ...

    @property
    def sessions(self) -> int:
        """Number of open texts."""
        ...


class LocalDrafter(DrafterPeer, Engine, Protocol):
    """A drafter of this process."""

    def draft_for(self, call: DraftCall, deliver: Deliver) -> None:
        """Called by a stream, and in a verifier's thread for an ordered tree, in place of `draft`: no event loop is
        passed on the way. Returns at once; `deliver` is called once, from any thread, with the tree or an error."""
        ...


class LocalVerifier(VerifierPeer, Engine, Protocol):
    """A verifier of this process."""

    def verify_for(self, call: VerifyCall, deliver: Deliver) -> None:
        """Called by a stream in place of `verify`, as `LocalDrafter.draft_for`."""
        ...

    def link(self, links: DrafterLinks) -> None:
        """Called before `start`, if the verifier can ask drafters for ordered trees. Its hello says so from then on."""
        ...


E = TypeVar("E", bound=Engine)


@contextlib.asynccontextmanager
async def started(engine: E) -> AsyncIterator[E]:
    """Start an engine, and stop it at the end."""
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


class Ticket:
    """A call that waits for its answer. `settle` may come from any thread."""

    __slots__ = ("_deliver", "arrived_s", "cancelled", "settled", "taken", "value")

    def __init__(self, arrived_s: float, deliver: Callable[[object], None] | None = None) -> None:
        """deliver: called with the answer; None if nobody waits"""
        self.arrived_s = arrived_s  # time of arrival on the engine's clock
        self.taken = False  # True once the call's work has run
        self.cancelled = False  # the caller left before the answer
        self.settled = False
        self.value: Any = None  # the answer, once settled
        self._deliver = deliver

    def settle(self, value: object) -> None:
        """Answer the call with a value, or with an exception, which is raised at the caller. Ignored after an answer or
        a cancellation."""
        if self.settled or self.cancelled:
            return
        self.value, self.settled = value, True
        deliver, self._deliver = self._deliver, None  # it may refer to this ticket
        if deliver is not None:
            deliver(value)


class _Outbox:
    """Passes answers from other threads to one event loop, which is woken once for all that are ready together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._wake = loop.call_soon_threadsafe
        self._lock = threading.Lock()
        self._ready: list[tuple[asyncio.Future[Any], object]] = []

    def put(self, future: asyncio.Future[Any], value: object) -> None:
        with self._lock:
            self._ready.append((future, value))
            first = len(self._ready) == 1
        if first:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                self._wake(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
        for future, value in ready:
            _resolve(future, value)


def _resolve(future: asyncio.Future[Any] | Future[Any], value: object) -> None:
    """Set a future's result, or its exception. Ignored if the future is done: cancelled, or set before."""
    with contextlib.suppress(InvalidStateError, asyncio.InvalidStateError):
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)


class StepWatch:
    """Measures how long an engine's current step has run: a step that takes too long makes its replica unhealthy.

    The engine's thread runs each step inside `busy`. An idle engine is healthy. `fault` may be called from any thread.
    """

    def __init__(self, longest_s: float = LONGEST_STEP_S, clock: Clock = time.monotonic) -> None:
        self.longest_s = longest_s
        self._clock = clock
        self._since: float | None = None  # start of the current step, by `clock`; None: idle

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Context in which one step is timed."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._since = None

    def fault(self) -> str:
        """Reason why the engine counts as hanging; empty if it does not."""
        since = self._since  # read once: the engine's thread may change it
        if since is None or self._clock() - since <= self.longest_s:
            return ""
        return f"a step has not come back for {self._clock() - since:.0f} s; the limit is {self.longest_s:g} s"


class EngineThread:
    """The thread of one engine: queued calls, steps, and their end. Scheduler and model are used in it alone."""

    def __init__(
        self,
        name: str,
        step: Callable[[], float | None],
        end_texts: Callable[[DendroError], None],
        *,
        setup: Callable[[], None],
        broken: Callable[[], str] = lambda: "",
        longest_step_s: float = LONGEST_STEP_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """step: one step. Returns the seconds to wait for a call before the next: 0 not to wait, None for no limit
        end_texts: closes every text, after a step that raised and at the end; the calls that wait for them fail
        setup: called first in the thread
        broken: called in the thread after an error of unknown cause. Returns the reason why every later step would
            fail, too; empty if one can succeed
        longest_step_s: `fault` reports a step that takes longer
        """
        self.name = name
        self.clock = clock
        self._step = step
        self._end_texts = end_texts
        self._setup = setup
        self._broken = broken
        self._watch = StepWatch(longest_step_s, clock)
        self._inbox: queue.SimpleQueue[tuple[Ticket, Callable[[Ticket], None]]] = queue.SimpleQueue()
        self._waiting: set[Ticket] = set()
        self._outboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Outbox] = WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._alone = threading.Lock()  # held by `run` before `start`
        self._over: Future[str] = Future()  # why no more calls are answered

    def start(self) -> None:
        """Begin to run calls and steps."""
        if self._thread is not None:
            raise RuntimeError(f"{self.name}: it was started before")
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Fail waiting calls and wait for the step in progress. May be repeated, and come before `start`."""
        self.lose("it was stopped")
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def lose(self, reason: str) -> bool:
        """Fail all calls with PeerLost, now and later, and end after the step in progress; False if it ended before.
        From any thread."""
        try:
            self._over.set_result(reason)
        except InvalidStateError:
            return False
        for ticket in self._waiting.copy():
            ticket.settle(self._lost())
        self.post(lambda ticket: None)  # wakes the thread
        return True

    def lose_if_broken(self) -> bool:
        """End as `lose` does if `broken` has a reason, and return whether it has. In the thread, after an error."""
        reason = self._broken()
        if reason and self.lose(reason):
            log.error("%s: %s; this replica answers no more calls", self.name, reason)
        return bool(reason)

    async def lost(self) -> str:
        """Wait until no more calls are answered; returns the reason."""
        return await asyncio.shield(asyncio.wrap_future(self._over))

    def fault(self) -> str:
        """Reason why no calls are answered now; empty while they are."""
        return self._over.result() if self._over.done() else self._watch.fault()

    async def ask(self, work: Callable[[Ticket], None], abandon: Callable[[Ticket], None] | None = None) -> Any:
        """Run `work` in the thread and wait until its ticket is settled. `abandon` runs there if the caller leaves."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        ticket = self.call(work, partial(self._outbox(loop).put, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            ticket.cancelled = not ticket.settled
            self._waiting.discard(ticket)
            if abandon is not None:
                self.post(abandon)
            raise

    def _outbox(self, loop: asyncio.AbstractEventLoop) -> _Outbox:
        if loop not in self._outboxes:
            self._outboxes[loop] = _Outbox(loop)
        return self._outboxes[loop]

    def call(self, work: Callable[[Ticket], None], deliver: Deliver) -> Ticket:
        """Run `work` in the thread, and call `deliver` there, or here if no calls are answered any more, with its
        ticket's answer. From any thread; returns the ticket at once."""

        def settled(value: object) -> None:
            self._waiting.discard(ticket)
            deliver(value)

        ticket = Ticket(self.clock(), settled)
        self._waiting.add(ticket)  # first of all: `lose` finds it also if it comes after the check
        if self._over.done():
            ticket.settle(self._lost())
        else:
            self._inbox.put((ticket, work))
        return ticket

    def post(self, work: Callable[[Ticket], None]) -> None:
        """Run `work` in the thread; nobody waits for it."""
        self._inbox.put((Ticket(self.clock()), work))

    def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` where the model runs, before `start` too, and return its result. Blocks; for checks."""
        if self._thread is None:
            with self._alone, ThreadPoolExecutor(1, self.name, self._setup) as once:
                return once.submit(work).result()
        answer: Future[Result] = Future()
        self.call(lambda ticket: ticket.settle(work()), partial(_resolve, answer))
        return answer.result()

    def _lost(self) -> PeerLost:
        return PeerLost(f"{self.name}: {self._over.result()}")

    def _run(self) -> None:
        try:
            self._setup()
            wait_s: float | None = None
            while self._run_calls(wait_s):
                try:
                    with self._watch.busy():
                        wait_s = self._step()
                except BaseException as error:  # a panic of a native library is no Exception
                    log_failure(log, error, "%s: a step failed outside of its forward; all texts end", self.name)
                    self.lose_if_broken()
                    self._end(EngineFailed(f"{self.name}: {described(error)}"))
                    wait_s = None
            self._end(self._lost())
        except BaseException as error:
            log_failure(log, error, "%s: its thread has ended", self.name)
            self.lose("its thread has ended")

    def _end(self, reason: DendroError) -> None:
        """End every text, and fail the calls that the scheduler has taken; those still queued are run."""
        self._end_texts(reason)
        for ticket in self._waiting.copy():
            if ticket.taken:
                ticket.settle(reason)

    def _run_calls(self, wait_s: float | None) -> bool:
        """Run all queued calls, waiting up to `wait_s` for the first; False if the engine is to end."""
        wait = wait_s is None or wait_s > 0
        while not self._over.done():
            try:
                ticket, work = self._inbox.get(wait, wait_s)
            except queue.Empty:
                return True
            wait, ticket.taken = False, True
            try:
                with self._watch.busy():
                    work(ticket)
            except DendroError as error:
                ticket.settle(error)
            except BaseException as error:
                log_failure(log, error, "%s: a call failed", self.name)
                self.lose_if_broken()
                ticket.settle(EngineFailed(f"{self.name}: {described(error)}"))
        return False
