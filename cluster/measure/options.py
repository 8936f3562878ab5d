"""What the commands of all benches share: their options, progress bars, and how a report is shown and written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from dendro.clock import Clock
from dendro.errors import BadRequest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging
from typer.models import OptionInfo

from cluster.command_options import writable
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Cells, Report, as_json, as_markdown, show
from cluster.replaced_files import replace_text
from cluster.tables import PLAIN_WIDTH, page


def _drawable(path: Path | None) -> Path | None:
    """The file of a plot, as it is given. Raises BadRequest where it cannot be written, or its suffix names no format
    of plots."""
    if path is not None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        formats = FigureCanvasAgg.get_supported_filetypes()
        if path.suffix.removeprefix(".").lower() not in formats:
            raise BadRequest("--plot", f"{path} must end in one of {', '.join(f'.{each}' for each in sorted(formats))}")
    return writable("--plot")(path)


PlotFile = Annotated[
    Path | None,
    typer.Option(help="Write a plot; the suffix sets its format.", show_default=False, callback=_drawable),
]
MarkdownFile = Annotated[
    Path | None,
    typer.Option(help="Write the tables as Markdown.", show_default=False, callback=writable("--markdown")),
]

BY_HAND = "<!-- by hand -->"
"""What follows it on a page stays when a report is written there."""
LINE_EVERY_S = 30.0
"""Seconds between two lines of progress where the standard error is no terminal."""
T = TypeVar("T")
Number = TypeVar("Number", int, float)


def as_given(default: object) -> str:
    """A default as it would be given on the command line."""
    if isinstance(default, tuple):
        return ",".join(map(as_given, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def seed_option(of: str) -> OptionInfo:
    """--seed, an unsigned 32-bit number."""
    option: OptionInfo = typer.Option(min=0, max=(1 << 32) - 1, help=f"Seed of {of}.")
    return option


def numbers_in(field: str, text: str, kind: Callable[[str], Number], least: Number) -> list[Number]:
    """Parse `1,4,16`: distinct finite numbers, none below `least`."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        raise BadRequest(field, f"{text!r} is no list of numbers with commas between them") from None
    if not all(least <= number < float("inf") for number in found) or len(set(found)) != len(found):
        raise BadRequest(field, f"{text!r}: each must be finite, at least {least} and named once")
    return found


def parse_temperatures(text: str) -> tuple[float, ...]:
    """Parse `0,1`: distinct finite numbers, none negative."""
    return tuple(numbers_in("temperatures", text, float, 0))


def with_bars(measure: Callable[[Begin], T]) -> T:
    """The result of a measurement, with its progress at the standard error: bars on a terminal, lines elsewhere."""
    logging.disable_progress_bar()  # transformers draws some, which would mix with ours
    console = Console(stderr=True)
    if not console.is_terminal:
        return measure(partial(_lines, time.monotonic))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    # No thread draws the bars while something is timed: they are drawn again after each step alone.
    with Progress(*columns, *left, console=console, auto_refresh=False) as progress:

        def begin(title: str, steps: int) -> Step:
            task = progress.add_task(title, total=steps)
            progress.refresh()

            def step() -> None:
                progress.advance(task)
                progress.refresh()

            return step

        return measure(begin)


def _lines(clock: Clock, title: str, steps: int) -> Step:
    """Print a line when a part of the measurement begins, each LINE_EVERY_S at most one of its steps, and its last."""
    began = printed = clock()
    done = 0
    print(f"{title}: {steps} steps", file=sys.stderr, flush=True)

    def step() -> None:
        nonlocal done, printed
        done, now = done + 1, clock()
        if now - printed >= LINE_EVERY_S or done == steps:
            printed = now
            print(f"{title}: {done} of {steps}, {now - began:.0f} s", file=sys.stderr, flush=True)

    return step


def present(
    report: Report,
    facts: Iterable[str],
    tables: Iterable[Cells],
    json: Path | None,
    markdown: Path | None,
    plot: Path | None = None,
    draw: Callable[[Report, Path], None] | None = None,
    *,
    width: int = PLAIN_WIDTH,
) -> None:
    """Show a report, and write it in every format that has a path. Exits with status 1 where it has `differences`:
    answers that speculation changed."""
    facts, tables, differences = list(facts), list(tables), report.get("differences", ())
    show(page(width), facts, tables, differences)
    for path in (json, markdown, plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if json is not None:
        replace_text("--json", json, as_json(report))
    if markdown is not None:
        picture = os.path.relpath(plot, markdown.parent) if plot is not None and draw is not None else ""
        by_hand = markdown.read_text().partition(BY_HAND)[1:] if markdown.exists() else ()
        text = "\n".join(filter(None, (as_markdown(report, facts, tables, picture), "".join(by_hand))))
        replace_text("--markdown", markdown, text)
    if plot is not None and draw is not None:
        draw(report, plot)
    if differences:
        raise typer.Exit(1)
