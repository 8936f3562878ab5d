"""`dendro bench targets`: one drafter for several targets, in one cluster, without training it again.

Table 3 of the Mamba-drafters paper (tokens a round and tokens a second of one drafter at another target than its own),
with a chain of five guesses and a tree. Each target is asked alone, and both at once, when the drafter's pool batches
the texts of both.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dendro.client import Asking
from dendro.errors import EngineFailed

from cluster.arms import OFF_ARM, Arm
from cluster.measure.measurement import Step
from cluster.measure.report import Row
from cluster.measure.statistics import median_estimate

SHAPES = ("(1,1,1,1,1)", "(3,2,2,1,1)")
"""The chain and the tree of the paper."""
WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Way:
    """How one target is asked: an arm, alone or beside the other targets' requests."""

    target: str
    arm: Arm
    temperature: float
    at_once: bool  # beside a request in the same way at each other target


@dataclass(frozen=True, slots=True)
class TargetsPlan:
    """What is measured."""

    drafters: dict[str, tuple[str, ...]]  # by target; the first serves all targets
    prompts: tuple[tuple[int, ...], ...]
    tokens: int  # of every answer
    temperatures: tuple[float, ...]
    seed: int

    @property
    def shared(self) -> str:
        """The drafter that serves all targets."""
        return next(iter(self.drafters.values()))[0]

    def arms(self, target: str, at_once: bool) -> tuple[Arm, ...]:
        drafters = (self.shared,) if at_once else self.drafters[target]
        return (OFF_ARM, *(Arm.parse(f"{drafter}:{shape}") for drafter in drafters for shape in SHAPES))

    def batches(self, temperature: float) -> list[tuple[Way, ...]]:
        """The ways whose requests run at once: each alone, and the shared drafter's at all targets."""
        alone = [
            (Way(target, arm, temperature, False),) for target in self.drafters for arm in self.arms(target, False)
        ]
        together = [
            tuple(Way(target, arm, temperature, True) for target in self.drafters)
            for arm in self.arms(next(iter(self.drafters)), True)
        ]
        return alone + together

    @property
    def answers(self) -> int:
        """Of the whole measurement, after the warm-up."""
        return len(self.prompts) * sum(len(batch) for each in self.temperatures for batch in self.batches(each))

    def answer_seed(self, prompt: int) -> int:
        """One seed for all ways of a prompt, as their tokens must be the same."""
        return self.seed * 1_000_003 + prompt


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer."""

    tokens: tuple[int, ...]
    rounds: int
    emitted: int
    late: int  # rounds whose tree did not come
    tokens_per_second: float  # after the first round


@dataclass(slots=True)
class TargetsResult:
    """All answers by way, in the order of the prompts; and the answers that speculation changed."""

    answers: defaultdict[Way, list[Measured]] = field(default_factory=lambda: defaultdict(list))
    differences: list[str] = field(default_factory=list)
    compared: int = 0


async def measure_targets(plan: TargetsPlan, client: Asking, warm: Step, step: Step) -> TargetsResult:
    """Every way on every prompt, in a random order by the seed."""
    result = TargetsResult()
    for temperature in plan.temperatures:
        for batch in plan.batches(temperature):
            await asyncio.gather(*(_answer(plan, client, way, 0, WARM_TOKENS) for way in batch))
            warm()
    for number in range(len(plan.prompts)):
        for temperature in plan.temperatures:
            batches = plan.batches(temperature)
            random.Random(f"{plan.seed}/{temperature}/{number}").shuffle(batches)
            for batch in batches:
                found = await asyncio.gather(*(_answer(plan, client, way, number, plan.tokens) for way in batch))
                for way, measured in zip(batch, found, strict=True):
                    result.answers[way].append(measured)
                    step()
            _compare(plan, result, temperature, number)
    return result


async def _answer(plan: TargetsPlan, client: Asking, way: Way, number: int, tokens: int) -> Measured:
    done = await client.generate_text(
        plan.prompts[number],
        model=way.target,
        temperature=way.temperature,
        seed=plan.answer_seed(number),
        max_new_tokens=tokens,
        ignore_end=True,
        speculation=str(way.arm),
    )
    if len(done.token_ids) != tokens:
        raise EngineFailed(f"{way.target}, {way.arm}: {len(done.token_ids)} tokens instead of {tokens}")
    stats = done.complete.speculation
    return Measured(done.token_ids, stats.rounds, stats.emitted_tokens, stats.late_drafts, stats.tokens_per_s)


def _compare(plan: TargetsPlan, result: TargetsResult, temperature: float, number: int) -> None:
    """Note answers to one prompt that differ from the target's own without speculation."""
    for target in plan.drafters:
        plain = result.answers[Way(target, OFF_ARM, temperature, False)][number].tokens
        for way, answers in result.answers.items():
            if (way.target, way.temperature) == (target, temperature):
                result.compared += 1
                if answers[number].tokens != plain:
                    where = f"{target}, {way.arm}, temperature {temperature:g}, prompt {number + 1}"
                    result.differences.append(f"{where}: other tokens than `off`")


def rows_of(plan: TargetsPlan, result: TargetsResult) -> list[Row]:
    """A row for each way."""
    rows: list[Row] = []
    for temperature in plan.temperatures:
        for way in (way for batch in plan.batches(temperature) for way in batch):
            answers = result.answers[way]
            off = result.answers[Way(way.target, OFF_ARM, temperature, way.at_once)]
            rows.append(_row(way, answers, off))
    return rows


def _row(way: Way, answers: Sequence[Measured], off: Sequence[Measured]) -> dict[str, Any]:
    rounds = sum(answer.rounds for answer in answers)
    rates = [answer.tokens_per_second for answer in answers]
    ratios = [rate / plain.tokens_per_second for rate, plain in zip(rates, off, strict=True)]
    return {
        "target": way.target,
        "drafter": way.arm.maker,
        "shape": str(way.arm.shape),
        "temperature": way.temperature,
        "both_at_once": way.at_once,
        "answers": len(answers),
        "rounds": rounds,
        "late_drafts": sum(answer.late for answer in answers),
        "emitted_per_round": round(sum(answer.emitted for answer in answers) / rounds, 4),
        "tokens_per_second": median_estimate(rates).as_json(),
        "over_off": median_estimate(ratios).as_json(),
    }
