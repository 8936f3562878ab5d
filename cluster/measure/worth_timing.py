"""Times a few steps and drafts of loaded engines, for what `dendro check` says of a drafter's worth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dendro.engine import started
from dendro.shapes import TreeShape
from dendro.text import Sampling

from cluster.measure.in_process import EngineText, star
from cluster.worth import SHAPES, DraftingEngine, TargetEngine

IDS = tuple(range(1, 33))
"""A text's tokens; which ones does not change the times."""
REPETITIONS = 5
ROOM = 64
Size = TypeVar("Size")

ROWS = (1, *sorted({shape.rows for shape in SHAPES}))


class WorthTimer:
    """As `cluster.worth.Timer`."""

    async def steps(self, target: TargetEngine, most_rows: int) -> dict[int, float]:
        """Verdicts are not committed: all steps start from the same text."""
        text = EngineText(IDS, Sampling(temperature=0.0))
        async with started(target):
            await text.open(target, ROOM)
            found = await medians_us(
                [rows for rows in ROWS if rows <= most_rows],
                lambda rows: text.verify(target, star(IDS[-1], rows), len(IDS)),
            )
            await text.close(target)
        return found

    async def drafts(self, drafter: DraftingEngine) -> dict[TreeShape, float]:
        """Each starts at the same text length, as after a round that accepted no guess."""
        text = EngineText(IDS, Sampling(temperature=0.0))
        async with started(drafter):
            await text.open(drafter, ROOM)
            found = await medians_us(SHAPES, lambda shape: text.draft(drafter, shape, len(IDS)))
            await text.close(drafter)
        return found


async def medians_us(sizes: Sequence[Size], call: Callable[[Size], Awaitable[object]]) -> dict[Size, float]:
    """Microseconds of a call by its size: medians of REPETITIONS, the sizes by turns, each first call as warm-up."""
    times: dict[Size, list[float]] = {size: [] for size in sizes}
    for _ in range(REPETITIONS + 1):
        for size, taken in times.items():
            began = time.perf_counter()
            await call(size)
            taken.append(1e6 * (time.perf_counter() - began))
    return {size: statistics.median(taken[1:]) for size, taken in times.items()}
