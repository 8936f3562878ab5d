"""What the reports of all benches share: the machine, tables, aims, figures, files. Nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.measure.statistics import CONFIDENCE
from cluster.tables import folding_table

Report = Mapping[str, Any]
Row = dict[str, Any]
Cells = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, columns and rows of a table."""
MET = {True: "met", False: "MISSED", None: "not judged"}
MOST_DIFFERENCES = 10
"""Answers changed by speculation that are printed."""
VERTICAL = "\\|"
"""A vertical bar in a cell of Markdown."""


# Cells
def text_of(value: Any, form: str = "") -> str:
    """A cell: an estimate with its interval, a mapping or a list with commas, else the value by its format."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        if "median" in value:
            return f"{value['median']:{form}} ({value['low']:{form}}-{value['high']:{form}})"
        return ", ".join(f"{key} {text_of(each, form)}" for key, each in value.items())
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, list | tuple):
        return ", ".join(text_of(each, form) for each in value)
    return value if isinstance(value, str) else format(value, form)


# Aims
def aim_row(aim: str, bar: float, met: bool | None, value: float | None, found: Any, why: str = "") -> Row:
    """An aim of a report. value: that is judged, of the field `found`, a number or an estimate"""
    row: Row = {"aim": aim, "value": value, "interval": None, "bar": bar, "met": met}
    few = ""
    if isinstance(found, Mapping):
        row["interval"] = [found["low"], found["high"]]
        if found["coverage"] < CONFIDENCE:
            few = f"few measurements: the interval is their range and covers {found['coverage']:.0%}"
    if reasons := "; ".join(filter(None, (why, few))):
        row["why"] = reasons
    return row


def aims_table(report: Report) -> Cells:
    """The aims, and whether they were met."""
    cells: list[tuple[str, ...]] = [
        (
            aim["aim"],
            text_of(aim["value"], ".3f"),
            f"{aim['interval'][0]:.3f}-{aim['interval'][1]:.3f}" if aim["interval"] else "",
            f"{aim['bar']:g}",
            MET[aim["met"]],
            aim.get("why", ""),
        )
        for aim in report["aims"]
    ]
    return "Aims", ("aim", "value", "90 %", "bar", "", "why"), cells


# Text
def machine_facts(report: Report) -> Iterator[str]:
    """Lines about the machine, the date and the settings of a measurement."""
    machine, settings = report["machine"], report["settings"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    environment = ", ".join(f"{name}={value}" for name, value in machine["environment"].items())
    yield f"Command: `{settings['command']}`"
    where = "the engines in the bench's process" if settings["local"] else "Ray Serve, gRPC and Redis"
    yield f"Date: {settings['date']}; commit {settings['commit']}; took {settings['seconds']:.0f} s; ours on {where}"
    yield (
        f"Hardware: {machine['processor']}, {machine['cores']} cores, accelerator {machine['accelerator'] or 'none'}; "
        f"{machine['threads']} threads for each engine"
    )
    yield f"Software: Python {machine['python']}, {libraries}; environment {environment or 'default'}"


def show(console: Console, facts: Iterable[str], tables: Iterable[Cells], differences: Sequence[str] = ()) -> None:
    """Print facts, tables, and the answers that speculation changed."""
    for fact in facts:
        console.print(fact, highlight=False, markup=False)
    for title, columns, rows in tables:
        right = [
            index for index, column in enumerate(columns) if index and column not in ("why", "shapes picked", "found")
        ]
        console.print(folding_table(title, columns, rows, right=right))
    for line in differences[:MOST_DIFFERENCES]:
        console.print(f"DIFFERENT: {line}", style="red", markup=False)


def as_markdown(report: Report, facts: Iterable[str], tables: Iterable[Cells], picture: str = "") -> str:
    """The report as Markdown, under the name of its command. picture: the path of its plot from there"""
    bench = report["bench"]
    lines = [
        f"# dendro {bench if bench in ('tune', 'predict', 'certify') else f'bench {bench}'}",
        "",
        *(f"- {fact}" for fact in facts),
        *(("", f"![The figures of these tables]({picture})") if picture else ()),
    ]
    for title, columns, rows in tables:
        lines += ["", f"## {title}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [f"| {' | '.join(cell.replace('|', VERTICAL) for cell in cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def as_json(report: Report) -> str:
    return json.dumps(report, indent=1) + "\n"


# Figures
@contextmanager
def figure_at(path: Path, rows: int, columns: int, width: float, height: float) -> Iterator[Any]:
    """[rows, columns] axes of a figure, in inches, that is written to `path` at the end; its suffix sets the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False)
    yield axes
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")  # whole, with legends that are wider than their axes
    pyplot.close(figure)


def medians(found: Iterable[Mapping[str, float] | float]) -> tuple[list[float], list[list[float]]]:
    """Medians, and the lengths of their error bars below and above; those of plain numbers are 0."""
    ends = [each if isinstance(each, Mapping) else dict.fromkeys(("median", "low", "high"), each) for each in found]
    below = [each["median"] - each["low"] for each in ends]
    return [each["median"] for each in ends], [below, [each["high"] - each["median"] for each in ends]]
