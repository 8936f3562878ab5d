"""Measured durations: plain counts, which a process keeps and its status port exports, smoothing, and rounding."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


class Histogram:
    """Observations by bucket. A bucket has those up to its bound; the last, without a bound, has the rest.

    >>> waits = Histogram((0.1, 1.0))
    >>> waits.observe(0.1); waits.observe(0.5, times=2); waits.observe(7.0)
    >>> waits.counts, waits.total
    ([1, 2, 1], 8.1)
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """bounds: ascending"""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0  # sum of the observed values

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class StepTotals:
    """Steps of one size, and their time."""

    steps: int = 0
    took_us: int = 0

    def add(self, took_us: int) -> None:
        self.steps += 1
        self.took_us += took_us


def totals_by_size(sizes: Iterable[int]) -> dict[int, StepTotals]:
    """Totals for each size, all of them from the start: another thread may read them while steps run."""
    return {size: StepTotals() for size in sizes}


SMOOTHING = 0.2
"""Weight of the newest measurement."""
OUTLIER = 3.0
"""A time counts as at most this many times the usual one: one page fault must not condemn an arm or a size of step."""


def smoothed(usual: float, newest: float) -> float:
    """The next smoothed value. `usual` 0 means that nothing was measured yet; the result is then `newest`."""
    return newest if not usual else usual + SMOOTHING * (newest - usual)


def microseconds(seconds: float) -> int:
    """A duration in whole microseconds, rounded down; 0 for a negative one."""
    return max(int(1e6 * seconds), 0)
