"""The progress of a training stage: a bar on a terminal, printed lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drafter_service.training.loop import Progress as TrainingProgress

LINE_EVERY_S = 30.0  # seconds between lines where the output is no terminal

Report = Callable[[float, str], None]
"""`report(fraction done, words)`."""


@contextmanager
def stage_bar(name: str) -> Iterator[Report]:
    """Yields a report: a bar on a terminal, a line every LINE_EVERY_S elsewhere."""
    console = Console()
    if not console.is_terminal:
        yield _line_printer(name)
        return
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %  {task.fields[words]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=1.0, words="")
        yield lambda fraction, words: bar.update(task, completed=fraction, words=words)


def shown(report: Report) -> Callable[[TrainingProgress], None]:
    """Called by a trainer after each step."""
    return lambda progress: report(progress.spent, f"loss {progress.loss:.3f}, {progress.tokens_per_s:,.0f} tokens/s")


def _line_printer(name: str) -> Report:
    started = printed = time.monotonic()
    first: float | None = None  # fraction that was done when this run reported first; None: it has not reported

    def report(fraction: float, words: str) -> None:
        nonlocal printed, started, first
        now = time.monotonic()
        if first is None:
            first, started = fraction, now
        if now - printed >= LINE_EVERY_S or fraction >= 1:
            printed = now
            left = (now - started) * (1 - fraction) / (fraction - first) if fraction > first else None
            remaining = "" if left is None or fraction >= 1 else f", {max(left, 0):.0f} s left"
            print(f"{name:8} {fraction:6.1%}  {words}  ({now - started:.0f} s{remaining})", flush=True)

    return report
