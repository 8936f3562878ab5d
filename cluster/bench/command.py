"""`dendro bench speed`: start what is compared, measure it, say what came of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from dendro.client import AsyncClient
from dendro.errors import BadRequest
from dendro.shapes import OFF as OFF_SHAPE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging
from tree_layers.checkpoint import weight_files
from tree_layers.headers import tensor_shapes

from cluster.bench import report as reports
from cluster.bench.baselines import BaselineProcess
from cluster.bench.costly import costly_checkpoint
from cluster.bench.machine import describe_machine, describe_run
from cluster.bench.measurement import BASELINES, GENERATE
from cluster.bench.ours import Ours
from cluster.bench.speed import (
    COSTLY,
    DEMO,
    MAMBA2,
    Contenders,
    SpeedPlan,
    aims_of,
    check_and_warm,
    cost_model_of,
    measure,
    rows_of,
    step_fits_of,
)
from cluster.config import DEMO_MODELS, Config, demo_config
from cluster.demo.measure import ANSWER_TOKENS, PROMPT_TOKENS
from cluster.demo.prompts import held_out_prompts, load_tokenizer
from cluster.engines import engine_environment
from cluster.running import running

THREADS = 2
MAMBA2_TARGET = "target_mamba2"  # among the demo's models
TIME_LIMIT_S = 1140.0  # of a whole run, warm-up and starting included: a minute under 20
COSTLY_SHARE = 0.7  # of the time, where both targets are measured
CHECKED_PROMPTS = 2  # answered in every way before any is timed; of two or three, one
PLAIN_WIDTH = 150  # columns, where the output is no terminal
QUICK_PROMPTS, QUICK_TOKENS, QUICK_REPETITIONS = 2, 16, 1


class Which(StrEnum):
    """The targets that are measured."""

    DEMO = "demo"
    COSTLY = "costly"
    BOTH = "both"
    MAMBA2 = "mamba2"

    @property
    def names(self) -> tuple[str, ...]:
        return (COSTLY, DEMO) if self is Which.BOTH else (self.value,)


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """What a run was asked for, once checked."""

    targets: tuple[str, ...]
    prompts: int
    tokens: int
    repetitions: int
    temperatures: tuple[float, ...]
    local: bool
    seed: int
    models: Path

    def __post_init__(self) -> None:
        for name in ("prompts", "tokens", "repetitions"):
            if getattr(self, name) < 1:
                raise BadRequest(name, f"must be at least 1; got {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 32:
            raise BadRequest("seed", f"must be an unsigned 32-bit number; got {self.seed}")


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Read `0,1`: different finite numbers, none negative."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadRequest("temperatures", f"{text!r} is not a list of numbers such as 0,1") from None
    if any(not 0 <= temperature < float("inf") for temperature in found) or len(set(found)) != len(found):
        raise BadRequest("temperatures", f"{text!r}: each must be finite, at least 0 and named once")
    return found


def target_config(models: Path, name: str) -> Config:
    """The demo's configuration with THREADS threads, its target swapped for a costly one where that is meant.

    Nothing is shared between texts: prompts come again, and the library computes them again. Nor does any of the demo's
    proposers know a tenant's past answers: every way gives the same ones.
    """
    config = demo_config(models)
    (target,) = config.targets.values()
    checkpoint = target.checkpoint
    if name != DEMO:
        checkpoint = costly_checkpoint(checkpoint if name == COSTLY else models / MAMBA2_TARGET)
    swapped = target.model_copy(update={"checkpoint": checkpoint, "threads": THREADS, "share_prefixes": False})
    return config.model_copy(update={"targets": {name: swapped}})


def parameter_count(checkpoint: Path) -> int:
    """Parameters of a checkpoint, by the heads of its weight files; tied ones are stored and counted once."""
    return sum(map(math.prod, tensor_shapes(weight_files(checkpoint)).values()))


@asynccontextmanager
async def contenders_for(config: Config, settings: SpeedSettings) -> AsyncIterator[Contenders]:
    """Both sides of one target, started together, stopped together."""
    (target,) = config.targets.values()
    assistant = settings.models / "llama"
    if not (assistant / "config.json").exists():
        raise BadRequest("models", f"{assistant} holds no checkpoint: assisted generation needs one")
    library = BaselineProcess(
        target.checkpoint, assistant, target.dtype, target.threads, engine_environment(target.threads)
    )
    try:
        async with running(config, settings.local) as address, AsyncClient(address) as client, library:
            yield Contenders(library, Ours(client))
    finally:
        library.stop()


async def run_speed(settings: SpeedSettings, progress: Callable[[str, int], Callable[[], None]]) -> dict[str, Any]:
    """The whole measurement; the report as plain values. `progress(title, steps)` begins a bar and returns its step."""
    started = time.monotonic()
    tokenizer = load_tokenizer(settings.models)
    texts = held_out_prompts(settings.prompts, PROMPT_TOKENS, tokenizer, settings.models)
    prompts = tuple(prompt.token_ids for prompt in texts)
    rows: list[dict[str, Any]] = []
    targets: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(settings.targets):
        config = target_config(settings.models, name)
        (target,) = config.targets.values()
        shapes = tuple(str(shape) for shape in config.arms_of(name) if shape != OFF_SHAPE)
        plan = SpeedPlan(
            name,
            prompts,
            settings.tokens,
            settings.temperatures,
            settings.repetitions,
            shapes,
            BASELINES if name != MAMBA2 else (GENERATE,),  # the library's others want a cache that can be cut
            settings.seed,
        )
        share = 1.0 if place == len(settings.targets) - 1 else COSTLY_SHARE
        async with contenders_for(config, settings) as contenders:
            checked = min(CHECKED_PROMPTS, max(len(prompts) // 2, 1))
            step = progress(f"{name} target: check and warm-up", checked * len(settings.temperatures) * len(plan.rows))
            identity = await check_and_warm(plan, contenders, checked, step)
            left = TIME_LIMIT_S * share - (time.monotonic() - started)
            measured = await measure(plan, contenders, left, progress(f"{name} target: measuring", plan.answers))
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
        }
    machine = describe_machine(THREADS)
    return {
        "bench": "speed",
        "machine": machine,
        "settings": describe_run(started, settings.local, settings.seed),
        "targets": targets,
        "rows": rows,
        "cost_model": list(cost_model_of(rows)),
        "step_fits": list(step_fits_of(rows)),
        "aims": aims_of(rows, THREADS, machine["accelerator"]) if settings.targets != (MAMBA2,) else [],
    }


class Bars:
    """Progress bars that redraw themselves when an answer is done and at no other time: no thread runs beside."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )

    def begin(self, title: str, steps: int) -> Callable[[], None]:
        task = self.progress.add_task(title, total=steps)
        self.progress.refresh()

        def step() -> None:
            self.progress.advance(task)
            self.progress.refresh()

        return step


