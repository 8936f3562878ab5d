"""`dendro bench speed`: start our cluster and the library, measure both, report."""

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
from cluster.bench.ours import ClusterClient
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
MAMBA2_TARGET = "target_mamba2"  # folder among the demo's models
TIME_LIMIT_S = 1140.0  # of a whole run, startup and warm-up included: 19 minutes
COSTLY_SHARE = 0.7  # of the time limit, for the first of two targets
CHECKED_PROMPTS = 2  # answered in every way before timing starts; 1 if there are fewer than 4
PLAIN_WIDTH = 150  # columns, if the output is not a terminal
QUICK_PROMPTS, QUICK_TOKENS, QUICK_REPETITIONS = 2, 16, 1


class Which(StrEnum):
    """The targets to measure."""

    DEMO = "demo"
    COSTLY = "costly"
    BOTH = "both"
    MAMBA2 = "mamba2"

    @property
    def names(self) -> tuple[str, ...]:
        return (COSTLY, DEMO) if self is Which.BOTH else (self.value,)


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """Validated options of a run."""

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
    """Parse `0,1`: distinct finite numbers, none negative."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadRequest("temperatures", f"{text!r} is not a list of numbers such as 0,1") from None
    if any(not 0 <= temperature < float("inf") for temperature in found) or len(set(found)) != len(found):
        raise BadRequest("temperatures", f"{text!r}: each must be finite, at least 0 and named once")
    return found


def target_config(models: Path, name: str) -> Config:
    """The demo's configuration with THREADS threads; a name other than `demo` replaces its target by a costly one.

    The prefix cache is off: prompts repeat, and the library has none. The demo's proposers do not use earlier answers:
    these contain the next ones, as all rows give the same answers.
    """
    config = demo_config(models)
    (target,) = config.targets.values()
    checkpoint = target.checkpoint
    if name != DEMO:
        checkpoint = costly_checkpoint(checkpoint if name == COSTLY else models / MAMBA2_TARGET)
    swapped = target.model_copy(update={"checkpoint": checkpoint, "threads": THREADS, "share_prefixes": False})
    return config.model_copy(update={"targets": {name: swapped}})


def parameter_count(checkpoint: Path) -> int:
    """Parameters of a checkpoint, by the headers of its weight files; tied ones are stored and counted once."""
    return sum(map(math.prod, tensor_shapes(weight_files(checkpoint)).values()))


@asynccontextmanager
async def contenders_for(config: Config, settings: SpeedSettings) -> AsyncIterator[Contenders]:
    """Start our cluster and the library for one target; both stop at the end."""
    (target,) = config.targets.values()
    assistant = settings.models / "llama"
    if not (assistant / "config.json").exists():
        raise BadRequest("models", f"{assistant} holds no checkpoint: assisted generation needs one")
    library = BaselineProcess(
        target.checkpoint, assistant, target.dtype, target.threads, engine_environment(target.threads)
    )
    try:
        async with running(config, settings.local) as address, AsyncClient(address) as client, library:
            yield Contenders(library, ClusterClient(client))
    finally:
        library.stop()


async def run_speed(settings: SpeedSettings, progress: Callable[[str, int], Callable[[], None]]) -> dict[str, Any]:
    """Run the whole measurement; returns the report. `progress(title, steps)` begins a bar and returns its step."""
    started = time.monotonic()
    tokenizer = load_tokenizer(settings.models)
    texts = held_out_prompts(settings.prompts, PROMPT_TOKENS, tokenizer, settings.models)
    prompts = tuple(prompt.token_ids for prompt in texts)
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
            BASELINES if name != MAMBA2 else (GENERATE,),  # the library's others need a cache that can be cropped
            settings.seed,
        )
        share = 1.0 if index == len(settings.targets) - 1 else COSTLY_SHARE
        async with contenders_for(config, settings) as contenders:
            checked = min(CHECKED_PROMPTS, max(len(prompts) // 2, 1))
            step = progress(f"{name} target: check and warm-up", checked * len(settings.temperatures) * len(plan.rows))
            identity = await check_and_warm(plan, contenders, checked, step)
            remaining_s = TIME_LIMIT_S * share - (time.monotonic() - started)
            measured = await measure(plan, contenders, remaining_s, progress(f"{name} target: measuring", plan.answers))
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
    """Progress bars that are redrawn only when a step is done: without a refresh thread."""

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
    plot: Annotated[Path | None, typer.Option(help="Write a plot; the suffix sets its format.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Number of held-out prompts. (default 16; quick 2)")] = None,
    tokens: Annotated[int | None, typer.Option(help="New tokens of every answer. (default 64; quick 16)")] = None,
    repetitions: Annotated[
        int | None, typer.Option(help="Repetitions of each prompt at each temperature. (default 2; quick 1)")
    ] = None,
    target: Annotated[
        Which | None,
        typer.Option(
            help="What to measure; mamba2: the costly form of the demo's Mamba-2 target. (default both; quick costly)",
            show_default=False,
        ),
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Sampling temperatures, separated by commas.")] = "0,1",
    local: Annotated[bool, typer.Option("--local", help="Run our engines in this process, without Ray.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the order and of sampling.")] = 0,
    models: Annotated[Path, typer.Option(help="Folder written by `dendro train demo`.")] = DEMO_MODELS,
) -> None:
    """Compare speeds: transformers' generate, its prompt lookup and its assisted generation; ours without speculation,
    with each configured shape and with the policy. All in one run, interleaved, on the demo target and on a costly one
    of the same function. Exits with status 1 if ours answered differently with speculation than without.
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
    logging.disable_progress_bar()  # the library's loading bars would mix with ours
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
    """Our answers that speculation changed; expected to be none."""
    return [line for target in report["targets"].values() for line in target["identity"]["differences"]]
