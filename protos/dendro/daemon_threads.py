"""Threads for work of a native library that may never end. A process ends without waiting for them; it would wait for
the threads of an executor."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

IDLE_S = 10.0
"""Seconds without work after which a thread of `DaemonThreads` ends."""

STACK_BYTES = 8 << 20
"""Stack of the threads. That of the system's choice may be 2 MiB, too little for structures that a canary compiled."""
_STARTING = threading.Lock()

MASKS_AT_ONCE = 32
WAIT_S = 0.01
"""Seconds that an engine's thread waits at a time."""

Result = TypeVar("Result")


def settle(future: Future[Result], work: Callable[[], Result]) -> None:
    """Run `work` and set a future to its result, unless the future was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        found = work()
    except BaseException as error:  # a native library's panic is a BaseException
        future.set_exception(error)
    else:
        future.set_result(found)


def start_thread(name: str, work: Callable[[], object]) -> None:
    """Run `work` in a new daemon thread with a stack of STACK_BYTES."""
    with _STARTING:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        finally:
            threading.stack_size(before)


async def in_thread(name: str, work: Callable[[], Result]) -> Result:
    """Run `work` in a new thread and return its result. If the caller is cancelled, `work` goes on."""
    future = Future[Result]()
    start_thread(name, lambda: settle(future, work))
    return await asyncio.wrap_future(future)


class DaemonThreads:
    """Threads that run work in the order in which it was submitted, as many as there is work, up to `most`."""

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._changed = threading.Condition()
        self._threads = self._idle = 0

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` in one of the threads."""
        future = Future[Result]()
        with self._changed:
            self._waiting.append((future, work))
            if self._idle < len(self._waiting) and self._threads < self._most:
                self._threads += 1
                start_thread(self._name, self._run)
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                found = self._changed.wait_for(lambda: self._waiting, IDLE_S)
                self._idle -= 1
                if not found:
                    self._threads -= 1
                    return
                future, work = self._waiting.popleft()
            settle(future, work)
            del future, work, found


class MaskThreads:
    """Threads of one engine that find what structures allow while its models run.

    The engine's own thread waits a moment for them, and goes on without the texts that take longer. Until work on a
    text's structure is done, nothing else may use that structure.
    """

    def __init__(self) -> None:
        self._threads = DaemonThreads("structure-masks", MASKS_AT_ONCE)  # threads start with the first work

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on one text's structure in a thread."""
        return self._threads.submit(work)

    def wait(self, works: Collection[Future[Any]]) -> None:
        """Wait up to WAIT_S for works to be done."""
        if any(not each.done() for each in works):
            wait_for(works, WAIT_S)
