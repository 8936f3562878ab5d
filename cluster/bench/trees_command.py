"""`dendro bench trees`: generate answers, record the drafters' guesses, replay every arm and policy."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from dendro.errors import BadRequest
from dendro.shapes import MAX_ROWS, ProposedShape

from cluster.bench.context import CONTEXTS
from cluster.bench.costs import LEVEL_ROWS, ReplayCosts, measure_drafts, measure_steps
from cluster.bench.live import live_row, live_shapes
from cluster.bench.prompted import write_answers
from cluster.bench.traces import (
    SPARE,
    Forward,
    Trace,
    disagreements,
    grow_trees,
    guesses_of,
    is_static,
    record_proposals,
)
from cluster.bench.trees import (
    PAPER,
    WIDE,
    TreesRecord,
    ablation_rows,
    arm_rows,
    cut_trees,
    fixed_arms,
    grown_arms,
    policy_rows,
    share_rows,
    streams,
)
from cluster.bench.trees_aims import aims_of
from cluster.bench.trees_causes import calibration_rows, causes_rows
from cluster.bench.trees_context import measure_contexts
from cluster.bench.trees_report import facts_of, tables_of
from cluster.bench.trees_report import plot as draw
from cluster.command_options import JsonFile
from cluster.config import DEMO_MODELS
from cluster.demo.kinds import KINDS
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
    Temperatures,
    parse_temperatures,
    present,
    seed_option,
    with_bars,
)
from cluster.measure.targets import COSTLY, THREADS, parameter_count, target_config
from cluster.policies import POLICIES
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS

DRAFTERS = Default("mamba2,mamba,llama", quick="mamba2")
"""The first is the main one: its trees are grown, and policies are replayed with it."""
PROMPTS = Default(8, quick=1)
TOKENS = Default(ANSWER_TOKENS, quick=16)
REPETITIONS = Default(15, quick=3)
LENGTHS = Default(CONTEXTS, quick=(256, 1024))
SIDE_BY_SIDE = 8
"""Texts that are drafted together."""
MARGIN = 8
"""Room past an answer, in tokens."""


@dataclass(frozen=True, slots=True)
class TreesSettings(KindsSettings):
    """The options of a run."""

    drafters: tuple[str, ...]
    live: bool
    contexts: tuple[int, ...]  # tokens; empty: longer texts are not measured

    def __post_init__(self) -> None:
        for name in self.drafters:
            if not (self.models / name / "config.json").exists():
                raise BadRequest("drafters", f"{self.models / name} holds no checkpoint")


def parse_drafters(text: str) -> tuple[str, ...]:
    """Parse `mamba2,mamba`: folders beside the target, each named once."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found) or len(set(found)) != len(found):
        raise BadRequest("drafters", f"{text!r}: name folders of models, each once, separated by commas")
    return found


