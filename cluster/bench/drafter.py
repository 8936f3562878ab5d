"""The time of a drafter: levels, whole drafts, many sessions at once, and texts of different lengths.

Every form of a model does the same work in turns, in one thread of this process, at temperature 1 with prepared noise.
Before it is measured, a form runs one forward untimed: its weights are then in the caches, as in a process that only
drafts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from dendro.shapes import TreeShape
from dendro.shelf import Arrays
from dendro.text import Sampling
from dendro.tree import DraftTree

from cluster.bench.allocations import held_bytes, peak_bytes
from cluster.bench.drafter_forms import DRAFT_PARTS, EAGER, FUSED, DrafterForms, InlineDrafter, TimedDraft
from cluster.demo.prompts import Prompt
from cluster.measure.in_process import EngineText
from cluster.measure.measurement import Step
from cluster.measure.report import aim_row
from cluster.measure.statistics import Estimate, median_estimate, paired_ratio
from drafter_service.models import DrafterModel
from drafter_service.models.memory import DrafterMemory
from drafter_service.plan import DraftPlan, Level

MAMBA2, MAMBA, LLAMA = "mamba2", "mamba", "llama"
DRAFTERS = (MAMBA2, MAMBA, LLAMA)
"""Folders of the demo's drafters."""
LEVELS = TreeShape.parse("(4,3,1)")
LEVEL_ROWS = (1, 4, 12)
"""Rows of the first levels of LEVELS that go through the model."""
STEP_ROWS = 1
"""Rows of the level that is measured at texts of different lengths."""
CHAIN, TREE, BEAM, DYNAMIC = "(1,1,1,1)", "(3,2,1)", "beam(5,3)", "dynamic(4,5,15)"
SHAPES = (CHAIN, TREE, BEAM, DYNAMIC)
ACCEPTED = 2
"""The most guesses by which a text grows between two of its drafts; a token of the corpus follows them."""
WHOLE = "whole"
LAYERS, LOGITS, RANKING = "layers", "logits", "ranking"
LEVEL_PARTS = (LAYERS, LOGITS, RANKING)
COPIES = 2
"""Texts over whose number the measured bytes of a text are averaged."""

LEVEL_BARS = {MAMBA2: {1: 7.0, 4: 6.0, 12: 3.3}, MAMBA: {1: 4.5, 4: 3.8, 12: 2.2}}
"""By how many times FUSED computes a level sooner than EAGER, by drafter and rows."""
DRAFT_BARS = {MAMBA2: {CHAIN: 6.0, TREE: 6.0, BEAM: 5.0, DYNAMIC: 5.0}}
"""By how many times FUSED drafts a tree sooner than EAGER, by drafter and shape."""


class PartTimes:
    """Seconds of a thing and of its parts, by form. Values of the same index were measured next to each other."""

    def __init__(self, forms: Iterable[str], parts: Iterable[str]) -> None:
        self.forms = tuple(forms)
        self.seconds: dict[str, dict[str, list[float]]] = {
            part: {form: [] for form in self.forms} for part in (WHOLE, *parts)
        }

    def add(self, form: str, seconds: Mapping[str, float]) -> None:
        """seconds: by part, WHOLE included"""
        for part, took in seconds.items():
            self.seconds[part][form].append(took)

    def over(self, form: str) -> Estimate:
        """The paired ratio of EAGER's time to this form's."""
        eager, other = (
            {(index, 0): took for index, took in enumerate(self.seconds[WHOLE][each])} for each in (EAGER, form)
        )
        return paired_ratio(eager, other)

    def as_row(self) -> dict[str, Any]:
        """The fields of a report's row."""
        return {
            "ms": {
                form: median_estimate([1e3 * took for took in values]).as_json()
                for form, values in self.seconds[WHOLE].items()
            },
            "parts_ms": {
                form: {
                    part: round(1e3 * median(found[form]), 4) for part, found in self.seconds.items() if part != WHOLE
                }
                for form in self.forms
            },
            "eager_over": {form: self.over(form).as_json() for form in self.forms if form != EAGER},
        }


Measured = tuple[PartTimes, str, dict[str, float]]
"""Where a measurement belongs, its form, and its seconds by part."""


def in_turns(forms: Iterable[str], order: random.Random) -> list[str]:
    """The forms in random order: caches depend on what ran before, so no form always follows the same one."""
    listed = list(forms)
    return order.sample(listed, len(listed))


