"""Threads that find what structures allow, beside the models of an engine: its own thread waits a moment for them, and
goes on without the texts that take longer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from dendro.daemon_threads import DaemonThreads

MASKS_AT_ONCE = 32
WAIT_S = 0.01
"""How long an engine's thread waits at once."""

Result = TypeVar("Result")


class MaskThreads:
    """Of one engine. Until work on a text's structure is done, nothing else may use that structure."""

    def __init__(self) -> None:
        self._threads = DaemonThreads("structure-masks", MASKS_AT_ONCE)  # they start with the first work

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on one text's structure in a thread."""
        return self._threads.submit(work)

    def wait(self, works: Collection[Future[Any]]) -> None:
        """Give them time to be done."""
        if any(not each.done() for each in works):
            wait_for(works, WAIT_S)
