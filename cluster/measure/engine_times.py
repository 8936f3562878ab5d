"""Times of loaded engines of this process: of a verifier's step by its rows, and of a drafter's tree by its shape."""

from __future__ import annotations

from collections.abc import Sequence

from dendro.calls import DrafterPeer, VerifierPeer
from dendro.engine import started
from dendro.shapes import MAX_ROWS, TreeShape
from dendro.text import Sampling

from cluster.measure.in_process import EngineText, star
from cluster.measure.measurement import Step
from cluster.measure.turns import by_turns, medians_us
from cluster.worth import SHAPES, DraftingEngine, TargetEngine

IDS = tuple(range(1, 33))
"""A text's tokens; which ones does not change the times."""
REPETITIONS = 5
ROWS = (1, *sorted({shape.rows for shape in SHAPES}))


async def measure_steps(
    verifier: VerifierPeer,
    ids: Sequence[int],
    temperature: float,
    rows: Sequence[int],
    repetitions: int,
    step: Step | None = None,
) -> dict[int, float]:
    """Rows -> median microseconds of a step on one text, interleaved. Verdicts are not committed; each first step is
    warm-up."""
    text = EngineText(ids, Sampling(temperature=temperature))
    await text.open(verifier, MAX_ROWS)
    times = await by_turns(rows, lambda count: text.verify(verifier, star(ids[-1], count), len(ids)), repetitions, step)
    await text.close(verifier)
    return medians_us(times)


async def measure_drafts(
    drafter: DrafterPeer,
    ids: Sequence[int],
    temperature: float,
    shapes: Sequence[TreeShape],
    repetitions: int,
    step: Step | None = None,
) -> dict[TreeShape, float]:
    """Shape -> median microseconds of a tree on one text, interleaved. The first draft of each shape is warm-up.

    All drafts start at the same text length: each reads the root again, as after a round that accepted no guess.
    """
    text = EngineText(ids, Sampling(temperature=temperature))
    await text.open(drafter, MAX_ROWS)
    times = await by_turns(shapes, lambda shape: text.draft(drafter, shape, len(ids)), repetitions, step)
    await text.close(drafter)
    return medians_us(times)


class WorthTimer:
    """Implements `cluster.worth.Timer`."""

    async def steps(self, target: TargetEngine, most_rows: int) -> dict[int, float]:
        async with started(target):
            return await measure_steps(target, IDS, 0.0, [rows for rows in ROWS if rows <= most_rows], REPETITIONS)

    async def drafts(self, drafter: DraftingEngine) -> dict[TreeShape, float]:
        async with started(drafter):
            return await measure_drafts(drafter, IDS, 0.0, SHAPES, REPETITIONS)
