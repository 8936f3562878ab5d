"""Detects a hanging engine: a step that takes too long makes its replica unhealthy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from dendro.clock import Clock

LONGEST_STEP_S = 60.0
"""The time limit of one step. A long prompt is processed in many steps, each with this limit."""


class StepWatch:
    """Measures how long an engine's current step has run. The engine's thread runs each step inside `busy`.

    An idle engine is healthy. `fault` may be called from any thread.
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
