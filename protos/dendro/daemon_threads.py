"""Threads for work of a native library that may not end: a process ends without waiting for them, as it would for an
executor's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def begin(name: str, work: Callable[[], Result]) -> Future[Result]:
    """Run `work` in a new thread."""
    future = Future[Result]()
    threading.Thread(target=lambda: settle(future, work), name=name, daemon=True).start()
    return future


def settle(future: Future[Result], work: Callable[[], Result]) -> None:
    """Run `work` for a future, unless that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        found = work()
    except BaseException as error:  # a native library's panic is none of Exception
        future.set_exception(error)
    else:
        future.set_result(found)


async def in_thread(name: str, work: Callable[[], Result]) -> Result:
    """The result of `work` in a new thread. A cancelled caller leaves it running."""
    return await asyncio.wrap_future(begin(name, work))
