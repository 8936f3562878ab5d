"""Clocks are arguments of all code that measures time, so that tests and simulators set it instead of sleeping."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds since some moment, never decreasing; `time.monotonic` by default."""
