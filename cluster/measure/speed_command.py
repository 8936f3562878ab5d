"""`dendro bench speed`: its options, the pairs that it measures, and its report.

Of the bundled demo, prompts have one length and answers another. Of a user's configuration, prompts are those of a file
and answers end where the target ends them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from dendro.client import AsyncClient
from dendro.errors import BadRequest, EngineFailed
from tree_layers.checkpoint import GGUF

from cluster.command_options import given_config
from cluster.config import Config, TargetConfig
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.measure.baselines import library_process
from cluster.measure.bench import (
    Aim,
    Bench,
    Plot,
    ReportTable,
    judged_as,
    models,
    option,
    prompt_file,
    seed,
    temperatures,
)
from cluster.measure.llama_cpp import llama_cpp_process
from cluster.measure.measurement import (
    AUTO,
    BASELINES,
    GENERATE,
    LLAMA_CPP,
    LLAMA_CPP_FILE,
    LLAMA_CPP_ROWS,
    LOOKUP,
    OFF,
    Begin,
)
from cluster.measure.ours import ClusterClient, TenantRule
from cluster.measure.own_target import FIXED_ARM_BAR, NEVER_SLOWER, own_arms, own_prompts, own_target, prompt_facts
from cluster.measure.processes import ContenderProcess
from cluster.measure.speed import (
    OWN,
    Contenders,
    SpeedPlan,
    SpeedResult,
    answer_lengths,
    categories_of,
    measure,
    rows_of,
)
from cluster.measure.targets import COSTLY, MAMBA2, MEASURED, THREADS, target_config, target_facts
from cluster.prompt_files import QUESTIONS
from cluster.running import running
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS

TIME_LIMIT_S = 1140.0  # 19 minutes for a whole run on the demo, startup and warm-up included
COSTLY_SHARE = 0.7  # share of the time limit for the first of two targets
CHOOSING_PROMPTS = 3  # further prompts, on which the library's settings are chosen
CHECKED_PROMPTS = 2  # answered in every way before timing starts; 1 if there are fewer than 4
ASSISTANT = "llama"
"""The demo's drafter that the library can assist with."""


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    configs: tuple[Path, ...] = option(
        "YAML files of clusters whose first targets are measured with the prompts of a file. Default: the bundled "
        "demo.",
        (),
        argument=True,
        shown=False,
    )
    prompt_file: Path | None = prompt_file()
    prompts: int = option("Number of prompts, the same of each category.", 16, 2, least=1)
    tokens: int = option(
        "New tokens of every answer; the most of those after prompts of a file.", ANSWER_TOKENS, 16, least=1
    )
    repetitions: int = option("Repetitions of each prompt at each temperature.", 2, 1, least=1)
    target: str = option(
        "With CONFIG the name of its target; else demo, costly, both or mamba2: the costly form of the demo's Mamba-2 "
        "target. Default: both; quick: costly.",
        "",
        shown=False,
    )
    tenants: str = option(
        "With prompts of a file: answers, each of a tenant of its own, as of strangers; rows, all of a row of one "
        "tenant, from whose answers routers learn; or both, separated by a comma.",
        TenantRule.ANSWERS.value,
    )
    alone: bool = option("Without transformers and llama.cpp; with prompts of a file.", False)
    no_arms: bool = option("Without the fixed arms: off and the policy; with prompts of a file.", False)
    temperatures: tuple[float, ...] = temperatures()
    local: bool = option("Engines in this process: no Ray, gRPC or Redis.", False)
    seed: int = seed()
    models: Path = models()
    quick: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A target with its drafters and the plan of its measurement, under the plan's name for the target."""

    config: Config  # a configuration with one target
    plan: SpeedPlan
    assistant: Path | None = None  # folder of the library's assistant
    own_file: Path | None = None  # the target's GGUF file
    rule: TenantRule | None = None  # None: all answers are of one tenant
    to_end: bool = False  # True if an end-of-text token ends an answer
    until_s: float = math.inf  # seconds since the run began at which it ends
    facts: Mapping[str, Any] = field(default_factory=dict)  # facts of the prompts, for the report

    @property
    def target(self) -> TargetConfig:
        (target,) = self.config.targets.values()
        return target

    @property
    def positions(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, (*self.plan.prompts, *self.plan.choosing))) + self.plan.tokens


