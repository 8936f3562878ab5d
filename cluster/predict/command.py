"""`dendro predict`: the options, the report and its tables."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from dendro.errors import BadRequest
from dendro.shapes import MAX_ROWS
from dendro.tree import RANKED

from cluster.arms import OFF_ARM
from cluster.checkpoints import pairs_of, read_cluster
from cluster.command_options import ConfigArgument, JsonFile, Local, TargetName, given_config
from cluster.config import Config
from cluster.drafter_figures import check_writable, figures_of, write_figures
from cluster.hub import fetched, pinned
from cluster.measure.bench import Aim, BenchOption, ReportTable, cells_of
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import MarkdownFile, parse_temperatures, present, seed_option, with_bars
from cluster.measure.report import Report, Row, machine_facts, text_of
from cluster.measure.statistics import median_estimate
from cluster.predict.predicting import Predicted, Predicting, PredictPlan, widest
from cluster.predict.prediction import ceiling_of, longest_trees, over_off, row_of
from cluster.prompt_files import PromptFile
from cluster.running import running
from cluster.training.acceptance import ANSWER_TOKENS
from cluster.tune.measuring import Ranker, Strangers
from cluster.tune.prompts import choose_prompts

PROMPTS = BenchOption("Prompts to predict on.", 24, 6, least=1)
TIMED = BenchOption("Prompts of these to time rounds on.", 8, 2, least=1)
TOKENS = BenchOption("Tokens of an answer, at most.", ANSWER_TOKENS, 24, least=2)
DIFFERENCE = 0.05
"""Aim: the greatest relative difference between a predicted ratio and the measured one."""
PARTS = {
    "total": "ms a round",
    "draft": "draft",
    "first_row": "verify, first row",
    "further_rows": "further rows",
    "rest": "rest",
}
TABLE = ReportTable(
    "Temperature {temperature:g}",
    "rows",
    "arm = name; from; tokens a round = emitted_per_round:.2f; needed = needed_per_round:.2f; over off = over_off:.2f; "
    + "; ".join(f"{head} = round_ms/{part}:.2f" for part, head in PARTS.items())
    + "; measured over off = measured:.2f; predicted / measured = predicted_over_measured:.3f",
)
AIM = Aim(
    "temperature {temperature:g}: predicted over-off ratios differ from the measured by at most",
    "rows",
    "differs_by",
    most=DIFFERENCE,
    where=lambda row: "differs_by" in row,
    why="{name}, on other prompts than those predicted from",
)


def ranked_drafters(config: Config, target: str) -> list[str]:
    """The drafters that have the target's tokens; a bridge makes others of some of their guesses."""
    facts = read_cluster(config)
    return [name for name, of, pairing in pairs_of(config, facts) if of == target and not pairing.bridge]


async def run_predict(
    config: Config,
    plan: PredictPlan,
    source: str,
    temperatures: tuple[float, ...],
    local: bool,
    begin: Begin,
    figures: bool = False,
    guesses: int | None = None,
) -> dict[str, Any]:
    """Run the whole measurement; returns the report as JSON values.

    figures: write the figures of the drafters' ranks into their checkpoints
    guesses: report the best trees of so many guesses, too
    """
    from cluster.engines import device_of

    started = time.monotonic()
    makers = {arm.maker for arm in plan.arms}
    drafters = {name: config.drafters[name] for name in ranked_drafters(config, plan.target) if name in makers}
    width = widest(plan.arms)
    if figures or guesses is not None:
        width = max(width, RANKED)
        if not drafters:
            option = "figures" if figures else "guesses"
            raise BadRequest(option, f"no arm of {plan.target} has a drafter with the target's tokens")
    if guesses is not None and len(plan.prompts) < 2:
        raise BadRequest("guesses", "trees are chosen on one half of the prompts for the other; ask for 2 or more")
    if figures:
        for drafter in drafters.values():
            check_writable(drafter.checkpoint)
    rankers = {name: Ranker(drafter, device_of(drafter), width) for name, drafter in drafters.items()}
    async with running(config, local) as address:
        predicting = Predicting(plan, Strangers(address), rankers, begin)
        found = [await predicting.at(temperature) for temperature in temperatures]
    if figures:
        for name, drafter in drafters.items():
            ranks = {each.temperature: each.ranks[name] for each in found}
            write_figures(drafter.checkpoint, figures_of(plan.target, ranks))
    names = {arm: arm.name(config.names_drafters(plan.target)) for arm in plan.arms}
    rows = [row for each in found for row in sorted(_rows(each, names), key=lambda row: -row["over_off"]["median"])]
    return {
        **report_head("predict", started, local, plan.seed, config.targets[plan.target].threads),
        "target": plan.target,
        "prompts": {
            "source": source,
            "predicted": len(plan.prompts),
            "timed": plan.timed,
            "held_out": len(plan.held_out),
            "tokens": round(fmean(map(len, plan.every))),
        },
        "answer_tokens": plan.tokens,
        "rows": rows,
        "off_ms": [{"temperature": each.temperature, "round_ms": round(each.off.round_us / 1e3, 3)} for each in found],
        "trees": [row for each in found for row in _trees(each, guesses)],
        "ceilings": [row for each in found if (row := _ceiling(each)) is not None],
        "unknown": [{"temperature": each.temperature, "arms": [names[arm] for arm in each.unknown]} for each in found],
        "differences": [line for each in found for line in each.differences],
        "aims": list(AIM.judged({"rows": rows})),
    }