async def record(settings: TreesSettings, begin: Begin) -> tuple[TreesRecord, dict[str, Any]]:
    """Measure everything. Also returns the report's `plan` and `live`: facts, and rounds in real time."""
    config = target_config(settings.models, COSTLY)
    (target,) = config.targets.values()
    arms = tuple(arm.shape for arm in config.arms_of(COSTLY))
    main = settings.drafters[0]
    static = [shape for shape in fixed_arms(arms) if is_static(shape)]
    traces: dict[tuple[str, float], list[Trace]] = {}
    costs: dict[tuple[str, float], ReplayCosts] = {}
    live: list[dict[str, Any]] = []
    grown = [*grown_arms(arms), PAPER[0]]
    checked, differing, positions = [shape for shape in grown if is_static(shape)], 0, 0
    length = PROMPT_TOKENS + settings.tokens + SPARE + MAX_ROWS + MARGIN
    async with verifier_of(COSTLY, target, length, settings.prompts * len(KINDS)) as verifier:
        step = begin("answers", len(settings.temperatures))
        answers = {
            each: await write_answers(
                verifier, settings.models, settings.prompts, settings.tokens, each, settings.seed, step
            )
            for each in settings.temperatures
        }
        ids = answers[settings.temperatures[0]][0].ids[:PROMPT_TOKENS]
        step = begin("costs of steps", len(settings.temperatures) * (settings.repetitions + 1))
        steps = {
            each: await measure_steps(verifier, ids, each, settings.repetitions, step) for each in settings.temperatures
        }
        for name in settings.drafters:
            forward = Forward(settings.models / name, DRAFTER_DTYPE)
            for temperature, written in answers.items():
                traces[name, temperature] = [Trace(answer, guesses_of(forward, answer)) for answer in written]
            if not forward.served:
                continue
            async with drafter_of(settings.models / name, SIDE_BY_SIDE) as drafter:
                wanted = [*fixed_arms(arms), WIDE] if name == main else static
                step = begin(f"costs of {name}", len(settings.temperatures) * (settings.repetitions + 1))
                for temperature in settings.temperatures:
                    drafts = await measure_drafts(drafter, ids, temperature, wanted, settings.repetitions, step)
                    costs[name, temperature] = ReplayCosts(steps[temperature], drafts)
                if name != main:
                    continue
                batches = -(-settings.prompts * len(KINDS) // SIDE_BY_SIDE)
                step = begin(f"trees of {name}", len(settings.temperatures) * batches * settings.tokens)
                for temperature in settings.temperatures:
                    mine = traces[name, temperature]
                    for start in range(0, len(mine), SIDE_BY_SIDE):
                        await grow_trees(drafter, mine[start : start + SIDE_BY_SIDE], grown, step)
                    for trace in mine:
                        record_proposals(trace, [arm for arm in arms if isinstance(arm, ProposedShape)])
                        cut_trees(trace)
                        differing += sum(disagreements(trace, shape) for shape in checked)
                        positions += trace.answer.tokens
                if settings.live:
                    shapes = live_shapes()
                    step = begin("real time", len(settings.temperatures) * len(shapes))
                    for temperature in settings.temperatures:
                        firsts = traces[name, temperature][: len(KINDS)]
                        for shape in shapes:
                            live.append(await live_row(drafter, verifier, shape, firsts, costs[name, temperature]))
                            step()
    plan = {
        "target": COSTLY,
        "parameters": parameter_count(target.checkpoint),
        "dtype": target.dtype,
        "drafter": main,
        "drafter_dtype": DRAFTER_DTYPE,
        "drafters": list(settings.drafters),
        "kinds": list(KINDS),
        "prompts": settings.prompts,
        "prompt_tokens": PROMPT_TOKENS,
        "tokens": settings.tokens,
        "repetitions": settings.repetitions,
        "places": positions,
        "checked_shapes": [str(shape) for shape in checked],
        "disagreements": differing,
    }
    return TreesRecord(traces, costs, main, arms), {"plan": plan, "live": live}


def cost_rows(recorded: TreesRecord) -> list[dict[str, Any]]:
    """The cost table: steps of the target and levels of the drafters, by rows."""
    found: list[dict[str, Any]] = []
    for (name, temperature), costs in recorded.costs.items():
        if name == recorded.drafter:
            found += [
                {"what": "verifier step", "temperature": temperature, "rows": rows, "ms": round(us / 1e3, 3)}
                for rows, us in costs.step.items()
            ]
        found += [
            {
                "what": f"level of {name}",
                "temperature": temperature,
                "rows": rows,
                "ms": round(costs.level_us(rows) / 1e3, 3),
            }
            for rows in LEVEL_ROWS
        ]
    return found


def analyse(recorded: TreesRecord, begin: Begin) -> dict[str, Any]:
    """All rows and aims, computed from the record."""
    step = begin("policies", len(recorded.temperatures) * len(POLICIES) * 2)
    played = list(streams(recorded, step))
    policies = list(policy_rows(recorded, played))
    ablation = list(ablation_rows(recorded))
    causes = list(causes_rows(recorded, ablation))
    return {
        "rows": list(arm_rows(recorded)),
        "policies": policies,
        "shares": list(share_rows(recorded, played, policies)),
        "ablation": ablation,
        "causes": causes,
        "calibration": list(calibration_rows(recorded)),
        "costs": cost_rows(recorded),
        "aims": aims_of(ablation, causes, policies),
    }


async def run_trees(settings: TreesSettings, begin: Begin) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started = time.monotonic()
    torch.set_num_threads(THREADS)
    recorded, measured = await record(settings, begin)
    found = analyse(recorded, begin)
    found["context"] = await measure_contexts(settings.models, settings.contexts, begin) if settings.contexts else []
    return report_head("trees", started, True, settings.seed, THREADS) | measured | found


def bench_trees(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: one prompt of each kind, short answers, one drafter.")
    ] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    prompts: Annotated[int | None, PROMPTS.option(KIND_PROMPTS, least=1)] = None,
    tokens: Annotated[int | None, TOKENS.option("New tokens of every answer.", least=1)] = None,
    repetitions: Annotated[int | None, REPETITIONS.option("Measurements of each cost.", least=1)] = None,
    temperatures: Temperatures = "0,1",
    drafters: Annotated[
        str | None,
        DRAFTERS.option(
            "Folders beside the target, separated by commas. All arms and policies are measured with the first, static "
            "trees alone with the others. A drafter that the service does not support has ranks, but no costs."
        ),
    ] = None,
    context: Annotated[
        bool,
        typer.Option(
            "--context", help="Also measure rounds and memory after 256 to 8,192 tokens of text (quick 256 and 1,024)."
        ),
    ] = False,
    live: Annotated[
        bool, typer.Option(help="Also run some arms in real time, with drafter and verifier in this process.")
    ] = True,
    seed: Annotated[int, seed_option("sampling at temperatures above 0")] = 0,
    models: Models = DEMO_MODELS,
) -> None:
    """Compare ways to guess: chains, static trees, beams, dynamic trees, and every policy that chooses among them, on
    code, prose and repetitive edits.

    The target generates each answer once, and a drafter's guesses are recorded at every position. As speculation
    changes no token, all ways are then replayed on the same answers, with round times from a table of measured costs of
    a costly target. The aims: dynamic trees emit at least 1.1 times what the best static tree of as many rows
    emits; the best policy reaches 97 % of the best fixed arm in hindsight on every kind of prompt, and 98 % of no
    speculation.
    """
    settings = TreesSettings(
        prompts=PROMPTS.chosen(prompts, quick),
        tokens=TOKENS.chosen(tokens, quick),
        repetitions=REPETITIONS.chosen(repetitions, quick),
        temperatures=parse_temperatures(temperatures),
        drafters=parse_drafters(DRAFTERS.chosen(drafters, quick)),
        live=live,
        contexts=LENGTHS.at(quick) if context else (),
        seed=seed,
        models=models,
    )
    report = with_bars(lambda begin: asyncio.run(run_trees(settings, begin)))
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw)
