"""Clocks are arguments of all code that measures time, so that tests and simulators set it instead of sleeping."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds since some moment, never decreasing; `time.monotonic` by default."""


def microseconds(seconds: float) -> int:
    """A duration in whole microseconds, rounded down; 0 for a negative one."""
    return max(int(1e6 * seconds), 0)
