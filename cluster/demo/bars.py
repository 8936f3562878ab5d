"""The progress of a training stage: a bar on a terminal, printed lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 30.0  # where the output is no terminal


@contextmanager
def stage_bar(name: str) -> Iterator[Callable[[float, str], None]]:
    """Yields `report(fraction done, words)`: a bar on a terminal, a line every LINE_EVERY_S elsewhere."""
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


def _line_printer(name: str) -> Callable[[float, str], None]:
    started = printed = time.monotonic()

    def report(fraction: float, words: str) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= LINE_EVERY_S or fraction >= 1:
            printed = now
            print(f"{name:8} {fraction:6.1%}  {words}  ({now - started:.0f} s)", flush=True)

    return report
