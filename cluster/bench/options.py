"""What the commands of all benches share: their options, progress bars, and how a report is shown and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from dendro.errors import BadRequest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging

from cluster.bench.measurement import Begin, Step
from cluster.bench.report import Cells, Report, as_json, as_markdown, show
from cluster.tables import PLAIN_WIDTH, page

JsonFile = Annotated[Path | None, typer.Option(help="Write the report as JSON.")]
PlotFile = Annotated[Path | None, typer.Option(help="Write a plot; the suffix sets its format.")]
MarkdownFile = Annotated[Path | None, typer.Option(help="Write the tables as Markdown.")]
Models = Annotated[Path, typer.Option(help="Folder written by `dendro train demo`.")]
Temperatures = Annotated[str, typer.Option(help="Sampling temperatures, separated by commas.")]

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def chosen(given: T | None, quick: bool, brief: T, full: T) -> T:
    """An option's value, or its default: `brief` with --quick, else `full`."""
    return given if given is not None else brief if quick else full


def check_counts(**counts: int) -> None:
    """Raises BadRequest for the first that is below 1."""
    for name, count in counts.items():
        if count < 1:
            raise BadRequest(name, f"must be at least 1; got {count}")


def check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 32:
        raise BadRequest("seed", f"must be an unsigned 32-bit number; got {seed}")


def numbers_in(field: str, text: str, kind: Callable[[str], Number], least: Number, count: int = 1) -> list[Number]:
    """Parse `1,4,16`: at least `count` distinct finite numbers, none below `least`."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise BadRequest(field, f"{text!r} is no list of numbers with commas between them") from None
    if not all(least <= number < float("inf") for number in found) or len(set(found)) != len(found):
        raise BadRequest(field, f"{text!r}: each must be finite, at least {least} and named once")
    if len(found) < count:
        raise BadRequest(field, f"{text!r}: name at least {count}")
    return found


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Parse `0,1`: distinct finite numbers, none negative."""
    return tuple(numbers_in("temperatures", text, float, 0))


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

    def begin(self, title: str, steps: int) -> Step:
        task = self.progress.add_task(title, total=steps)
        self.progress.refresh()

        def step() -> None:
            self.progress.advance(task)
            self.progress.refresh()

        return step


def with_bars(measure: Callable[[Begin], T]) -> T:
    """The result of a measurement, which draws its progress on the terminal."""
    logging.disable_progress_bar()  # of transformers, which would mix with ours
    bars = Bars(Console(stderr=True))
    with bars.progress:
        return measure(bars.begin)


def present(
    report: Report,
    facts: Iterable[str],
    tables: Iterable[Cells],
    json: Path | None,
    markdown: Path | None,
    plot: Path | None = None,
    draw: Callable[[Report, Path], None] | None = None,
    *,
    differences: Sequence[str] = (),
    width: int = PLAIN_WIDTH,
) -> None:
    """Show a report, and write it in every format that has a path. `differences`: answers that speculation changed;
    exits with status 1 where there are some."""
    facts, tables = list(facts), list(tables)
    show(page(width), facts, tables, differences)
    for path in (json, markdown, plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json is not None:
        json.write_text(as_json(report))
    if markdown is not None:
        markdown.write_text(as_markdown(report, facts, tables))
    if plot is not None and draw is not None:
        draw(report, plot)
    if differences:
        raise typer.Exit(1)
