"""`dendro bench stopping`: generate answers, record drafts, replay every rule, run a few in real time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from dendro.shapes import MAX_ROWS

from cluster.bench.costs import ReplayCosts, measure_drafts, measure_steps
from cluster.bench.stopping import (
    FORMS,
    RecordedDrafts,
    StoppingRecord,
    comparison_rows,
    cost_rows,
    rule_rows,
    sweeps_of,
)
from cluster.bench.stopping_aims import aims_of
from cluster.bench.stopping_live import live_arms, live_rows, run_live
from cluster.bench.stopping_report import facts_of, tables_of
from cluster.bench.stopping_report import plot as draw
from cluster.bench.traces import SPARE, grown_trees, write_answers
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
from cluster.training.acceptance import ANSWER_TOKENS, PROMPT_TOKENS

DRAFTER = "mamba2"
PROMPTS = Default(9, quick=1)
TOKENS = Default(ANSWER_TOKENS, quick=24)
REPETITIONS = Default(15, quick=3)
LIVE = Default(True, quick=False)
LIVE_PROMPTS = 1
"""Prompts of each kind whose answers are generated in real time."""
SIDE_BY_SIDE = 9
"""Texts that are drafted together."""
MARGIN = 8
"""Room past an answer, in tokens."""


@dataclass(frozen=True, slots=True)
class StoppingSettings(KindsSettings):
    """The options of a run."""

    live: bool


async def record(settings: StoppingSettings, begin: Begin) -> tuple[StoppingRecord, list[dict[str, Any]]]:
    """Measure everything. Also returns the rows of rounds in real time."""
    config = target_config(settings.models, COSTLY)
    (target,) = config.targets.values()
    shapes = [form.recorded for form in FORMS]
    drafts: dict[float, list[RecordedDrafts]] = {}
    costs: dict[float, ReplayCosts] = {}
    live: list[dict[str, Any]] = []
    length = PROMPT_TOKENS + settings.tokens + SPARE + MAX_ROWS + MARGIN
    texts = settings.prompts * len(KINDS)
    async with (
        verifier_of(COSTLY, target, length, texts) as verifier,
        drafter_of(settings.models / DRAFTER, SIDE_BY_SIDE) as drafter,
    ):
        for temperature in settings.temperatures:
            at = f"temperature {temperature:g}"
            step = begin(f"answers, {at}", 1)
            answers = await write_answers(
                verifier, settings.models, settings.prompts, settings.tokens, temperature, settings.seed
            )
            step()
            step = begin(f"costs, {at}", 2 * (settings.repetitions + 1))
            ids = answers[0].ids[:PROMPT_TOKENS]
            steps = await measure_steps(verifier, ids, temperature, settings.repetitions, step)
            wanted = [shape for form in FORMS for shape in (*form.lengths, *form.grown)]
            drafted = await measure_drafts(drafter, ids, temperature, wanted, settings.repetitions, step)
            costs[temperature] = ReplayCosts(steps, drafted)
            batches = [answers[start : start + SIDE_BY_SIDE] for start in range(0, texts, SIDE_BY_SIDE)]
            step = begin(f"drafts, {at}", len(batches) * settings.tokens)
            drafts[temperature] = [
                RecordedDrafts(answer, trees)
                for batch in batches
                for answer, trees in zip(batch, await grown_trees(drafter, batch, shapes, step), strict=True)
            ]
            if settings.live:
                arms = live_arms(config.arms_of(COSTLY))
                firsts = answers[: LIVE_PROMPTS * len(KINDS)]
                step = begin(f"real time, {at}", len(firsts) * len(arms))
                live += live_rows(await run_live(drafter, verifier, arms, firsts, step), temperature)
    return StoppingRecord(drafts, costs), live


async def run_stopping(settings: StoppingSettings, begin: Begin) -> dict[str, Any]:
    """Run the whole measurement; returns the report."""
    started = time.monotonic()
    torch.set_num_threads(THREADS)
    recorded, live = await record(settings, begin)
    sweeps = list(sweeps_of(recorded, begin("replays", len(settings.temperatures) * len(FORMS))))
    compared = [row for sweep in sweeps for row in comparison_rows(sweep)]
    target = target_config(settings.models, COSTLY).targets[COSTLY]
    return {
        **report_head("stopping", started, True, settings.seed, THREADS),
        "plan": {
            "target": COSTLY,
            "parameters": parameter_count(target.checkpoint),
            "dtype": target.dtype,
            "drafter": DRAFTER,
            "drafter_dtype": DRAFTER_DTYPE,
            "kinds": list(KINDS),
            "prompts": settings.prompts,
            "prompt_tokens": PROMPT_TOKENS,
            "tokens": settings.tokens,
            "repetitions": settings.repetitions,
            "forms": {form.name: str(form.marginal) for form in FORMS},
        },
        "rows": [row for sweep in sweeps for row in rule_rows(sweep)],
        "compared": compared,
        "costs": list(cost_rows(recorded)),
        "live": live,
        "aims": aims_of(compared),
    }


def bench_stopping(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: one prompt of each kind, short answers, no real time.")
    ] = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    prompts: Annotated[int | None, PROMPTS.option(KIND_PROMPTS, least=1)] = None,
    tokens: Annotated[int | None, TOKENS.option("New tokens of every answer.", least=1)] = None,
    repetitions: Annotated[int | None, REPETITIONS.option("Measurements of each cost.", least=1)] = None,
    temperatures: Temperatures = "0,1",
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="Also run some arms in real time, with drafter and verifier in this process. (default --live; "
            "quick --no-live)",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, seed_option("sampling at temperatures above 0")] = 0,
    models: Models = DEMO_MODELS,
) -> None:
    """Compare when drafts stop: after a fixed number of levels, at a fixed chance h that a guess is rejected
    (SpecDec++), or by the marginal rule of until(auto,...), for chains and for trees, on code, prose and edits.

    One chain and one tree are drafted at every position of the target's answers. Every rule is then replayed on these
    drafts: guesses discarded and verifications per emitted token, and the tokens a second that the measured costs
    predict. The aims: at the same discard rate no fixed length verifies less often than the sweep of h; the marginal
    rule reaches 99 % of the rate of the best h in hindsight.
    """
    settings = StoppingSettings(
        prompts=PROMPTS.chosen(prompts, quick),
        tokens=TOKENS.chosen(tokens, quick),
        repetitions=REPETITIONS.chosen(repetitions, quick),
        temperatures=parse_temperatures(temperatures),
        live=LIVE.chosen(live, quick),
        seed=seed,
        models=models,
    )
    report = with_bars(lambda begin: asyncio.run(run_stopping(settings, begin)))
    present(report, facts_of(report), tables_of(report), json, markdown, plot, draw)
