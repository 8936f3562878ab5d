"""Time is given to whatever measures it, so that tests and simulators set it instead of sleeping."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since some moment, never decreasing; `time.monotonic` where nothing else is given."""


def microseconds(seconds: float) -> int:
    """A duration as it is reported, rounded down; 0 for a negative one."""
    return max(int(1e6 * seconds), 0)