class LevelCase:
    """A drafter at one text, and levels of a tree below it, in every form."""

    def __init__(self, forms: DrafterForms, ids: Sequence[int], measured: Sequence[int] = LEVEL_ROWS) -> None:
        """measured: rows of the measured levels, among LEVEL_ROWS"""
        self.name, self.context = forms.name, len(ids)
        self.times = {rows: PartTimes(forms.models, LEVEL_PARTS) for rows in measured}
        self.text_bytes: dict[str, int] = {}  # by form: what a text slot may take at this length
        self.held_bytes: dict[str, int] = {}  # by form: tensors that a memory was measured to hold for a text
        self.step_bytes: dict[str, int] = {}  # by form: peak of the tensors of a forward of one row
        self._drafters: dict[str, InlineDrafter] = {}
        self._plans: dict[str, dict[int, DraftPlan]] = {}  # form -> rows -> plan
        for form, model in forms.models.items():
            self._drafters[form] = drafter = InlineDrafter(model, 1, by_level=True)
            text = EngineText(ids, Sampling(temperature=1.0))
            session, memory = drafter.open(text), drafter.runner.memory
            self.text_bytes[form] = memory.text_bytes(len(ids))
            self.held_bytes[form] = held_by_text(model, memory.save(session.slot, session.covers))
            levels = drafter.draft([text], LEVELS).plans[: len(LEVEL_ROWS)]
            self._plans[form] = dict(zip(LEVEL_ROWS, levels, strict=True))
            assert [plan.rows.count for plan in levels] == list(LEVEL_ROWS)
            with torch.inference_mode():
                self.step_bytes[form] = peak_bytes(partial(drafter.runner.run, levels[0]))

    def measure(self, order: random.Random) -> Iterator[Measured]:
        """Run every level in every form, untimed, timed, and by its parts."""
        for rows, times in self.times.items():
            for form in in_turns(times.forms, order):
                plan, runner = self._plans[form][rows], self._drafters[form].runner
                assert isinstance(plan.rows, Level)
                runner.run(plan)
                clock = [time.perf_counter()]
                runner.run(plan)
                clock.append(time.perf_counter())
                hidden = runner.memory.level(plan.rows)
                clock.append(time.perf_counter())
                runner.model.logits(hidden)
                clock.append(time.perf_counter())
                whole, layers, logits = (after - before for before, after in pairwise(clock))
                seconds = {WHOLE: whole, LAYERS: layers, LOGITS: logits, RANKING: whole - layers - logits}
                yield times, form, seconds


def held_by_text(model: DrafterModel, saved: Arrays) -> int:
    """Bytes of the tensors that a memory holds for each text of this saved state."""

    def memory_of(texts: int) -> DrafterMemory:
        memory = model.memory(1 + texts, 2)
        for slot in range(1, 1 + texts):
            memory.load(slot, saved)
        return memory

    with torch.inference_mode():
        return (held_bytes(partial(memory_of, 1 + COPIES)) - held_bytes(partial(memory_of, 1))) // COPIES


def accepted_path(tree: DraftTree) -> list[int]:
    """The tokens of the path of best guesses, at most ACCEPTED."""
    tokens, row = list[int](), 0
    while len(tokens) < ACCEPTED and (below := tree.children(row)):
        row = below[0]
        tokens.append(int(tree.tokens[row]))
    return tokens


def same_tree(one: DraftTree, other: DraftTree) -> bool:
    """Whether both have the same tokens under the same parents."""
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.parents, other.parents)


