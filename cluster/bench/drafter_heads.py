"""What an acceptance head adds to a fused drafter's level. Its weights are random: the time does not depend on them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from dendro.text import Sampling

from cluster.bench.drafter import LEVEL_ROWS, LEVELS, MAMBA2, WHOLE, Measured, PartTimes, in_turns
from cluster.bench.drafter_forms import FUSED, DrafterForms, InlineDrafter
from cluster.measure.in_process import EngineText
from cluster.measure.report import aim_row
from cluster.measure.statistics import Estimate, median_estimate, paired_ratio
from drafter_service.acceptance_head import VERSION, AcceptanceHead, HeadFacts, weights_of
from drafter_service.confidence import Calibration
from drafter_service.models import DrafterModel
from drafter_service.plan import DraftPlan

WITHOUT = "without"
BLOCKS = (0, 1, 2, 3)
"""Residual blocks of the measured heads, at the drafter's width."""
JUDGED = 1
"""The default number of blocks, for which there is an aim."""
HEAD_BAR = 1.05
"""By how much a level with the head may take longer."""


def head_of(model: DrafterModel, blocks: int) -> AcceptanceHead:
    """A head with random weights, whose blocks are stored in bfloat16, like those of a trained one."""
    facts = HeadFacts(VERSION, "", model.hidden_size, model.vocabulary, blocks, tied=False, depths=6)
    generator = torch.Generator().manual_seed(blocks)
    made = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in facts.shapes.items()}
    made |= {name: made[name].bfloat16().float() for name in made if name.endswith("weight")}
    return AcceptanceHead(facts, weights_of(facts, made))


class HeadCase:
    """Levels of a fused drafter without a head and with heads of different depths."""

    def __init__(self, forms: DrafterForms, ids: Sequence[int]) -> None:
        self.name, model = forms.name, forms.models[FUSED]
        self.ways = (WITHOUT, *map(str, BLOCKS))
        self.times = {rows: PartTimes(self.ways, ()) for rows in LEVEL_ROWS}
        self._calibration = Calibration()
        self._drafters: dict[str, InlineDrafter] = {}
        self._plans: dict[str, dict[int, DraftPlan]] = {}
        for way in self.ways:
            head = None if way == WITHOUT else head_of(model, int(way))
            self._drafters[way] = drafter = InlineDrafter(model, 1, by_level=True, head=head)
            text = EngineText(ids, Sampling(temperature=1.0))
            drafter.open(text)
            levels = drafter.draft([text], LEVELS).plans[: len(LEVEL_ROWS)]
            self._plans[way] = dict(zip(LEVEL_ROWS, levels, strict=True))

    def measure(self, order: random.Random) -> Iterator[Measured]:
        """Run every level in every way, untimed and timed, each with the chances of its candidates as the scheduler
        reads them: those of the head, or those calibrated from the scores."""
        for rows, times in self.times.items():
            for way in in_turns(self.ways, order):
                plan, runner = self._plans[way][rows], self._drafters[way].runner
                runner.run(plan)
                started = time.perf_counter()
                outcome = runner.run(plan)
                if outcome.chances is None:
                    self._calibration.confidences(outcome.scores.tolist())
                else:
                    outcome.scores.tolist()
                    outcome.chances.tolist()
                yield times, way, {WHOLE: time.perf_counter() - started}


def head_rows(cases: Sequence[HeadCase]) -> list[dict[str, Any]]:
    """One object per drafter and level: milliseconds, and the ratio of a level with each head to that without."""
    found = []
    for case in cases:
        for rows, times in case.times.items():
            seconds = times.seconds[WHOLE]
            keyed = {way: {(index, 0): took for index, took in enumerate(values)} for way, values in seconds.items()}
            ms = {way: median_estimate([1e3 * took for took in values]).as_json() for way, values in seconds.items()}
            over = {way: paired_ratio(keyed[way], keyed[WITHOUT]).as_json() for way in case.ways if way != WITHOUT}
            found.append({"drafter": case.name, "rows": rows, "ms": ms, "over_without": over})
    return found


def head_aims(rows: Sequence[Mapping[str, Any]], missing: Mapping[str, str]) -> list[dict[str, Any]]:
    """One aim for each level of MAMBA2. missing: drafter -> why it has no form FUSED"""
    aims = []
    for count in LEVEL_ROWS:
        aim = f"{MAMBA2}, a level of {count} row{'s' * (count > 1)}: with an acceptance head of {JUDGED} block, at most"
        row = next((each for each in rows if (each["drafter"], each["rows"]) == (MAMBA2, count)), None)
        if row is None:
            aims.append(aim_row(aim, HEAD_BAR, None, None, missing.get(MAMBA2, "was not measured")))
            continue
        estimate = Estimate.of(row["over_without"][str(JUDGED)])
        aims.append(aim_row(aim, HEAD_BAR, estimate.median <= HEAD_BAR, estimate))
    return aims
