"""Work beside an event loop: tasks that outlive the call that started them, and long work in threads."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from dendro.errors import DendroError
from dendro.failures import log_failure

log = logging.getLogger("dendro.tasks")

LONG = 8192
"""Tokens of a text from which on work goes to a thread. On fewer it takes less than a millisecond, a hop to a thread
some tenths of one."""
PART = 8192
"""Tokens that one call of C code handles: such a call keeps other threads, and so the loop, from running."""

AT_ONCE = min(32, (os.cpu_count() or 1) + 4) // 2
"""Pieces of one tenant's long work of one kind that run at once: half as many as asyncio has threads."""

Result = TypeVar("Result")


class BackgroundTasks:
    """Tasks that are referenced until they end: the event loop keeps no task alive. Their errors are logged, except
    those of the class `expected`."""

    def __init__(self, expected: type[Exception] = DendroError) -> None:
        self._expected = expected
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all tasks, without waiting for them."""
        for task in tuple(self._tasks):
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, self._expected):
            log_failure(log, error, "a background task failed")


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task unless it is done, and wait for it."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task})


async def first_of(*waits: Coroutine[Any, Any, object] | asyncio.Task[Any]) -> None:
    """Wait until one of these has ended, with whatever outcome. Coroutines are then cancelled; tasks go on."""
    started = [asyncio.ensure_future(each) for each in waits if not isinstance(each, asyncio.Task)]
    given = [each for each in waits if isinstance(each, asyncio.Task)]
    try:
        await asyncio.wait({*started, *given}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in started:
            each.cancel()


class _Turns:
    """A tenant's turns at long work, by the kind of work."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Semaphore] = {}

    def at(self, kind: str) -> asyncio.Semaphore:
        return self._turns.setdefault(kind, asyncio.Semaphore(AT_ONCE))


_TURNS: ContextVar[_Turns | None] = ContextVar("turns", default=None)
"""The turns of the tenant that the current task works for; None: it works for none."""


class TenantTurns:
    """Lets tenants take turns at the threads of long work: those of one tenant wait for each other, so that another's
    finds a thread. Bound to one event loop."""

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, _Turns] = WeakValueDictionary()

    def enter(self, tenant: str) -> None:
        """Let the long work of the current task, and of tasks that it starts from now on, be this tenant's."""
        turns = self._turns.get(tenant)
        if turns is None:
            turns = self._turns[tenant] = _Turns()
        _TURNS.set(turns)


class TenantLock:
    """A lock that tenants take in turns, however many tasks of one wait for it. Bound to one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncGenerator[None, None]:
        """Hold the lock for a tenant."""
        own = self._own.get(tenant)
        if own is None:
            own = self._own[tenant] = asyncio.Lock()
        async with own, self._lock:  # one task of a tenant waits for the second
            yield


async def in_turn(kind: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """The result of work that keeps a thread, once it is its tenant's turn at work of this kind (`TenantTurns`). A
    thread goes on after its caller has left, and so does its turn."""
    turns = _TURNS.get()
    if turns is None:
        return await work()
    turn = turns.at(kind)
    await turn.acquire()
    running = asyncio.create_task(work())

    def leave(done: asyncio.Task[Result]) -> None:
        turn.release()
        if not done.cancelled():
            done.exception()  # marks it as read: the caller may be gone

    running.add_done_callback(leave)
    return await asyncio.shield(running)


async def off_loop(tokens: int, work: Callable[[], Result]) -> Result:
    """The result of `work`, which runs in a thread, in its tenant's turn, if it is about LONG tokens or more."""
    return work() if tokens < LONG else await in_turn("long", lambda: asyncio.to_thread(work))