def bench_speed(
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: few prompts, short answers, one target.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture; its suffix says of what kind.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Held-out prompts. (default 16; quick 2)")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="New tokens of every answer. (default as the model card recommends; quick 16)")
    ] = None,
    repetitions: Annotated[int | None, typer.Option(help="At each temperature. (default 2; quick 1)")] = None,
    target: Annotated[
        Which | None,
        typer.Option(
            help="mamba2 is the costly form of the demo's Mamba-2 target. (default both; quick costly)",
            show_default=False,
        ),
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0,1",
    local: Annotated[bool, typer.Option("--local", help="Our engines in this process, without Ray.")] = False,
    seed: Annotated[int, typer.Option(help="Of the order, and of what is drawn.")] = 0,
    models: Annotated[Path, typer.Option(help="A folder as `dendro train demo` writes it.")] = DEMO_MODELS,
) -> None:
    """Compare speeds: transformers' generate, its prompt lookup and its assisted generation; ours without speculation,
    with each static tree and with the policy. All in one run, interleaved, on the demo target and on a costly one of
    the same function. Ends with status 1 where ours answered differently with speculation than without.
    """
    settings = SpeedSettings(
        targets=(target or (Which.COSTLY if quick else Which.BOTH)).names,
        prompts=prompts if prompts is not None else QUICK_PROMPTS if quick else 16,
        tokens=tokens if tokens is not None else QUICK_TOKENS if quick else ANSWER_TOKENS,
        repetitions=repetitions if repetitions is not None else QUICK_REPETITIONS if quick else 2,
        temperatures=parse_temperatures(temperatures),
        local=local,
        seed=seed,
        models=models,
    )
    logging.disable_progress_bar()  # the library's own, while it loads: ours are beside it
    bars = Bars(Console(stderr=True))
    with bars.progress:
        report = asyncio.run(run_speed(settings, bars.begin))
    console = Console()
    reports.show(console if console.is_terminal else Console(width=PLAIN_WIDTH), report)
    facts, tables = reports.facts_of(report), reports.tables_of(report)
    reports.write_reports(report, facts, tables, reports.plot, json, markdown, plot)
    if different(report):
        raise typer.Exit(1)


def different(report: dict[str, Any]) -> Sequence[str]:
    """The answers of ours that speculation changed: there should be none."""
    return [line for target in report["targets"].values() for line in target["identity"]["differences"]]
