"""Times a few steps and drafts of loaded engines, for what `dendro check` says of a drafter's worth."""

from __future__ import annotations

from dendro.engine import started
from dendro.shapes import TreeShape
from dendro.text import Sampling

from cluster.measure.in_process import EngineText, star
from cluster.measure.turns import by_turns, medians_us
from cluster.worth import SHAPES, DraftingEngine, TargetEngine

IDS = tuple(range(1, 33))
"""A text's tokens; which ones does not change the times."""
REPETITIONS = 5
ROOM = 64

ROWS = (1, *sorted({shape.rows for shape in SHAPES}))


class WorthTimer:
    """Implements `cluster.worth.Timer`."""

    async def steps(self, target: TargetEngine, most_rows: int) -> dict[int, float]:
        """Verdicts are not committed: all steps start from the same text."""
        text = EngineText(IDS, Sampling(temperature=0.0))
        async with started(target):
            await text.open(target, ROOM)
            found = await by_turns(
                [rows for rows in ROWS if rows <= most_rows],
                lambda rows: text.verify(target, star(IDS[-1], rows), len(IDS)),
                REPETITIONS,
            )
            await text.close(target)
        return medians_us(found)

    async def drafts(self, drafter: DraftingEngine) -> dict[TreeShape, float]:
        """Each starts at the same text length, as after a round that accepted no guess."""
        text = EngineText(IDS, Sampling(temperature=0.0))
        async with started(drafter):
            await text.open(drafter, ROOM)
            found = await by_turns(SHAPES, lambda shape: text.draft(drafter, shape, len(IDS)), REPETITIONS)
            await text.close(drafter)
        return medians_us(found)
