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
from pathlib import Path
from typing import Any

from dendro.client import Asking, AsyncClient
from dendro.errors import BadRequest, EngineFailed

from cluster.arms import OFF_ARM, Arm
from cluster.config import Config, demo_models, pair_config
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.measure.bench import Bench, ReportTable, models, option, seed, temperatures
from cluster.measure.costly import costly_checkpoint
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Row
from cluster.measure.targets import MAMBA2_TARGET, parameter_count
from cluster.measure.turns import estimate, over
from cluster.running import running
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS

SHAPES = ("(1,1,1,1,1)", "(3,2,2,1,1)")
"""The chain and the tree of the paper."""
WARM_TOKENS = 8
TARGET, SHARED, LLAMA = "target", "mamba2", "llama"
"""Folders among the demo's models: the first target, the drafter of both, and a drafter of the first target alone."""
THREADS = 1
ROUTER = {"draft_timeout_ms": 30_000}


@dataclass(frozen=True, slots=True)
class TargetsOptions:
    prompts: int = option("Number of held-out prompts.", 8, 2, least=1)
    tokens: int = option("New tokens of every answer.", ANSWER_TOKENS, 16, least=2)
    temperatures: tuple[float, ...] = temperatures()
    costly: bool = option("Costly forms of both targets, of the same function.", False)
    local: bool = option("Engines in this process: no Ray, gRPC or Redis.", False)
    seed: int = seed()
    models: Path = models()


@dataclass(frozen=True, slots=True)
class Way:
    """How one target is asked: an arm, alone or beside the other targets' requests."""

    target: str
    arm: Arm
    temperature: float
    at_once: bool  # whether each other target has a request in the same way


@dataclass(frozen=True, slots=True)
class TargetsPlan:
    """What is measured."""

    drafters: dict[str, tuple[str, ...]]  # target -> drafters; the first drafter serves all targets
    prompts: tuple[tuple[int, ...], ...]
    tokens: int  # length of every answer
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
        """Number of answers of the whole measurement, after the warm-up."""
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
    tokens_per_second: float  # rate after the first round


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


def _row(way: Way, answers: Sequence[Measured], off: Sequence[Measured]) -> Row:
    rounds = sum(answer.rounds for answer in answers)
    rates, plain = ([answer.tokens_per_second for answer in each] for each in (answers, off))
    return {
        "target": way.target,
        "drafter": way.arm.maker,
        "shape": str(way.arm.shape),
        "temperature": way.temperature,
        "load": "a request at each target at once" if way.at_once else "one request at a time",
        "rounds": rounds,
        "late_drafts": sum(answer.late for answer in answers),
        "emitted_per_round": round(sum(answer.emitted for answer in answers) / rounds, 4),
        "tokens_per_second": estimate(rates),
        "over_off": over(rates, plain),
    }


def targets_config(models: Path, costly: bool) -> Config:
    """Both demo targets, the drafter of both, and the Llama that was distilled from the first target, where present.

    The prefix cache is off and there are no proposers, so that no way gains from the answers before it. Rounds wait for
    their trees, however long these take: a late tree would count as one of the drafter's.
    """
    models = demo_models(models)
    drafters = [models / name for name in (SHARED, LLAMA) if (models / name / "config.json").exists()]
    if not drafters or drafters[0].name != SHARED:
        raise BadRequest("models", f"{models / SHARED} holds no checkpoint: one drafter of both targets is needed")
    config = pair_config(models / TARGET, drafters, threads=THREADS, speculation={"proposers": []}, router=ROUTER)
    (served,) = config.targets.values()
    targets = {}
    for name in (TARGET, MAMBA2_TARGET):
        checkpoint = costly_checkpoint(models / name) if costly else models / name
        targets[name] = served.model_copy(update={"checkpoint": checkpoint, "share_prefixes": False})
    own = {
        name: drafter if name == SHARED else drafter.model_copy(update={"targets": (TARGET,)})
        for name, drafter in config.drafters.items()
    }
    return config.model_copy(update={"targets": targets, "drafters": own})


async def measure(options: TargetsOptions, begin: Begin) -> dict[str, Any]:
    config = targets_config(options.models, options.costly)
    prompts = held_out_prompts(options.prompts, PROMPT_TOKENS, load_tokenizer(options.models), options.models)
    plan = TargetsPlan(
        {name: config.drafters_of(name) for name in config.targets},
        tuple(prompt.token_ids for prompt in prompts),
        options.tokens,
        options.temperatures,
        options.seed,
    )
    batches = sum(len(plan.batches(temperature)) for temperature in plan.temperatures)
    async with running(config, options.local) as address, AsyncClient(address, proxy=False) as client:
        warm, step = begin("warm-up", batches), begin("measuring", plan.answers)
        result = await measure_targets(plan, client, warm, step)
    parameters = {
        name: f"{parameter_count(each.checkpoint):,}" for name, each in (config.targets | config.drafters).items()
    }
    facts = {"parameters": parameters, "shared": plan.shared, "compared": result.compared}
    return {"plan": facts, "differences": result.differences, "rows": rows_of(plan, result)}


TARGETS = Bench(
    "targets",
    "One drafter for two targets, without training it again: tokens a round, and tokens a second over those without "
    "speculation, with a chain of five guesses and with a tree. The demo's Llama and Mamba-2 targets run in one "
    "cluster, with one pool of the drafter `mamba2` for both, and the Llama drafter that was distilled from the first "
    "target beside it. Exits with status 1 if speculation changed a token.",
    "Under a minute: few prompts, short answers.",
    TargetsOptions,
    measure,
    facts=(
        "Parameters of targets and drafters: {parameters}. {shared} serves all targets",
        f"Held-out prompts of {PROMPT_TOKENS} tokens; the ways in a random order on each prompt. Tokens a round count "
        "the target's own; tokens/s are medians of answers without their first round; over off is the median of ratios "
        "by prompt",
        "{compared} answers compared with those without speculation; those that differ would be listed below",
    ),
    tables=(
        ReportTable(
            "Temperature {temperature:g}, {load}",
            "rows",
            "target; drafter; shape; tokens a round = emitted_per_round:.2f; tokens/s (90 %) = tokens_per_second:.1f; "
            "over off (90 %) = over_off:.2f; late drafts = late_drafts",
        ),
    ),
    threads=THREADS,
    code=("verifier_service", "drafter_service", "cluster/router"),
)
bench_targets = TARGETS.command()
