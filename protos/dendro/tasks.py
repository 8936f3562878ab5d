"""Work beside an event loop: tasks that outlive the call that started them, and long work in threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from dendro.errors import DendroError
from dendro.failures import log_failure

log = logging.getLogger("dendro.tasks")

LONG = 8192
"""Tokens of a text from which on work goes to a thread. On fewer it takes less than a millisecond, a hop to a thread
some tenths of one."""
PART = 8192
"""Tokens that one call of C code handles: such a call keeps other threads, and so the loop, from running."""

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


async def off_loop(tokens: int, work: Callable[[], Result]) -> Result:
    """The result of `work`, which runs in a thread if it is about LONG tokens or more."""
    return work() if tokens < LONG else await asyncio.to_thread(work)
