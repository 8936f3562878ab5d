"""Times a few steps and drafts of loaded engines, for what `dendro check` says of a drafter's worth."""

from __future__ import annotations

import statistics
import time

from dendro.engine import started
from dendro.shapes import TreeShape
from dendro.text import Sampling

from cluster.bench.costs import star
from cluster.bench.in_process import EngineText
from cluster.worth import SHAPES, DraftingEngine, TargetEngine

IDS = tuple(range(1, 33))
"""A text's tokens; which ones does not change the times."""
REPETITIONS = 5
ROOM = 64
ROWS = (1, *sorted({shape.rows for shape in SHAPES}))


class WorthTimer:
    """As `cluster.worth.Timer`: medians, the sizes by turns, each first one as warm-up."""

    async def steps(self, target: TargetEngine, most_rows: int) -> dict[int, float]:
        """Verdicts are not committed: all steps start from the same text."""
        times: dict[int, list[float]] = {rows: [] for rows in ROWS if rows <= most_rows}
        async with started(target):
            text = EngineText(IDS, Sampling(temperature=0.0))
            await text.open(target, ROOM)
            for _ in range(REPETITIONS + 1):
                for rows, taken in times.items():
                    began = time.perf_counter()
                    await text.verify(target, star(IDS[-1], rows), len(IDS))
                    taken.append(1e6 * (time.perf_counter() - began))
            await text.close(target)
        return {rows: statistics.median(taken[1:]) for rows, taken in times.items()}

    async def drafts(self, drafter: DraftingEngine) -> dict[TreeShape, float]:
        """Each starts at the same text length, as after a round that accepted no guess."""
        times: dict[TreeShape, list[float]] = {shape: [] for shape in SHAPES}
        async with started(drafter):
            text = EngineText(IDS, Sampling(temperature=0.0))
            await text.open(drafter, ROOM)
            for _ in range(REPETITIONS + 1):
                for shape, taken in times.items():
                    began = time.perf_counter()
                    await text.draft(drafter, shape, len(IDS))
                    taken.append(1e6 * (time.perf_counter() - began))
            await text.close(drafter)
        return {shape: statistics.median(taken[1:]) for shape, taken in times.items()}