def _rows(found: Predicted, names: Mapping[Any, str]) -> Iterator[Row]:
    for prediction in found.predictions:
        row = {"temperature": found.temperature, **row_of(prediction, found.off, names[prediction.arm])}
        measured = over_off(found.held_out[prediction.arm], found.held_out[OFF_ARM])
        if measured:
            row["measured"] = median_estimate(list(measured.values())).as_json()
            row["predicted_over_measured"] = round(row["over_off"]["median"] / row["measured"]["median"], 4)
            row["differs_by"] = abs(row["predicted_over_measured"] - 1)
        yield row


def _trees(found: Predicted, guesses: int | None) -> Iterator[Row]:
    if guesses is None:
        return
    for drafter, ranks in found.ranks.items():
        for shape, emitted in longest_trees(ranks, guesses):
            row: Row = {"temperature": found.temperature, "drafter": drafter, "guesses": guesses, "tree": str(shape)}
            yield {**row, "emitted_per_round": round(emitted, 4)}


def _ceiling(found: Predicted) -> Row | None:
    ceiling = ceiling_of(found.predictions)
    if ceiling is None:
        return None
    return {
        "temperature": found.temperature,
        "best_by_prompt": ceiling.best_by_prompt.as_json(),
        "always_right": round(ceiling.always_right, 3),
        "always_right_arm": ceiling.always_right_arm,
    }


def facts_of(report: Report) -> Iterator[str]:
    """The conditions of the measurement and what follows from it, a line each."""
    yield from machine_facts(report)
    prompts = report["prompts"]
    yield (
        f"The target {report['target']}. Prompts {prompts['source']}, of {prompts['tokens']} tokens on average, "
        f"answers of at most {report['answer_tokens']}: predicted on {prompts['predicted']}, rounds timed on "
        f"{prompts['timed']} of them" + (f", measured on {prompts['held_out']} others" if prompts["held_out"] else "")
    )
    yield (
        "Over off: tokens a second after the first round, over those of `off`; the median over prompts. Needed: tokens "
        "a round at which an arm is as fast as off, its round's time over that of off. From ranks: by the drafter's "
        "ranks of the target's tokens on every prompt; from runs: measured on every prompt"
    )
    for each in report["off_ms"]:
        yield f"Temperature {each['temperature']:g}: a round of off takes {each['round_ms']:.2f} ms"
    for each in report["ceilings"]:
        yield (
            f"Temperature {each['temperature']:g}: the ceiling with the best arm, or off, for each prompt is "
            f"{text_of(each['best_by_prompt'], '.2f')} of off; with a drafter of this price that is always right "
            f"{each['always_right']:.2f}, by {each['always_right_arm']}"
        )
    for each in report["trees"]:
        yield (
            f"Temperature {each['temperature']:g}: of trees of fixed form and at most {each['guesses']} guesses of "
            f"{each['drafter']}, {each['tree']} emits the most on half of the prompts; on the others it emits "
            f"{each['emitted_per_round']:.2f} tokens a round"
        )
    for each in report["unknown"]:
        if each["arms"]:
            yield f"Temperature {each['temperature']:g}: not predicted, no second round: {', '.join(each['arms'])}"
    for temperature in dict.fromkeys(row["temperature"] for row in report["rows"]):
        yield from _verdict(temperature, [row for row in report["rows"] if row["temperature"] == temperature])