class DraftCase:
    """Drafts of one shape for one or more texts at once, in every form."""

    def __init__(self, forms: DrafterForms, shape: str, prompts: Sequence[Prompt]) -> None:
        """prompts: one for each session"""
        self.name, self.shape = forms.name, TreeShape.parse(shape)
        self.times = PartTimes(forms.models, DRAFT_PARTS)
        self.trees = 0
        self.equal = {form: 0 for form in forms.models if form != EAGER}  # trees that are the same as EAGER's
        self._prompts, self._rounds = prompts, 0
        self._texts = [
            EngineText(each.token_ids, Sampling(temperature=1.0, seed=seed)) for seed, each in enumerate(prompts)
        ]
        self._drafters = {form: InlineDrafter(model, len(prompts)) for form, model in forms.models.items()}
        for drafter in self._drafters.values():
            for text in self._texts:
                drafter.open(text)

    @property
    def sessions(self) -> int:
        return len(self._prompts)

    def measure(self, order: random.Random) -> Iterator[Measured]:
        """Draft once in every form; then every text grows by guesses of EAGER's tree and a token of the corpus."""
        drafts: dict[str, TimedDraft] = {}
        for form in in_turns(self.times.forms, order):
            drafts[form] = draft = self._drafters[form].draft(self._texts, self.shape)
            yield self.times, form, {WHOLE: draft.seconds, **draft.parts}
        trees = drafts[EAGER].trees
        self.trees += len(trees)
        for form in self.equal:
            self.equal[form] += sum(map(same_tree, drafts[form].trees, trees))
        for text, tree, prompt in zip(self._texts, trees, self._prompts, strict=True):
            following = prompt.continuation_ids[self._rounds % len(prompt.continuation_ids)]
            text.text.extend([*accepted_path(tree), following])
        self._rounds += 1


class MeasuredCase(Protocol):
    """What is measured in turns with others."""

    def measure(self, order: random.Random) -> Iterator[Measured]: ...


def measure_in_turns(cases: Sequence[MeasuredCase], repetitions: int, step: Step) -> None:
    """Measure all cases in turns, after a warm-up of each."""
    order = random.Random(0)
    with torch.inference_mode():
        for repetition in range(repetitions + 1):
            for case in cases:
                for times, form, seconds in case.measure(order):
                    if repetition:
                        times.add(form, seconds)
            step()


# The report's rows
def level_rows(cases: Sequence[LevelCase]) -> list[dict[str, Any]]:
    """One object per drafter, length and level."""
    return [
        {"drafter": case.name, "context": case.context, "rows": rows, **times.as_row()}
        for case in cases
        for rows, times in case.times.items()
    ]


def memory_rows(cases: Sequence[LevelCase], weights: Mapping[str, int]) -> list[dict[str, Any]]:
    """One object per drafter, length and form. weights: bytes of a drafter's weights"""
    return [
        {
            "drafter": case.name,
            "context": case.context,
            "form": form,
            "weights_bytes": weights[case.name],
            "slot_bytes": case.text_bytes[form],
            "text_bytes": case.held_bytes[form],
            "step_bytes": case.step_bytes[form],
            "total_bytes": weights[case.name] + case.held_bytes[form] + case.step_bytes[form],
        }
        for case in cases
        for form in case.held_bytes
    ]


def draft_rows(cases: Sequence[DraftCase]) -> list[dict[str, Any]]:
    """One object per drafter, shape and number of sessions."""
    return [
        {
            "drafter": case.name,
            "shape": str(case.shape),
            "sessions": case.sessions,
            "trees": case.trees,
            "equal_trees": dict(case.equal),
            **case.times.as_row(),
        }
        for case in cases
    ]


def drafter_aims(
    levels: Sequence[Mapping[str, Any]], drafts: Sequence[Mapping[str, Any]], missing: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The aims, judged by the lower ends of the intervals.

    missing: drafter -> why it has no form FUSED
    """
    wanted: list[tuple[str, str, float, Mapping[str, Any] | None]] = []
    for drafter, by_rows in LEVEL_BARS.items():
        for rows, bar in by_rows.items():
            found = next((row for row in levels if (row["drafter"], row["rows"]) == (drafter, rows)), None)
            wanted.append((drafter, f"a level of {rows} row{'s' * (rows > 1)}", bar, found))
    for drafter, by_shape in DRAFT_BARS.items():
        for shape, bar in by_shape.items():
            found = next((row for row in drafts if (row["drafter"], row["shape"]) == (drafter, shape)), None)
            wanted.append((drafter, f"a draft of {shape}", bar, found))
    aims = []
    for drafter, thing, bar, row in wanted:
        aim, ratio = f"{drafter}, {thing}: {EAGER} over {FUSED}, at least", (row or {}).get("eager_over", {}).get(FUSED)
        if ratio is None:
            aims.append(aim_row(aim, bar, None, None, missing.get(drafter, "was not measured")))
        else:
            estimate = Estimate.of(ratio)
            aims.append(aim_row(aim, bar, estimate.low >= bar, estimate, judged="low"))
    return aims
