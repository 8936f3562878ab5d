"""Times of loaded engines of this process: of a verifier's step by its rows, and of a drafter's tree by its shape."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from dendro.engine import started
from dendro.shapes import MAX_ROWS, TreeShape
from dendro.text import Sampling

from cluster.measure.in_process import EngineText, star
from cluster.worth import SHAPES, DraftingEngine, TargetEngine

IDS = tuple(range(1, 33))
"""A text's tokens; which ones does not change the times."""
REPETITIONS = 5
Way = TypeVar("Way")
ROWS = (1, *sorted({shape.rows for shape in SHAPES}))


class WorthTimer:
    """Implements `cluster.worth.Timer`: calls take turns on one text at temperature 0. No verdict is committed, so each
    draft reads the root again, as after a round that accepted no guess."""

    async def steps(self, target: TargetEngine, most_rows: int) -> dict[int, float]:
        rows, longest = [rows for rows in ROWS if rows <= most_rows], (await target.hello()).max_length
        ids = IDS[: longest - 1]
        text = EngineText(ids, Sampling())
        async with started(target):
            await text.open(target, min(MAX_ROWS, longest - len(ids)))
            times = await by_turns(rows, lambda count: text.verify(target, star(ids[-1], count)), REPETITIONS)
            await text.close(target)
        return medians_us(times)

    async def drafts(self, drafter: DraftingEngine) -> dict[TreeShape, float]:
        text = EngineText(IDS, Sampling())
        async with started(drafter):
            await text.open(drafter, MAX_ROWS)
            times = await by_turns(SHAPES, lambda shape: text.draft(drafter, shape), REPETITIONS)
            await text.close(drafter)
        return medians_us(times)


async def by_turns(
    ways: Sequence[Way], call: Callable[[Way], Awaitable[object]], repetitions: int
) -> dict[Way, list[float]]:
    """Seconds of a call in each way, `repetitions` of them. The ways take turns; the first turn of each is warm-up."""
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(repetitions + 1):
        for way, taken in times.items():
            made = call(way)  # making the call is not timed
            began = time.perf_counter()
            await made
            taken.append(time.perf_counter() - began)
    return {way: taken[1:] for way, taken in times.items()}


def medians_us(times: Mapping[Way, Sequence[float]]) -> dict[Way, float]:
    """Median microseconds of each way, of `by_turns`' seconds."""
    return {way: 1e6 * median(taken) for way, taken in times.items()}
