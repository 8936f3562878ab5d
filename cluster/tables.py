"""Tables on standard output: nothing in them is cut, and square brackets are text, not markup."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

PLAIN_WIDTH = 150
"""Columns of the output where it is not a terminal."""


def page(width: int = PLAIN_WIDTH) -> Console:
    """Standard output, as wide as its terminal, or `width` columns where it is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def folding_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | RichText]],
    *,
    right: Collection[int] = (),
    lines: bool = False,
) -> Table:
    """A table whose long words are folded where it is too narrow for them. right: columns of numbers, by index; lines:
    whether there are lines between rows."""
    table = Table(title=RichText(title, "table.title"), title_justify="left", show_lines=lines)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(RichText(cell) if isinstance(cell, str) else cell for cell in row))
    return table
