"""Threads of an engine that find what structures allow while its models run. The engine's own thread waits a moment for
them, and goes on without the texts that take longer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from dendro.daemon_threads import DaemonThreads

MASKS_AT_ONCE = 32
WAIT_S = 0.01
"""Seconds that an engine's thread waits at a time."""

Result = TypeVar("Result")


class MaskThreads:
    """The mask threads of one engine. Until work on a text's structure is done, nothing else may use that structure."""

    def __init__(self) -> None:
        self._threads = DaemonThreads("structure-masks", MASKS_AT_ONCE)  # they start with the first work

    def begin(self, work: Callable[[], Result]) -> Future[Result]:
        """Run `work` on one text's structure in a thread."""
        return self._threads.submit(work)

    def wait(self, works: Collection[Future[Any]]) -> None:
        """Wait up to WAIT_S for works to be done."""
        if any(not each.done() for each in works):
            wait_for(works, WAIT_S)
