"""`dendro tune`: the plan of the measurement, the report, and the configuration's new arms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from dendro.errors import BadRequest
from dendro.shapes import MAX_ROWS
from rich.console import Console

from cluster.command_options import ConfigArgument, JsonFile, Local, TargetName, given_config
from cluster.config import Config
from cluster.hub import fetched, pinned
from cluster.measure.bench import BenchOption, ReportTable, cells_of
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import MarkdownFile, parse_temperatures, present, seed_option, with_bars
from cluster.measure.report import Report, machine_facts, text_of
from cluster.measure.targets import parameter_count
from cluster.prompt_files import PromptFile
from cluster.running import running
from cluster.training.acceptance import ANSWER_TOKENS
from cluster.tune.measuring import Ranker, Strangers
from cluster.tune.prompts import choose_prompts
from cluster.tune.tuning import (
    PROBES,
    Prompts,
    SearchLimits,
    Tuned,
    TunePlan,
    Tuning,
    arms_of,
    chains_of,
    costs_row,
    rows_of,
    verdicts_of,
)
from cluster.tune.writing import check_writable, config_text, field_of_arms, with_arms, write_arms
from drafter_service.confidence import CANDIDATES

TABLES = (
    ReportTable(
        "Drafter {drafter}, temperature {temperature:g}",
        "rows",
        "tree = name; rows; depth; E[N] predicted = predicted/emitted_per_round:.2f; replayed = "
        "replayed_emitted_per_round:.2f; measured = measured/emitted_per_round:.2f; round ms predicted = "
        "predicted/round_ms:.2f; measured = measured/round_ms:.2f; tokens/s predicted = "
        "predicted/tokens_per_second:.1f; measured = measured/tokens_per_second:.1f; over off = over_off:.2f; "
        "found = marks",
    ),
    ReportTable(
        "Drafter {drafter}, temperature {temperature:g}: Leviathan's formulas with a = {acceptance:.3f} and c = "
        "{cost_ratio:.3f}, for steps that take as long with guesses as without",
        "chains",
        "chain = name; E[N] by formula = emitted_per_round:.2f; measured = measured_emitted_per_round:.2f; gain by "
        "formula = gain:.2f; measured = measured_gain:.2f; operations by formula = operations:.2f; measured = "
        "measured_operations:.2f",
    ),
    ReportTable(
        "Costs of the parts of a round, in ms",
        "costs",
        "drafter; temperature = temperature:g; a draft = draft_ms:.3f; a forward = level_ms:.3f; its row = "
        "level_ms_per_row:.3f; a step = step_ms:.3f; its row = step_ms_per_row:.3f; hops = hops_ms:.3f; hops without a "
        "draft = off_hops_ms:.3f",
    ),
)


@dataclass(frozen=True, slots=True)
class TuneSize:
    """Numbers of prompts by their use, and tokens of an answer."""

    learned: int
    timed: int
    held_out: int
    tokens: int


LEARNED = BenchOption("Prompts to count ranks on.", 24, 6, least=1)
HELD_OUT = BenchOption("Prompts to run shapes on.", 8, 2, least=1)
TOKENS = BenchOption("Tokens of an answer, at most.", ANSWER_TOKENS, 24, least=2)
TIMED = {False: 6, True: 1}
"""Prompts to time rounds on, without and with --quick."""


def plans_of(
    config: Config,
    target: str,
    size: TuneSize,
    temperatures: tuple[float, ...],
    limits: SearchLimits,
    seed: int,
    prompt_file: Path | None = None,
) -> tuple[TunePlan, ...]:
    """The plans of the measurement, one for each drafter. Raises BadRequest, naming the field, if nothing can be
    tuned."""
    served = config.targets[target]
    names = config.drafters_of(target)
    if not names:
        raise BadRequest("drafters", f"none serves the target {target}; there is no shape to choose without one")
    if size.tokens > config.router.max_new_tokens:
        raise BadRequest("tokens", f"{size.tokens}; router.max_new_tokens is {config.router.max_new_tokens}")
    chosen = choose_prompts(prompt_file, served, target, size.learned + size.held_out, size.tokens)
    prompts = Prompts(
        chosen.source, chosen.ids[: size.learned], min(size.timed, size.learned), chosen.ids[size.learned :]
    )
    arms = config.arms_of(target)
    target_parameters = parameter_count(served.checkpoint)
    plans = []
    for name in names:
        parameters = parameter_count(config.drafters[name].checkpoint)
        plan = TunePlan(
            target,
            name,
            tuple(arm.shape for arm in arms if arm.off or (arm.drafted and arm.maker == name)),
            prompts,
            size.tokens,
            temperatures,
            tuple(probe for probe in PROBES if probe.rows <= served.max_rows and probe.depth <= served.max_depth),
            SearchLimits(
                min(limits.max_rows, served.max_rows),
                min(limits.max_depth, served.max_depth),
                limits.max_children,
            ),
            parameters / target_parameters if parameters and target_parameters else None,
            seed,
        )
        plans.append(plan)
    return tuple(plans)


async def run_tune(config: Config, plans: Sequence[TunePlan], local: bool, begin: Begin) -> dict[str, Any]:
    """Run the whole measurement, one drafter after the other; returns the report as JSON values."""
    from cluster.engines import device_of

    started = time.monotonic()
    tuned: list[tuple[TunePlan, Tuned]] = []
    async with running(config, local) as address:
        strangers = Strangers(address)
        for plan in plans:
            drafter = config.drafters[plan.drafter]
            tuning = Tuning(plan, strangers, Ranker(drafter, device_of(drafter), plan.limits.max_children), begin)
            for temperature in plan.temperatures:
                tuned.append((plan, await tuning.at(temperature)))
    plan = plans[0]
    prompts = plan.prompts
    return {
        **report_head("tune", started, local, plan.seed, config.targets[plan.target].threads),
        "target": plan.target,
        "drafters": [each.drafter for each in plans],
        "prompts": {
            "source": prompts.source,
            "learned": len(prompts.learned),
            "timed": prompts.timed,
            "held_out": len(prompts.held_out),
            "tokens": round(fmean(map(len, (*prompts.learned, *prompts.held_out)))),
        },
        "answer_tokens": plan.tokens,
        "rows": [row for plan, each in tuned for row in rows_of(plan, each)],
        "chains": [row for plan, each in tuned for row in chains_of(plan, each)],
        "costs": [costs_row(each) for _, each in tuned],
        "verdicts": verdicts_of([each for _, each in tuned]),
        "arms": arms_of(config.arms_of(plan.target), [each for _, each in tuned]),
        "differences": [line for _, each in tuned for line in each.differences],
        "aims": [],
    }


def facts_of(report: Report) -> Iterator[str]:
    """The conditions of the measurement, a line each."""
    yield from machine_facts(report)
    prompts, drafters = report["prompts"], ", ".join(report["drafters"])
    yield (
        f"The target {report['target']}, drafted for by {drafters}. Prompts {prompts['source']}, of "
        f"{prompts['tokens']} tokens on average, answers of at most {report['answer_tokens']}: ranks counted on "
        f"{prompts['learned']}, rounds timed on {prompts['timed']} of them; replayed and measured on "
        f"{prompts['held_out']} others"
    )
    yield (
        "E[N] is tokens per round, the target's own one included: predicted from how often the j-th candidate of depth "
        "d was the target's token; replayed through the ranks of the other prompts' tokens; measured in rounds on these"
    )
    yield (
        "Round times are predicted by linear costs, fitted to timed shapes: of a draft, of a drafter's forward and its "
        "row, of a step and its padded row, and of the rest of a round"
    )
    yield "Over off: the median over these of tokens a second after the first round, over those of `off` on the same"
    yield from map(verdict_line, report["verdicts"])
    idle = [name for name in report["drafters"] if not any(_pays(each, name) for each in report["verdicts"])]
    if idle:
        yield f"No tree of {', '.join(idle)} pays here: without it the cluster is as fast and needs less memory"
    yield f"Arms that pay, and those without a drafter, which were not measured: {', '.join(report['arms'])}"


def _pays(verdict: Report, drafter: str) -> bool:
    return bool(verdict["drafter"] == drafter and verdict["pays"])


def verdict_line(verdict: Report) -> str:
    """True if a drafter pays at a temperature."""
    place = f"{verdict['drafter']} at temperature {verdict['temperature']:g}"
    if verdict["best"] is None:
        return f"{place}: no tree was measured"
    best = f"{verdict['best']} is {text_of(verdict['over_off'], '.2f')} of off"
    if not verdict["pays"]:
        return f"{place}: nothing pays; of all trees, {best}"
    return f"{place}: pays; of all trees, {best}; not slower than off: {', '.join(verdict['paying'])}"


def tune(
    config: ConfigArgument = None,
    target: TargetName = "",
    temperatures: Annotated[str, typer.Option(help="Separated by commas; each gets trees of its own.")] = "0,1",
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute for each drafter: few prompts, short answers.")
    ] = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Write the trees found into CONFIG as the target's arms; the rest is unchanged."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the configuration with the trees found to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file named by --out.")] = False,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    local: Local = False,
    prompt_file: PromptFile = None,
    prompts: Annotated[int | None, LEARNED.info()] = None,
    held_out: Annotated[int | None, HELD_OUT.info()] = None,
    tokens: Annotated[int | None, TOKENS.info()] = None,
    max_rows: Annotated[int, typer.Option(min=2, max=MAX_ROWS, help="Rows of a tree, root included.")] = MAX_ROWS,
    max_depth: Annotated[int, typer.Option(min=1, max=MAX_ROWS - 1, help="Levels below the root.")] = 10,
    max_children: Annotated[int, typer.Option(min=1, max=CANDIDATES, help="Children of one row.")] = CANDIDATES,
    seed: Annotated[int, seed_option("sampling and of the order of runs")] = 0,
) -> None:
    """Find the trees that suit a target, each of its drafters and this machine.

    Tokens per second of each tree are predicted from the drafter's ranks of the target's answers to held-out prompts
    and from the measured costs of rounds of different sizes. The best tree at each temperature, found by Sequoia's
    program, and the best chain are then run on other prompts beside the configured arms. The prompts are those of
    --prompt-file; by default questions, where the target has a chat template, or else passages of code and prose and
    edits of code. Nothing is written without --write or --out, and then only trees that were not slower than off: to
    speculation.arms, or, where other targets use those, to the target's own arms. Exit status 1 if a tree changed the
    tokens.
    """
    checked = fetched(pinned(given_config(config)))
    text = config_text(config, checked)
    goal = check_writable(config, write, out, force)
    name = checked.target_named(target)
    field = field_of_arms(checked, name)
    if goal is not None:
        with_arms(text, field, checked.arm_texts(name))  # what cannot be edited is refused before anything is measured
    plans = plans_of(
        checked,
        name,
        TuneSize(
            LEARNED.value("prompts", prompts, quick),
            TIMED[quick],
            HELD_OUT.value("held_out", held_out, quick),
            TOKENS.value("tokens", tokens, quick),
        ),
        parse_temperatures(temperatures),
        SearchLimits(max_rows, max_depth, max_children),
        seed,
        prompt_file,
    )
    report = with_bars(lambda begin: asyncio.run(run_tune(checked, plans, local, begin)))
    if goal is not None and not report["differences"]:
        write_arms(config, text, goal, field, report["arms"])
    present(report, facts_of(report), cells_of(TABLES, report), json, markdown)
    if goal is not None:
        before = list(checked.arm_texts(name))
        Console().print(f"{'.'.join(field)} written to {goal}; before: {before}", markup=False, soft_wrap=True)
