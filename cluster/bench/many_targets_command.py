"""`dendro bench targets`: start one cluster of two targets and their drafters, measure, report."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from dendro.client import AsyncClient
from dendro.errors import BadRequest

from cluster.bench.many_targets import TargetsPlan, measure_targets, rows_of
from cluster.bench.many_targets_report import facts_of, tables_of
from cluster.command_options import JsonFile, Local
from cluster.config import DEMO_MODELS, Config, demo_models, pair_config
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.measure.costly import costly_checkpoint
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import (
    Default,
    MarkdownFile,
    Models,
    Temperatures,
    parse_temperatures,
    present,
    seed_option,
    with_bars,
)
from cluster.measure.targets import MAMBA2_TARGET, parameter_count
from cluster.running import running
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS

TARGET, SHARED, LLAMA = "target", "mamba2", "llama"
"""Folders among the demo's models: the first target, the drafter of both, and a drafter of the first target alone."""
PROMPTS = Default(8, quick=2)
TOKENS = Default(ANSWER_TOKENS, quick=16)
THREADS = 1
ROUTER = {"draft_timeout_ms": 30_000}


@dataclass(frozen=True, slots=True)
class TargetsSettings:
    """The options of a run."""

    prompts: int
    tokens: int
    temperatures: tuple[float, ...]
    costly: bool
    local: bool
    seed: int
    models: Path


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


async def run_targets(settings: TargetsSettings, begin: Begin) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started = time.monotonic()
    config = targets_config(settings.models, settings.costly)
    tokenizer = load_tokenizer(settings.models)
    prompts = held_out_prompts(settings.prompts, PROMPT_TOKENS, tokenizer, settings.models)
    plan = TargetsPlan(
        {name: config.drafters_of(name) for name in config.targets},
        tuple(prompt.token_ids for prompt in prompts),
        settings.tokens,
        settings.temperatures,
        settings.seed,
    )
    batches = sum(len(plan.batches(temperature)) for temperature in plan.temperatures)
    async with running(config, settings.local) as address, AsyncClient(address, proxy=False) as client:
        warm, step = begin("warm-up", batches), begin("measuring", plan.answers)
        result = await measure_targets(plan, client, warm, step)
    return {
        **report_head("targets", started, settings.local, settings.seed, THREADS),
        "targets": {
            name: {"parameters": parameter_count(target.checkpoint), "dtype": target.dtype}
            for name, target in config.targets.items()
        },
        "drafters": {
            name: {
                "parameters": parameter_count(drafter.checkpoint),
                "targets": [target for target in config.targets if name in config.drafters_of(target)],
            }
            for name, drafter in config.drafters.items()
        },
        "shared_drafter": plan.shared,
        "prompts": len(plan.prompts),
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": plan.tokens,
        "identity": {"answers_compared": result.compared, "differences": result.differences},
        "rows": rows_of(plan, result),
        "aims": [],
    }


def bench_targets(
    quick: Annotated[bool, typer.Option("--quick", help="Under a minute: few prompts, short answers.")] = False,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    prompts: Annotated[int | None, PROMPTS.option("Number of held-out prompts.", least=1)] = None,
    tokens: Annotated[int | None, TOKENS.option("New tokens of every answer.", least=2)] = None,
    temperatures: Temperatures = "0,1",
    costly: Annotated[
        bool, typer.Option("--costly", help="Costly forms of both targets, of the same function.")
    ] = False,
    local: Local = False,
    seed: Annotated[int, seed_option("the order and of sampling")] = 0,
    models: Models = DEMO_MODELS,
) -> None:
    """One drafter for two targets, without training it again: tokens a round, and tokens a second over those without
    speculation, with a chain of five guesses and with a tree.

    The demo's Llama and Mamba-2 targets run in one cluster, with one pool of the drafter `mamba2` for both, and the
    Llama drafter that was distilled from the first target beside it. Each target is asked alone, then both at once.
    Exits with status 1 if speculation changed a token.
    """
    settings = TargetsSettings(
        PROMPTS.chosen(prompts, quick),
        TOKENS.chosen(tokens, quick),
        parse_temperatures(temperatures),
        costly,
        local,
        seed,
        models,
    )
    report = with_bars(lambda begin: asyncio.run(run_targets(settings, begin)))
    present(report, facts_of(report), tables_of(report), json, markdown, differences=report["identity"]["differences"])
