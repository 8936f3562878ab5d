"""`dendro bench verify`: answers in each verification mode, with trees of 1, 2 and 4 children."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from dendro.errors import BadRequest

from cluster.bench.verify import ARMS, ROOM, aims_of, arm_rows, measure_arms
from cluster.bench.verify_report import facts_of, tables_of
from cluster.bench.verify_report import plot as draw
from cluster.command_options import JsonFile
from cluster.config import DEMO_MODELS
from cluster.demo.kinds import KINDS, kind_prompts
from cluster.demo.prompts import load_tokenizer
from cluster.measure.in_process import DRAFTER_DTYPE, drafter_of, verifier_of
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import (
    KIND_PROMPTS,
    Default,
    KindsSettings,
    MarkdownFile,
    Models,
    PlotFile,
    parse_temperatures,
    present,
    seed_option,
    with_bars,
)
from cluster.measure.targets import DEMO, THREADS, parameter_count, target_config
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS

DRAFTER = "mamba2"
PROMPTS = Default(5, quick=1)
TOKENS = Default(ANSWER_TOKENS, quick=24)
REPETITIONS = Default(2, quick=1)
TEMPERATURES = Default("1,0.6", quick="1")


@dataclass(frozen=True, slots=True)
class VerifySettings(KindsSettings):
    """The options of a run."""

    def __post_init__(self) -> None:
        if 0 in self.temperatures:
            raise BadRequest("temperatures", "must be above 0: at 0 every mode is greedy")


async def run_verify(settings: VerifySettings, begin: Begin) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started = time.monotonic()
    torch.set_num_threads(THREADS)
    (target,) = target_config(settings.models, DEMO).targets.values()
    tokenizer, rows, aims = load_tokenizer(settings.models), [], []
    prompts = [
        prompt.token_ids
        for kind in KINDS
        for prompt in kind_prompts(kind, settings.prompts, PROMPT_TOKENS, tokenizer, settings.models)
    ]
    async with (
        verifier_of(DEMO, target, PROMPT_TOKENS + settings.tokens + ROOM) as verifier,
        drafter_of(settings.models / DRAFTER) as drafter,
    ):
        for temperature in settings.temperatures:
            step = begin(f"temperature {temperature:g}", len(prompts) * settings.repetitions * len(ARMS))
            sizes = settings.tokens, settings.repetitions, settings.seed
            found = await measure_arms(drafter, verifier, prompts, temperature, *sizes, step)
            rows += arm_rows(found, temperature)
            aims += aims_of(found, temperature)
    return {
        **report_head("verify", started, True, settings.seed, THREADS),
        "plan": {
            "target": DEMO,
            "parameters": parameter_count(target.checkpoint),
            "dtype": target.dtype,
            "drafter": DRAFTER,
            "drafter_dtype": DRAFTER_DTYPE,
            "kinds": list(KINDS),
            "prompts": settings.prompts,
            "prompt_tokens": PROMPT_TOKENS,
            "tokens": settings.tokens,
            "repetitions": settings.repetitions,
        },
        "rows": rows,
        "aims": aims,
    }


def bench_verify(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: one prompt of each kind, one short answer of each.")
    ] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    prompts: Annotated[int | None, PROMPTS.option(KIND_PROMPTS, least=1)] = None,
    tokens: Annotated[int | None, TOKENS.option("New tokens of every answer.", least=1)] = None,
    repetitions: Annotated[
        int | None, REPETITIONS.option("Answers to each prompt, with seeds of their own.", least=1)
    ] = None,
    temperatures: Annotated[str | None, TEMPERATURES.option("Sampling temperatures, separated by commas.")] = None,
    seed: Annotated[int, seed_option("sampling")] = 0,
    models: Models = DEMO_MODELS,
) -> None:
    """Compare verification modes on the demo pair: coupled, multi-step and naive sampling with trees of 1, 2 and 4
    children, and block verification of chains.

    Reports tokens emitted per round and tokens a second, paired by prompt and seed. The aims are what the papers found:
    block verification emits at least as much as trying guesses one by one; shared noise loses to multi-step sampling
    with chains, and wins against it and naive sampling with 4 children.
    """
    settings = VerifySettings(
        prompts=PROMPTS.chosen(prompts, quick),
        tokens=TOKENS.chosen(tokens, quick),
        repetitions=REPETITIONS.chosen(repetitions, quick),
        temperatures=parse_temperatures(TEMPERATURES.chosen(temperatures, quick)),
        seed=seed,
        models=models,
    )
    report = with_bars(lambda begin: asyncio.run(run_verify(settings, begin)))
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw)