def demo_pairs(names: Sequence[str], options: SpeedOptions) -> list[MeasuredPair]:
    """The bundled targets of these names."""
    models = options.models
    assistant = models / ASSISTANT
    if not (assistant / "config.json").exists():
        raise BadRequest("models", f"{assistant} holds no checkpoint: assisted generation needs one")
    texts = held_out_prompts(options.prompts + CHOOSING_PROMPTS, PROMPT_TOKENS, load_tokenizer(models), models)
    ids = tuple(prompt.token_ids for prompt in texts)
    found = []
    for index, name in enumerate(names):
        config = target_config(models, name)
        # The library's others need a cache that can be cropped.
        baselines = (*(BASELINES if name != MAMBA2 else (GENERATE,)), *LLAMA_CPP_ROWS)
        # The bars are for the costly target on a processor with two threads.
        comparable = name == COSTLY and THREADS == 2 and not torch.cuda.is_available()
        plan = SpeedPlan(
            name,
            ids[:-CHOOSING_PROMPTS],
            shapes=own_arms(config),
            baselines=baselines,
            judged=COSTLY if comparable else "",
            choosing=ids[-CHOOSING_PROMPTS:],
            **sizes_of(options),
        )
        last = index == len(names) - 1
        found.append(MeasuredPair(config, plan, assistant, until_s=TIME_LIMIT_S * (1.0 if last else COSTLY_SHARE)))
    return found


def file_pairs(
    configs: Mapping[str, Config], file: Path, rules: Sequence[TenantRule], options: SpeedOptions
) -> list[MeasuredPair]:
    """The target of each configuration, by its label, with the prompts of a file. rules: each is measured"""
    found = []
    for label, given in configs.items():
        config = own_target(given, options.target)
        (served,) = config.targets.values()
        prompts = own_prompts(config, file, options.prompts, options.tokens)
        own_file = served.checkpoint / GGUF if (served.checkpoint / GGUF).is_file() and not options.alone else None
        others = (GENERATE, LOOKUP, *LLAMA_CPP_ROWS, *((LLAMA_CPP_FILE,) if own_file else ()))
        categories = tuple(prompt.category for prompt in prompts)
        for whose in rules:
            plan = SpeedPlan(
                f"{label}, tenants: {whose}" if len(rules) > 1 else label,
                tuple(prompt.token_ids for prompt in prompts),
                shapes=() if options.no_arms else own_arms(config),
                baselines=() if options.alone else others,
                judged=OWN,
                categories=categories if any(categories) else (),
                **sizes_of(options),
            )
            facts = prompt_facts(file, prompts, whose)
            found.append(MeasuredPair(config, plan, own_file=own_file, rule=whose, to_end=True, facts=facts))
    return found


def sizes_of(options: SpeedOptions) -> dict[str, Any]:
    """Fields of a plan that are options."""
    return {name: getattr(options, name) for name in ("tokens", "temperatures", "repetitions", "seed")}


@asynccontextmanager
async def contenders_for(pair: MeasuredPair, local: bool) -> AsyncIterator[Contenders]:
    """Start our cluster, the library and llama.cpp for one target; all stop at the end. Of the others, one that cannot
    be started leaves out its rows alone."""
    target, rows = pair.target, pair.plan.baselines
    others, left_out, facts = dict[str, ContenderProcess](), dict[str, str](), dict[str, Any]()
    llama = partial(llama_cpp_process, target.checkpoint, target.dtype, target.threads, pair.positions)
    async with (
        AsyncExitStack() as stack,
        running(pair.config, local) as address,
        AsyncClient(address, proxy=False) as client,
    ):
        if set(rows) & set(BASELINES):
            process = library_process(target.checkpoint, pair.assistant, target.dtype, target.threads)
            others |= dict.fromkeys(BASELINES, await stack.enter_async_context(process))
        for which, file in ((LLAMA_CPP_ROWS, None), ((LLAMA_CPP_FILE,), pair.own_file)):
            if not set(rows) & set(which):
                continue
            try:
                started = await stack.enter_async_context(llama(file))
                others, facts = others | dict.fromkeys(which, started), started.facts
            except EngineFailed as error:
                left_out |= dict.fromkeys(which, str(error))
        yield Contenders(ClusterClient(client, pair.rule), others, facts, left_out)


