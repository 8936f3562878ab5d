"""Clocks of tests: one that a test advances, and that of an event loop whose time passes only while no task can run.

With such a loop tests of waits take no time and their order is certain. It is for tasks of one process alone: it does
not wait for sockets or threads.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class SetClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class SkippingSelector(selectors.DefaultSelector):
    """Where nothing is ready, time moves on by the timeout instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0)
        self.now_s += 0 if ready else timeout or 0
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; `time` is what handles and others take as their clock."""

    def __init__(self) -> None:
        self._skipping = SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
