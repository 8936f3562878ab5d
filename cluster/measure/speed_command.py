"""`dendro bench speed`: start our cluster and the library, measure both, report."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from dendro.client import AsyncClient
from dendro.errors import BadRequest, EngineFailed

from cluster.command_options import JsonFile, Local, given_config
from cluster.config import DEMO_MODELS, Config
from cluster.engines import engine_environment
from cluster.measure.baselines import BaselineProcess
from cluster.measure.llama_cpp import LlamaCppProcess
from cluster.measure.machine import report_head
from cluster.measure.measurement import BASELINES, LLAMA_CPP, LLAMA_CPP_ROWS, Begin
from cluster.measure.options import (
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
from cluster.measure.ours import ClusterClient, TenantRule
from cluster.measure.speed import (
    Contenders,
    SpeedResult,
    answer_lengths,
    check_and_warm,
    cost_model_of,
    measure,
    rows_of,
    step_fits_of,
)
from cluster.measure.speed_aims import aims_of, never_slower_aims
from cluster.measure.speed_categories import categories_of
from cluster.measure.speed_pairs import MeasuredPair, SpeedSettings, demo_pairs, file_pairs
from cluster.measure.speed_report import different, facts_of, tables_of
from cluster.measure.speed_report import plot as draw
from cluster.measure.targets import COSTLY, MAMBA2, Which, parameter_count
from cluster.prompt_files import QUESTIONS, PromptFile
from cluster.running import running
from cluster.training.acceptance import ANSWER_TOKENS

CHECKED_PROMPTS = 2  # answered in every way before timing starts; 1 if there are fewer than 4
PROMPTS = Default(16, quick=2)
TOKENS = Default(ANSWER_TOKENS, quick=16)
REPETITIONS = Default(2, quick=1)
TARGETS = Default(Which.BOTH, quick=Which.COSTLY)


@asynccontextmanager
async def contenders_for(pair: MeasuredPair, local: bool) -> AsyncIterator[Contenders]:
    """Start our cluster, the library and llama.cpp for one target; all stop at the end. Of the others, one that cannot
    be started leaves out its rows alone."""
    target, rows = pair.target, pair.plan.baselines
    library = exported = own_file = None
    if set(rows) & set(BASELINES):
        quiet = engine_environment(target.threads) | {"TQDM_DISABLE": "1"}  # no bars of weights that are unpacked
        library = BaselineProcess(target.checkpoint, pair.assistant, target.dtype, target.threads, quiet)
    llama = partial(LlamaCppProcess, target.checkpoint, target.dtype, target.threads, pair.positions)
    try:
        async with (
            AsyncExitStack() as stack,
            running(pair.config, local) as address,
            AsyncClient(address, proxy=False) as client,
        ):
            if library is not None:
                await stack.enter_async_context(library)
            left_out: dict[str, str] = {}

            async def started(process: LlamaCppProcess) -> LlamaCppProcess | None:
                try:
                    return await stack.enter_async_context(process)
                except EngineFailed as error:
                    left_out.update(dict.fromkeys(process.rows, str(error)))
                    return None

            if set(rows) & set(LLAMA_CPP_ROWS):
                exported = await started(llama())
            if pair.own_file is not None:
                own_file = await started(llama(pair.own_file))
            some = exported or own_file
            facts = some.facts if some else {}
            yield Contenders(library, ClusterClient(client, pair.rule), exported, own_file, facts, left_out)
    finally:
        if library is not None:
            library.stop()


async def measure_pair(
    pair: MeasuredPair, local: bool, started: float, progress: Begin
) -> tuple[SpeedResult, dict[str, Any]]:
    """The measurement of one target, and its part of the report."""
    plan, name = pair.plan, pair.plan.target
    async with contenders_for(pair, local) as contenders:
        checked = min(CHECKED_PROMPTS, max(len(plan.prompts) // 2, 1))
        if plan.chosen_rows:
            await contenders.choose(
                plan, progress(f"{name} target: the library's best settings", plan.choosing_answers)
            )
        if pair.to_end:
            step = progress(f"{name} target: where answers end", plan.answers_of_row)
            plan = replace(plan, lengths=await answer_lengths(plan, contenders.ours, step))
        step = progress(f"{name} target: check and warm-up", checked * plan.answers_of_prompt)
        identity = await check_and_warm(plan, contenders, checked, step)
        remaining_s = pair.until_s - (time.monotonic() - started)
        measured = await measure(plan, contenders, remaining_s, progress(f"{name} target: measuring", plan.answers))
        best = [{"row": row, "temperature": at, "setting": each} for (row, at), each in contenders.best.items()]
        llama_cpp = {"facts": contenders.llama_facts, "left_out": contenders.left_out}
    measured.identity.add(identity)
    return measured, {
        "parameters": parameter_count(pair.target.checkpoint),
        "dtype": pair.target.dtype,
        "drafter": ", ".join(pair.config.drafters) or "none",
        "prompts": len(plan.prompts),
        "prompt_tokens": max(map(len, plan.prompts)),
        "repetitions": plan.repetitions,
        "note": measured.note,
        "identity": measured.identity.as_json(),
        "best_settings": best,
        "llama_cpp": llama_cpp,
        **pair.facts,
    }


async def run_speed(pairs: Sequence[MeasuredPair], settings: SpeedSettings, progress: Begin) -> dict[str, Any]:
    """Run the whole measurement; returns the report. `progress(title, steps)` begins a bar and returns its step."""
    started = time.monotonic()
    load_average = round(os.getloadavg()[0], 2)
    results, targets = [], {}
    for pair in pairs:
        measured, targets[pair.plan.target] = await measure_pair(pair, settings.local, started, progress)
        results.append(measured)
    rows = [row for measured in results for row in rows_of(measured)]
    threads = pairs[0].target.threads
    report = {
        **report_head("speed", started, settings.local, settings.seed, threads),
        "load_average": load_average,
        "targets": targets,
        "rows": rows,
        "categories": [row for measured in results for row in categories_of(measured)],
    }
    if pairs[0].to_end:
        return report | {"cost_model": [], "step_fits": [], "aims": list(never_slower_aims(rows))}
    without_llama = targets[COSTLY]["llama_cpp"]["left_out"].get(LLAMA_CPP, "") if COSTLY in targets else ""
    aims = aims_of(rows, threads, report["machine"]["accelerator"], without_llama=without_llama)
    return report | {
        "cost_model": list(cost_model_of(rows)),
        "step_fits": list(step_fits_of(rows)),
        "aims": aims if list(targets) != [MAMBA2] else [],
    }


def bench_speed(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[CONFIG]...",
            help="YAML files of clusters whose first targets are measured with the prompts of a file. Default: the "
            "bundled demo.",
            show_default=False,
        ),
    ] = None,
    prompt_file: PromptFile = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: few prompts, short answers, one target.")
    ] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    prompts: Annotated[int | None, PROMPTS.option("Number of prompts, the same of each category.", least=1)] = None,
    tokens: Annotated[
        int | None, TOKENS.option("New tokens of every answer; the most of those after prompts of a file.", least=1)
    ] = None,
    repetitions: Annotated[
        int | None, REPETITIONS.option("Repetitions of each prompt at each temperature.", least=1)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="With CONFIG the name of its target; else demo, costly, both or mamba2: the costly form of the demo's "
            "Mamba-2 target. (default both; quick costly)",
            show_default=False,
        ),
    ] = None,
    tenants: Annotated[
        str,
        typer.Option(
            help="With prompts of a file: answers, each of a tenant of its own, as of strangers; rows, all of a row of "
            "one tenant, from whose answers routers learn; or both, separated by a comma."
        ),
    ] = TenantRule.ANSWERS.value,
    alone: Annotated[
        bool, typer.Option("--alone", help="Without transformers and llama.cpp; with prompts of a file.")
    ] = False,
    no_arms: Annotated[
        bool, typer.Option("--no-arms", help="Without the fixed arms: off and the policy; with prompts of a file.")
    ] = False,
    temperatures: Temperatures = "0,1",
    local: Local = False,
    seed: Annotated[int, seed_option("the order and of sampling")] = 0,
    models: Models = DEMO_MODELS,
) -> None:
    """Compare speeds: transformers' generate, its prompt lookup and its assisted generation, with the library's
    defaults and with the best of three settings, chosen on other prompts; llama.cpp, plain and with prompt lookup,
    where the extra `llama` is installed; ours without speculation, with each configured shape and with the policy. All
    in one run, interleaved. Exits with status 1 if ours answered differently with speculation than without.

    Without CONFIG and --prompt-file: on the demo target and on a costly one of the same function. With them: on a
    target of your own after prompts of your own, by default some questions of this package; beside it the library's
    defaults, and llama.cpp with the same weights and with the target's GGUF file as it is.
    """
    settings = SpeedSettings(
        prompts=PROMPTS.chosen(prompts, quick),
        tokens=TOKENS.chosen(tokens, quick),
        repetitions=REPETITIONS.chosen(repetitions, quick),
        temperatures=parse_temperatures(temperatures),
        local=local,
        seed=seed,
    )
    if configs or prompt_file is not None:
        pairs = file_pairs(
            _labelled(configs or [], target or ""),
            target or "",
            prompt_file or QUESTIONS,
            parse_tenants(tenants),
            alone,
            settings,
            no_arms,
        )
    else:
        if alone or no_arms or tenants != TenantRule.ANSWERS:
            named = "alone" if alone else "no-arms" if no_arms else "tenants"
            raise BadRequest(named, "has an effect with CONFIG or --prompt-file alone")
        pairs = demo_pairs(_bundled(target, quick).names, settings, models)
    report = with_bars(lambda begin: asyncio.run(run_speed(pairs, settings, begin)))
    found = different(report)
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw, differences=found)


def parse_tenants(text: str) -> tuple[TenantRule, ...]:
    """Parse `answers,rows`: distinct ones."""
    parts = text.split(",")
    if len(set(parts)) != len(parts) or not set(parts) <= {each.value for each in TenantRule}:
        raise BadRequest("tenants", f"{text!r} is not answers, rows, or both with a comma between them")
    return tuple(map(TenantRule, parts))


def _bundled(target: str | None, quick: bool) -> Which:
    try:
        return TARGETS.chosen(None if target is None else Which(target), quick)
    except ValueError:
        raise BadRequest("target", f"{target!r} is not one of {', '.join(Which)}; with CONFIG, name its own") from None


def _labelled(paths: Sequence[Path], target: str) -> dict[str, Config]:
    """The configurations by their names in the report: of one, the target's; of several, their files'."""
    if len(paths) < 2:
        config = given_config(paths[0] if paths else None)
        return {config.target_named(target): config}
    labels = {path.stem: Config.load(path) for path in paths}
    if len(labels) < len(paths):
        raise BadRequest("config", "two files have the same name; the report could not tell them apart")
    return labels