async def measure_pair(
    pair: MeasuredPair, local: bool, started: float, progress: Begin
) -> tuple[SpeedResult, dict[str, Any]]:
    """The measurement of one target, and its part of the report."""
    plan, name = pair.plan, pair.plan.target
    first = min(CHECKED_PROMPTS, max(len(plan.prompts) // 2, 1))
    async with contenders_for(pair, local) as contenders:
        if plan.chosen_rows:
            step = progress(f"{name} target: the library's best settings", plan.choosing_answers)
            await contenders.choose(plan, step)
        if pair.to_end:
            step = progress(f"{name} target: where answers end", len(plan.passes) * len(plan.temperatures))
            plan = replace(plan, lengths=await answer_lengths(plan, contenders.ours, step))
        check = replace(plan, prompts=plan.prompts[:first], repetitions=1)
        step = progress(f"{name} target: check and warm-up", check.answers)
        checked = await measure(check, contenders, math.inf, step)
        remaining_s = pair.until_s - (time.monotonic() - started)
        measured = await measure(plan, contenders, remaining_s, progress(f"{name} target: measuring", plan.answers))
        best = [f"{setting} at {temperature:g}" for (_, temperature), setting in contenders.best.items()]
        llama_cpp = {"facts": contenders.llama_facts, "left_out": contenders.left_out}
    measured.identity.add(checked.identity)
    return measured, {
        **target_facts(pair.config),
        "prompts": len(plan.prompts),
        "prompt_tokens": max(map(len, plan.prompts)),
        "repetitions": plan.repetitions,
        "note": measured.note or None,
        "identity": measured.identity.as_json(),
        "best_settings": best,
        "llama_cpp": llama_cpp,
        **pair.facts,
    }


def parse_tenants(text: str) -> tuple[TenantRule, ...]:
    """Parse `answers,rows`: distinct ones."""
    parts = text.split(",")
    if len(set(parts)) != len(parts) or not set(parts) <= {each.value for each in TenantRule}:
        raise BadRequest("tenants", f"{text!r} is not answers, rows, or both with a comma between them")
    return tuple(map(TenantRule, parts))


def bundled_targets(options: SpeedOptions) -> tuple[str, ...]:
    """The names of the bundled targets that are measured. Raises BadRequest for options of a user's targets."""
    if options.alone or options.no_arms or options.tenants != TenantRule.ANSWERS:
        named = "alone" if options.alone else "no-arms" if options.no_arms else "tenants"
        raise BadRequest(named, "has an effect with CONFIG or --prompt-file alone")
    name = options.target or (COSTLY if options.quick else "both")
    if name not in MEASURED:
        raise BadRequest("target", f"{name!r} is not one of {', '.join(MEASURED)}; with CONFIG, name its own")
    return MEASURED[name]


def _labelled(paths: Sequence[Path], target: str) -> dict[str, Config]:
    """The configurations by their names in the report: of one, the target's; of several, their files'."""
    if len(paths) < 2:
        config = given_config(paths[0] if paths else None)
        return {config.target_named(target): config}
    labels = {path.stem: Config.load(path) for path in paths}
    if len(labels) < len(paths):
        raise BadRequest("config", "two files have the same name; the report could not tell them apart")
    return labels


def pairs_of(options: SpeedOptions) -> list[MeasuredPair]:
    if not options.configs and options.prompt_file is None:
        return demo_pairs(bundled_targets(options), options)
    configs = _labelled(options.configs, options.target)
    return file_pairs(configs, options.prompt_file or QUESTIONS, parse_tenants(options.tenants), options)


async def run_speed(options: SpeedOptions, begin: Begin) -> dict[str, Any]:
    started, load = time.monotonic(), round(os.getloadavg()[0], 2)
    results, targets, pairs = list[SpeedResult](), dict[str, Any](), pairs_of(options)
    for pair in pairs:
        measured, targets[pair.plan.target] = await measure_pair(pair, options.local, started, begin)
        results.append(measured)
    return {
        "threads": pairs[0].target.threads,
        "plan": {"load_average": load},
        "targets": targets,
        "rows": [row for measured in results for row in rows_of(measured)],
        "categories": [row for measured in results for row in categories_of(measured)],
        "differences": [line for measured in results for line in measured.identity.differences],
    }


GROUP = "{target} target, temperature {temperature:g}"
PARTS = ("draft", "verify", "queue", "hop")
OVER = {GENERATE: "generate", LLAMA_CPP: LLAMA_CPP, LLAMA_CPP_FILE: LLAMA_CPP_FILE, OFF: OFF}
POLICY_BARS, BEST_ARM_BARS = {0.0: 3.0, 1.0: 2.2}, {0.0: 1.0, 1.0: 0.97}
"""Least ratios of the policy on the costly target, by temperature: to `off`, and to the best fixed arm."""
OVER_ARM = f"policy over the best fixed arm, {GROUP}"
BEST_ARMS = "the best on the other half of the prompts: {best_arms}"


def own_aims() -> tuple[Aim, ...]:
    """The promise of the policy, for each target and temperature."""
    policy = judged_as(OWN, AUTO)
    return (
        Aim(f"policy over off, {GROUP}", "rows", "over_off_at_least", least=NEVER_SLOWER, where=policy),
        Aim(f"its lower 90 % bound, {GROUP}", "rows", "over_off_at_least", least=0.96, end="low", where=policy),
        Aim(OVER_ARM, "rows", "over_best_arm", least=FIXED_ARM_BAR, where=policy, why=BEST_ARMS),
    )


def costly_aims(temperature: float) -> tuple[Aim, ...]:
    policy, off = (judged_as(COSTLY, name, temperature=temperature) for name in (AUTO, OFF))
    bar, best = POLICY_BARS[temperature], BEST_ARM_BARS[temperature]
    library = f"policy over every transformers row, {GROUP}"
    kept = f"policy's rate over its tokens a round / (draft + verify), {GROUP}"
    return (
        Aim(f"policy over off, {GROUP}", "rows", f"ratio_over/{OFF}", least=bar, where=policy),
        Aim(library, "rows", "over_library", least=1.0, end="low", where=policy, why="the closest is {closest}"),
        Aim(f"off over generate, {GROUP}", "rows", f"ratio_over/{GENERATE}", least=0.95, where=off),
        Aim(OVER_ARM, "rows", "over_best_arm", least=best, where=policy, why=BEST_ARMS),
        Aim(kept, "rows", "kept", least=0.9, where=policy),
        Aim(f"hops as a share of the policy's rounds, {GROUP}", "rows", "hop_share", most=0.05, where=policy),
    )


def llama_aim(name: str, row: str, bar: float) -> Aim:
    aim, path = f"{name} over llama.cpp, by the median, {GROUP}", f"ratio_over/{LLAMA_CPP}"
    return Aim(aim, "rows", path, least=bar, where=judged_as(COSTLY, row, temperature=0.0))


SPEED = Bench(
    "speed",
    "Compare speeds: transformers' generate, its prompt lookup and its assisted generation, with the library's "
    "defaults and with the best of three settings, chosen on other prompts; llama.cpp, plain and with prompt lookup, "
    "where the extra `llama` is installed; ours without speculation, with each configured shape and with the policy. "
    "All in one run, interleaved. Exits with status 1 if ours answered differently with speculation than without.\n\n"
    "Without CONFIG and --prompt-file: on the demo target and on a costly one of the same function. With them: on a "
    "target of your own after prompts of your own, by default some questions of this package; beside it the library's "
    "defaults, and llama.cpp with the same weights and with the target's GGUF file as it is.",
    "About a minute: few prompts, short answers, one target.",
    SpeedOptions,
    run_speed,
    facts=("Load average at the start: {load_average:.2f} processes",),
    tables=(
        ReportTable(
            "What was measured",
            "targets",
            "target = name; parameters = parameters:,; dtype; drafter; prompts; shortest = shortest_prompt; tokens of "
            "the longest = prompt_tokens; prompts of = prompt_file; a tenant for each of the = tenants; repetitions; "
            "ended = note; answers compared with off = identity/answers_compared; that differ = identity/differing; "
            "the library's best settings = best_settings; llama.cpp = llama_cpp/facts; not measured = "
            "llama_cpp/left_out",
        ),
        ReportTable(
            GROUP,
            "rows",
            "row = name; tokens/s = tokens_per_second:.1f; "
            + "; ".join(f"over {head} = ratio_over/{row}:.2f" for row, head in OVER.items())
            + "; emitted per round = emitted_per_round:.2f; first token ms = first_token_ms:.0f; decode tokens/s = "
            "decode_tokens_per_second:.1f; equal to generate = equal_to_generate",
        ),
        ReportTable(
            f"{GROUP}: by category",
            "categories",
            "category; row = name; prompts; tokens of an answer = answer_tokens:.0f; tokens/s = tokens_per_second:.1f; "
            "over off = over_off:.2f; tokens a round = emitted_per_round:.2f",
        ),
        ReportTable(
            f"{GROUP}: parts of a round",
            "rows",
            "row = name; "
            + "; ".join(f"{part} ms = round_ms/{part}:.2f" for part in (*PARTS, "total"))
            + "; hops = hop_share:.1%; kept of draft + verify = kept:.2f; shapes picked = arms:.0%",
            where=lambda row: "round_ms" in row,
        ),
    ),
    aims=(
        *own_aims(),
        *(aim for temperature in POLICY_BARS for aim in costly_aims(temperature)),
        llama_aim("policy", AUTO, 1.25),
        llama_aim("off", OFF, 0.6),
    ),
    plots=(
        Plot("rows", "name", "tokens per second = tokens_per_second", panel=GROUP),
        Plot(
            "categories",
            "category",
            "tokens per second = tokens_per_second",
            line="{name}",
            panel=f"{GROUP}: by category",
        ),
    ),
    code=("cluster/router", "cluster/policies", "verifier_service", "drafter_service"),
)
