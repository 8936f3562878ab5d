"""Calls timed by turns."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from cluster.measure.measurement import Step

Way = TypeVar("Way")


async def by_turns(
    ways: Sequence[Way], call: Callable[[Way], Awaitable[object]], repetitions: int, step: Step | None = None
) -> dict[Way, list[float]]:
    """Seconds of a call in each way, `repetitions` of them. The ways take turns; the first turn of each is warm-up."""
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(repetitions + 1):
        for way, taken in times.items():
            made = call(way)  # what is made for a call is not timed
            began = time.perf_counter()
            await made
            taken.append(time.perf_counter() - began)
        if step is not None:
            step()
    return {way: taken[1:] for way, taken in times.items()}


def medians_us(times: Mapping[Way, Sequence[float]]) -> dict[Way, float]:
    """Median microseconds of each way, of `by_turns`' seconds."""
    return {way: 1e6 * median(taken) for way, taken in times.items()}
