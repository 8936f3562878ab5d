"""`dendro bench speed`: start our cluster and the library, measure both, report."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from dendro.client import AsyncClient
from dendro.errors import BadRequest, EngineFailed

from cluster.bench.baselines import BaselineProcess
from cluster.bench.llama_cpp import LlamaCppProcess
from cluster.bench.machine import report_head
from cluster.bench.measurement import BASELINES, GENERATE, LLAMA_CPP, LLAMA_CPP_ROWS, Begin
from cluster.bench.options import (
    Default,
    MarkdownFile,
    Models,
    PlotFile,
    Temperatures,
    parse_temperatures,
    present,
    seed_option,
    with_bars,
)
from cluster.bench.ours import ClusterClient
from cluster.bench.speed import (
    Contenders,
    SpeedPlan,
    check_and_warm,
    cost_model_of,
    measure,
    rows_of,
    step_fits_of,
)
from cluster.bench.speed_aims import aims_of
from cluster.bench.speed_report import different, facts_of, tables_of
from cluster.bench.speed_report import plot as draw
from cluster.bench.targets import COSTLY, MAMBA2, THREADS, Which, parameter_count, target_config
from cluster.command_options import JsonFile, Local
from cluster.config import DEMO_MODELS, Config
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.engines import engine_environment
from cluster.running import running
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS

TIME_LIMIT_S = 1140.0  # of a whole run, startup and warm-up included: 19 minutes
COSTLY_SHARE = 0.7  # of the time limit, for the first of two targets
CHECKED_PROMPTS = 2  # answered in every way before timing starts; 1 if there are fewer than 4
PROMPTS = Default(16, quick=2)
TOKENS = Default(ANSWER_TOKENS, quick=16)
REPETITIONS = Default(2, quick=1)
CHOOSING_PROMPTS = 3  # beyond the measured ones, for the library's settings
TARGETS = Default(Which.BOTH, quick=Which.COSTLY)


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """The options of a run."""

    targets: tuple[str, ...]
    prompts: int
    tokens: int
    repetitions: int
    temperatures: tuple[float, ...]
    local: bool
    seed: int
    models: Path


@asynccontextmanager
async def contenders_for(config: Config, settings: SpeedSettings) -> AsyncIterator[Contenders]:
    """Start our cluster, the library and llama.cpp for one target; all stop at the end. A llama.cpp that cannot be
    started leaves out its rows alone."""
    (target,) = config.targets.values()
    assistant = settings.models / "llama"
    if not (assistant / "config.json").exists():
        raise BadRequest("models", f"{assistant} holds no checkpoint: assisted generation needs one")
    library = BaselineProcess(
        target.checkpoint, assistant, target.dtype, target.threads, engine_environment(target.threads)
    )
    llama_cpp = LlamaCppProcess(target.checkpoint, target.dtype, target.threads, PROMPT_TOKENS + settings.tokens)
    try:
        async with (
            AsyncExitStack() as stack,
            running(config, settings.local) as address,
            AsyncClient(address, proxy=False) as client,
            library,
        ):
            contenders = Contenders(library, ClusterClient(client))
            try:
                await stack.enter_async_context(llama_cpp)
                contenders = replace(contenders, llama_cpp=llama_cpp, llama_facts=llama_cpp.facts)
            except EngineFailed as error:
                contenders.left_out.update(dict.fromkeys(LLAMA_CPP_ROWS, str(error)))
            yield contenders
    finally:
        library.stop()


async def run_speed(settings: SpeedSettings, progress: Begin) -> dict[str, Any]:
    """Run the whole measurement; returns the report. `progress(title, steps)` begins a bar and returns its step."""
    started = time.monotonic()
    load_average = round(os.getloadavg()[0], 2)
    tokenizer = load_tokenizer(settings.models)
    texts = held_out_prompts(settings.prompts + CHOOSING_PROMPTS, PROMPT_TOKENS, tokenizer, settings.models)
    prompts, choosing = (
        tuple(prompt.token_ids for prompt in part) for part in (texts[:-CHOOSING_PROMPTS], texts[-CHOOSING_PROMPTS:])
    )
    rows: list[dict[str, Any]] = []
    targets: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(settings.targets):
        config = target_config(settings.models, name)
        (target,) = config.targets.values()
        shapes = tuple(str(arm.shape) for arm in config.arms_of(name) if not arm.off)
        plan = SpeedPlan(
            name,
            prompts,
            settings.tokens,
            settings.temperatures,
            settings.repetitions,
            shapes,
            # The library's others need a cache that can be cropped.
            (*(BASELINES if name != MAMBA2 else (GENERATE,)), *LLAMA_CPP_ROWS),
            settings.seed,
            choosing,
        )
        share = 1.0 if index == len(settings.targets) - 1 else COSTLY_SHARE
        async with contenders_for(config, settings) as contenders:
            checked = min(CHECKED_PROMPTS, max(len(prompts) // 2, 1))
            await contenders.choose(
                plan, progress(f"{name} target: the library's best settings", plan.choosing_answers)
            )
            step = progress(f"{name} target: check and warm-up", checked * plan.answers_of_prompt)
            identity = await check_and_warm(plan, contenders, checked, step)
            remaining_s = TIME_LIMIT_S * share - (time.monotonic() - started)
            measured = await measure(plan, contenders, remaining_s, progress(f"{name} target: measuring", plan.answers))
            best = [{"row": row, "temperature": at, "setting": each} for (row, at), each in contenders.best.items()]
            llama_cpp = {"facts": contenders.llama_facts, "left_out": contenders.left_out}
        measured.identity.add(identity)
        rows += rows_of(measured)
        targets[name] = {
            "parameters": parameter_count(target.checkpoint),
            "dtype": target.dtype,
            "drafter": ", ".join(config.drafters),
            "prompts": len(prompts),
            "prompt_tokens": PROMPT_TOKENS,
            "repetitions": plan.repetitions,
            "note": measured.note,
            "identity": measured.identity.as_json(),
            "best_settings": best,
            "llama_cpp": llama_cpp,
        }
    head = report_head("speed", started, settings.local, settings.seed, THREADS)
    without_llama = targets[COSTLY]["llama_cpp"]["left_out"].get(LLAMA_CPP, "") if COSTLY in targets else ""
    aims = aims_of(rows, THREADS, head["machine"]["accelerator"], without_llama=without_llama)
    return {
        **head,
        "load_average": load_average,
        "targets": targets,
        "rows": rows,
        "cost_model": list(cost_model_of(rows)),
        "step_fits": list(step_fits_of(rows)),
        "aims": aims if settings.targets != (MAMBA2,) else [],
    }


def bench_speed(
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: few prompts, short answers, one target.")
    ] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    prompts: Annotated[int | None, PROMPTS.option("Number of held-out prompts.", least=1)] = None,
    tokens: Annotated[int | None, TOKENS.option("New tokens of every answer.", least=1)] = None,
    repetitions: Annotated[
        int | None, REPETITIONS.option("Repetitions of each prompt at each temperature.", least=1)
    ] = None,
    target: Annotated[
        Which | None, TARGETS.option("What to measure; mamba2: the costly form of the demo's Mamba-2 target.")
    ] = None,
    temperatures: Temperatures = "0,1",
    local: Local = False,
    seed: Annotated[int, seed_option("the order and of sampling")] = 0,
    models: Models = DEMO_MODELS,
) -> None:
    """Compare speeds: transformers' generate, its prompt lookup and its assisted generation, with the library's
    defaults and with the best of three settings, chosen on other prompts; llama.cpp, plain and with prompt lookup, at
    temperature 0, where the extra `llama` is installed; ours without speculation, with each configured shape and with
    the policy. All in one run, interleaved, on the demo target and on a costly one of the same function. Exits with
    status 1 if ours answered differently with speculation than without.
    """
    settings = SpeedSettings(
        targets=TARGETS.chosen(target, quick).names,
        prompts=PROMPTS.chosen(prompts, quick),
        tokens=TOKENS.chosen(tokens, quick),
        repetitions=REPETITIONS.chosen(repetitions, quick),
        temperatures=parse_temperatures(temperatures),
        local=local,
        seed=seed,
        models=models,
    )
    report = with_bars(lambda begin: asyncio.run(run_speed(settings, begin)))
    found = different(report)
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw, differences=found)
