"""Calls timed by turns."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from cluster.measure.report import Row
from cluster.measure.statistics import median_estimate

Way = TypeVar("Way")


async def by_turns(
    ways: Sequence[Way], call: Callable[[Way], Awaitable[object]], repetitions: int
) -> dict[Way, list[float]]:
    """Seconds of a call in each way, `repetitions` of them. The ways take turns; the first turn of each is warm-up."""
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(repetitions + 1):
        for way, taken in times.items():
            made = call(way)  # what is made for a call is not timed
            began = time.perf_counter()
            await made
            taken.append(time.perf_counter() - began)
    return {way: taken[1:] for way, taken in times.items()}


def medians_us(times: Mapping[Way, Sequence[float]]) -> dict[Way, float]:
    """Median microseconds of each way, of `by_turns`' seconds."""
    return {way: 1e6 * median(taken) for way, taken in times.items()}


def estimates(times: Mapping[Way, Sequence[float]], scale: float = 1e3) -> dict[str, Row]:
    """A row's field: each way's estimate, by default milliseconds of seconds."""
    return {str(way): estimate([scale * each for each in taken]) for way, taken in times.items()}


def over(one: Sequence[float], other: Sequence[float]) -> Row:
    """A row's field: the estimate of the ratios of values that were measured next to each other."""
    return estimate([mine / its for mine, its in zip(one, other, strict=True)])


def estimate(values: Sequence[float]) -> Row:
    return median_estimate(values).as_json()
