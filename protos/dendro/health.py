"""Whether an engine still comes on: a step that does not come back makes its replica unhealthy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

LONGEST_STEP_S = 60.0
"""The longest that one step may take. A long prompt is many steps, so this bounds one chunk of it, not the whole."""


class StepWatch:
    """Watches one engine's thread: `busy` is around each piece of its work. May be asked from any thread.

    An engine with nothing to do is well. One at work is well until a single piece of it takes longer than `longest_s`.
    """

    def __init__(self, longest_s: float = LONGEST_STEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.longest_s = longest_s
        self._clock = clock
        self._since: float | None = None  # of the piece at hand, seconds; None: idle

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While one piece of work is done."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._since = None

    def fault(self) -> str:
        """Why the engine counts as hung; empty where it is well."""
        since = self._since  # read once: the engine's thread may end its work now
        if since is None or self._clock() - since <= self.longest_s:
            return ""
        return f"a step has not come back for {self._clock() - since:.0f} s; the longest may take {self.longest_s:g} s"