def _verdict(temperature: float, rows: list[Report]) -> Iterator[str]:
    best = max(rows, key=lambda row: row["over_off"]["median"])
    parts = {PARTS[part]: ms for part, ms in best["round_ms"].items() if part not in ("total", "first_row")}
    most = max(parts, key=lambda part: parts[part])
    pays = "pays" if best["over_off"]["median"] >= 1 else "nothing pays; the best arm"
    yield (
        f"Temperature {temperature:g}: {pays}: {best['name']}, {text_of(best['over_off'], '.2f')} of off; beyond a "
        f"verified row, most of its round is {most}, {parts[most]:.2f} of {best['round_ms']['total']:.2f} ms"
    )


def predict(
    config: ConfigArgument = None,
    target: TargetName = "",
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1",
    quick: Annotated[bool, typer.Option("--quick", help="About a minute: few prompts, short answers.")] = False,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
    local: Local = False,
    prompt_file: PromptFile = None,
    prompts: Annotated[int | None, PROMPTS.info()] = None,
    timed: Annotated[int | None, TIMED.info()] = None,
    figures: Annotated[
        bool,
        typer.Option(
            "--figures",
            help="Write how often each drafter guessed right into its checkpoint: `dendro check` and new routers then "
            "expect this of it, instead of what its training measured.",
        ),
    ] = False,
    guesses: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_ROWS - 1,
            help="Also find, from the ranks, the trees of fixed form and at most so many guesses that emit the most.",
        ),
    ] = None,
    held_out: Annotated[int, typer.Option(min=0, help="Other prompts to measure on, beside the predictions.")] = 0,
    tokens: Annotated[int | None, TOKENS.info()] = None,
    seed: Annotated[int, seed_option("sampling and of the order of runs")] = 0,
) -> None:
    """Predict what each configured arm gives over no speculation on this machine, the ceiling, and where time is lost.

    The drafters' ranks of the target's own answers determine the rounds of trees of fixed form; a round's price is
    timed on a few prompts. Arms whose rounds ranks do not determine are run on every prompt. The prompts are those of
    --prompt-file; by default questions, where the target has a chat template, or else passages of code and prose and
    edits of code. Exit status 1 if an arm changed the tokens.
    """
    checked = fetched(pinned(given_config(config)))
    name = checked.target_named(target)
    plan, source = plan_of(
        checked,
        name,
        prompt_file,
        PROMPTS.value("prompts", prompts, quick),
        TIMED.value("timed", timed, quick),
        held_out,
        TOKENS.value("tokens", tokens, quick),
        seed,
    )
    levels = parse_temperatures(temperatures)
    report = with_bars(
        lambda begin: asyncio.run(run_predict(checked, plan, source, levels, local, begin, figures, guesses))
    )
    present(report, facts_of(report), cells_of((TABLE,), report), json, markdown)


def plan_of(
    config: Config, target: str, file: Path | None, prompts: int, timed: int, held_out: int, tokens: int, seed: int
) -> tuple[PredictPlan, str]:
    """The plan, and where its prompts are from. Raises BadRequest, naming the option or field."""
    arms = tuple(arm for arm in config.arms_of(target) if not arm.off)
    if not arms:
        raise BadRequest("speculation.arms", f"none but off for the target {target}: there is nothing to predict")
    if tokens > config.router.max_new_tokens:
        raise BadRequest("tokens", f"{tokens}; router.max_new_tokens is {config.router.max_new_tokens}")
    chosen = choose_prompts(file, config.targets[target], target, prompts + held_out, tokens)
    ids = chosen.ids
    plan = PredictPlan(target, arms, ids[:prompts], min(timed, prompts), ids[prompts:], tokens, seed)
    return plan, chosen.source
