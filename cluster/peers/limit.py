"""A limit on the duration of calls that a request makes one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

Result = TypeVar("Result")


class CallLimit:
    """Ends a call that takes longer than `limit_s`, with one timer of the loop for all calls of a request.

    (`asyncio.timeout` sets and cancels a timer for every call: a twentieth of a router's round without speculation.)
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._call: asyncio.Future[Any] | None = None  # the one in progress
        self._due_s = 0.0  # when it is ended, by the loop's clock
        self._expired = False
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, call: Awaitable[Result], more_s: float = 0.0) -> Result:
        """The call's result. Raises TimeoutError after the limit and `more_s`. One call at a time."""
        loop = asyncio.get_running_loop()
        self._call = future = asyncio.ensure_future(call)
        self._due_s, self._expired = loop.time() + self._limit_s + more_s, False
        if self._timer is None:
            self._timer = loop.call_at(self._due_s, self._check)
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._expired and (task is None or not task.cancelling()):
                raise TimeoutError from None
            raise
        finally:
            self._call = None

    def _check(self) -> None:
        self._timer = None
        if self._call is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due_s:  # a later call than the one that the timer was set for
            self._timer = loop.call_at(self._due_s, self._check)
            return
        self._expired = True
        self._call.cancel()

    def close(self) -> None:
        """End the timer: no more calls are made."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
