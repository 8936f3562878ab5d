"""What a bench declares (options, rows, columns, aims, plots), and what all share: the command, the report, its files.

A bench is one function that returns rows, and declarations of how they are shown. A row is a mapping; a number with an
interval is an estimate (`Estimate.as_json`). Declarations name a field of a row by its path, `over_off` or `ms/ours`:

>>> table = ReportTable("Of {kind}", "rows", "arm; tokens/s = rate:.1f; * ms = ms/*:.2f")
>>> rows = [{"kind": "code", "arm": "off", "rate": 9.25, "ms": {"step": {"median": 2, "low": 1, "high": 3}}}]
>>> list(table.cells({"rows": rows}))
[('Of code', ('arm', 'tokens/s', 'step ms'), [('off', '9.2', '2.00 (1.00-3.00)')])]
"""

from __future__ import annotations

import ast
import asyncio
import gc
import hashlib
import inspect
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import torch
import typer
from dendro.errors import BadRequest
from transformers.utils import logging

from cluster.command_options import JsonFile
from cluster.config import DEMO_MODELS
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import MarkdownFile, PlotFile, as_given, numbers_in, present, with_bars
from cluster.measure.report import Cells, Report, Row, aim_row, aims_table, figure_at, machine_facts, medians, text_of
from cluster.measure.targets import THREADS
from cluster.tables import PLAIN_WIDTH

ROOT = Path(__file__).parents[2]
OLDER = "Older than the code that it measures"
S = TypeVar("S")  # the options of a bench
Found = dict[str, Any]
"""What a bench finds: `plan`, a mapping, and lists of rows."""
KeptReport = Annotated[
    Path | None, typer.Option("--report", help="Show this report, kept by --json: nothing is measured.")
]


# Options
@dataclass(frozen=True, slots=True)
class BenchOption:
    """How one field of a bench's options is given on the command line: by its name, or by place as an argument."""

    help: str
    full: Any  # default
    quick: Any  # default with --quick
    least: int | None = None
    most: int | None = None
    of: Callable[[str], Any] | None = None  # reads the parts of a list; None: that of its default
    shown: bool = True  # True if help states the default
    argument: bool = False

    def info(self, name: str = "") -> Any:
        """The option of a command, or its argument of this name. Its value is None unless it is given."""
        listed = isinstance(self.full, tuple)
        limits: dict[str, Any] = {} if self.least is None or listed else {"min": self.least, "max": self.most}
        if self.argument:
            limits["metavar"] = f"[{name.rstrip('s').upper()}]" + "..." * listed
        text = self.help + (self._defaults if self.shown else "")
        return (typer.Argument if self.argument else typer.Option)(help=text, show_default=False, **limits)

    def parameter(self, name: str, kind: Any) -> inspect.Parameter:
        """The parameter of the command for this field."""
        if kind is bool and not self.full:
            flag = typer.Option(False, f"--{name.replace('_', '-')}", help=self.help)
            return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=flag, annotation=bool)
        if isinstance(self.full, tuple):
            kind = list[Path] if self.argument else str
        kind = Annotated[kind | None, self.info(name)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)

    def value(self, name: str, given: Any, quick: bool) -> Any:
        """The field's value: as given, or its default."""
        if given is None or given == []:
            return self.quick if quick else self.full
        if not isinstance(self.full, tuple) or self.argument:
            return tuple(given) if self.argument and isinstance(given, list) else given
        kind: Any = self.of or type(self.full[0])
        if kind is str:
            return tuple(part.strip() for part in given.split(","))
        return tuple(sorted(numbers_in(name, given, kind, self.least or 0)))

    @property
    def _defaults(self) -> str:
        full, quick = as_given(self.full), as_given(self.quick)
        return f" (default {full}; quick {quick})" if full != quick else f" (default {full})"


def option(help: str, full: Any, quick: Any = None, **limits: Any) -> Any:
    """A field of a bench's options. quick: its default with --quick, where that is another   limits: of BenchOption

    A bench whose options have a plain field `quick` gets that flag itself, too."""
    declared = BenchOption(help, full, full if quick is None else quick, **limits)
    return field(default=full, metadata={"option": declared})


def seed() -> Any:
    return option("Seed of all that is random.", 0, least=0, most=(1 << 32) - 1)


def models() -> Any:
    return option("Folder written by `dendro train demo`. Default: the bundled one.", DEMO_MODELS, shown=False)


def prompt_file() -> Any:
    text = "JSON lines, each with messages, a prompt (a user's message) or a text, and perhaps its category."
    return option(text, None, shown=False)


def temperatures() -> Any:
    return option("Sampling temperatures, separated by commas.", (0.0, 1.0))


# Fields of rows
def at(row: Any, path: Sequence[str]) -> Any:
    """The value at a path of keys; None where it is missing."""
    for key in path:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def filled(text: str, row: Mapping[str, Any]) -> str | None:
    """A text with a row's fields in it; None if one of them is missing or empty."""
    names = [re.split(r"[\[.]", name)[0] for _, name, _, _ in Formatter().parse(text) if name]
    return text.format_map(row) if all(row.get(name) not in (None, "", [], {}) for name in names) else None


def rows_at(report: Report, key: str) -> Sequence[Row]:
    """Rows of a report, also those that it has by their names."""
    found = report.get(key, ())
    return [{"name": name} | row for name, row in found.items()] if isinstance(found, Mapping) else found


def judged_as(kind: str, name: str, **fields: Any) -> Callable[[Row], bool]:
    """Whether a row has this name and these fields, and its aims are those of a kind of target."""
    wanted = {"judged": kind, "name": name, **fields}
    return lambda row: all(row[each] == value for each, value in wanted.items())


Where = Callable[[Row], bool] | None
"""Which rows are meant; None: all."""


def grouped(name: str, rows: Iterable[Row], where: Where = None) -> dict[str, list[Row]]:
    """Rows by the text that they make of a name with fields."""
    found: dict[str, list[Row]] = {}
    for row in filter(where, rows):
        found.setdefault(name.format_map(row), []).append(row)
    return found


@dataclass(frozen=True, slots=True)
class Column:
    """A field of rows and how it is shown."""

    head: str
    path: tuple[str, ...]
    form: str

    @classmethod
    def all_of(cls, columns: str, rows: Sequence[Row]) -> Iterator[Column]:
        """Columns written as `head = path:format` with semicolons between them. A path that ends with `*` stands for
        all keys there, each of which replaces the star of its head."""
        for each in columns.split(";"):
            head, _, place = each.strip().rpartition(" = ")
            place, _, form = place.partition(":")
            path = tuple(place.split("/"))
            if path[-1] != "*":
                yield cls(head or place, path, form)
                continue
            for key in dict.fromkeys(key for row in rows for key in at(row, path[:-1]) or ()):
                yield cls((head or "*").replace("*", key), (*path[:-1], key), form)


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows of the report, as a table for each title that they make."""

    title: str
    rows: str
    columns: str
    where: Where = None

    def cells(self, report: Report) -> Iterator[Cells]:
        for title, rows in grouped(self.title, rows_at(report, self.rows), self.where).items():
            columns = list(Column.all_of(self.columns, rows))
            texts = [[text_of(at(row, each.path), each.form) for row in rows] for each in columns]
            shown = [index for index, column in enumerate(texts) if any(column)]  # empty columns are left out
            cells = [tuple(texts[index][row] for index in shown) for row in range(len(rows))]
            yield title, tuple(columns[index].head for index in shown), cells


def cells_of(tables: Iterable[ReportTable], report: Report) -> Iterator[Cells]:
    """These tables of a report, then its aims."""
    for each in tables:
        yield from each.cells(report)
    if report["aims"]:
        yield aims_table(report)


@dataclass(frozen=True, slots=True)
class Aim:
    """A bar that a field must reach, `least` or `most`: one aim for each name that rows make, judged by the worst."""

    name: str
    rows: str
    path: str
    least: float | str | None = None  # a text names the rows' field that has the bar
    most: float | None = None
    end: str = "median"  # the end of an estimate that is judged
    where: Where = None
    why: str = ""  # reason that is shown where the aim is missed, with fields of the row

    def judged(self, report: Report) -> Iterator[Row]:
        """A row for each name; not judged where no row has a value."""
        path = self.path.split("/")
        for name, rows in grouped(self.name, rows_at(report, self.rows), self.where).items():
            bar: Any = self.most if self.least is None else self.least
            bar = rows[0][bar] if isinstance(bar, str) else bar
            found = [(self._value(value), row) for row in rows if (value := at(row, path)) is not None]
            if not found:
                yield aim_row(name, bar, None, None, None, "was not measured")
                continue
            value, row = (max if self.least is None else min)(found, key=lambda each: each[0])
            met = value <= bar if self.least is None else value >= bar
            yield aim_row(name, bar, met, value, at(row, path), "" if met else self.why.format_map(row))

    def _value(self, found: Any) -> float:
        value: float = found[self.end] if isinstance(found, Mapping) else found
        return value


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over a field of rows, or bars where that is a text: a panel for each title, a line or a colour for each
    label. x, y: as one column of a table"""

    rows: str
    x: str
    y: str
    line: str = ""
    panel: str = ""
    log: str = ""  # the axes that are logarithmic: x, y or xy
    where: Where = None

    def panels(self, report: Report) -> Iterator[tuple[str, Callable[[Any], None]]]:
        """Each title, and what draws its axes."""
        for title, rows in grouped(self.panel, rows_at(report, self.rows), self.where).items():
            yield title, partial(self._draw, rows)

    def _draw(self, rows: Sequence[Row], axis: Any) -> None:
        (x,) = Column.all_of(self.x, rows)
        lines = [(label, y, own) for label, own in grouped(self.line, rows).items() for y in Column.all_of(self.y, own)]
        named = [str(at(row, x.path)) for row in rows] if isinstance(at(rows[0], x.path), str) else []
        names = list(dict.fromkeys(named))[::-1]
        for index, (label, y, own) in enumerate(lines):
            points = [(at(row, x.path), at(row, y.path)) for row in own if at(row, y.path) is not None]
            middles, reach = medians(each for _, each in points)
            name = " ".join(filter(None, (label, y.path[-1] if "*" in self.y else "")))
            if names:
                places = [names.index(place) + 0.8 * index / len(lines) for place, _ in points]
                hatch = "////" if index // 10 % 2 else ""  # there are ten colours
                bars = {"xerr": reach, "ecolor": "black", "capsize": 2, "hatch": hatch, "label": name}
                axis.barh(places, middles, 0.8 / len(lines), **bars)
            else:
                axis.errorbar([place for place, _ in points], middles, reach, fmt="o-", markersize=4, label=name)
        for each in self.log:
            getattr(axis, f"set_{each}scale")("log")
        x_label, y_label = x.head, self.y.rpartition(" = ")[0].replace("*", "").strip()
        if names:
            axis.set_yticks([place + 0.4 - 0.4 / len(lines) for place in range(len(names))], names)
            x_label, y_label = y_label, ""
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        if self.line or "*" in self.y:
            beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(lines) > 6 else {}
            axis.legend(frameon=False, fontsize=7, **beside)


def draw(plots: Iterable[Plot], report: Report, path: Path) -> None:
    """Write a figure of all panels, at most three beside each other."""
    panels = [panel for plot in plots for panel in plot.panels(report)]
    wide = min(3, len(panels))
    high = -(-len(panels) // wide)
    with figure_at(path, high, wide, 5.0 * wide, 4.0 * high) as axes:
        for index, axis in enumerate(axes.flat):
            if index >= len(panels):
                axis.set_axis_off()
                continue
            title, fill = panels[index]
            fill(axis)
            axis.set_title(title, fontsize=9)


# A bench
@dataclass(frozen=True, slots=True)
class Bench(Generic[S]):
    """What distinguishes one bench from another."""

    name: str
    help: str
    quick: str  # help of --quick
    options: type[S]  # a dataclass whose fields are made by `option`
    measure: Callable[[S, Begin], Found | Coroutine[Any, Any, Found]]
    facts: tuple[str, ...]  # conditions of a measurement, with fields of `plan`; left out where one is empty
    tables: tuple[ReportTable, ...]
    aims: tuple[Aim, ...] = ()
    plots: tuple[Plot, ...] = ()
    threads: int = THREADS  # threads of each engine, unless an option or the report says so
    local: bool = True  # True if our engines ran in the bench's process
    width: int = PLAIN_WIDTH  # columns of the terminal where there is none
    code: tuple[str, ...] = ()  # files and folders of the checkout whose code is measured

    def report(self, options: S, begin: Begin) -> Report:
        """Measure; the whole report."""
        started, threads = time.monotonic(), getattr(options, "threads", self.threads)
        torch.set_num_threads(threads)
        logging.set_verbosity_error()
        found = self.measure(options, begin)
        if not isinstance(found, dict):
            found = asyncio.run(found)
        local, seed = getattr(options, "local", self.local), getattr(options, "seed", 0)
        shown = [name for name, each in _declared(self.options).items() if each.shown]
        report = {
            **report_head(self.name, started, local, seed, found.pop("threads", threads)),
            "code": digests(self.code),
            "options": {name: as_given(getattr(options, name)) for name in shown},
            **found,
        }
        return report | {"aims": [row for aim in self.aims for row in aim.judged(report)]}

    def kept(self, file: Path) -> Report:
        """A report that was kept as JSON. Raises BadRequest for another file."""
        try:
            report: Report = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise BadRequest("report", f"{file} cannot be read as JSON: {error}") from None
        if not isinstance(report, dict) or report.get("bench") != self.name:
            raise BadRequest("report", f"{file} is no report of `dendro bench {self.name}`")
        return report

    def all_facts(self, report: Report) -> Iterator[str]:
        yield from machine_facts(report)
        yield "Options: " + "; ".join(f"{name} {value}" for name, value in report["options"].items())
        yield from filter(None, (filled(fact, report["plan"]) for fact in self.facts))
        changed = [each for each, now in digests(self.code).items() if report["code"].get(each) != now]
        if changed:
            yield f"{OLDER}: {', '.join(changed)} changed since"

    def all_tables(self, report: Report) -> Iterator[Cells]:
        yield from cells_of(self.tables, report)

    def chosen(self, given: Mapping[str, Any], quick: bool) -> S:
        """The options, of those given on the command line and of the defaults."""
        values = {name: each.value(name, given[name], quick) for name, each in _declared(self.options).items()}
        own: Any = self.options
        return self.options(**values, **({"quick": quick} if "quick" in [each.name for each in fields(own)] else {}))

    def command(self) -> Callable[..., None]:
        """The function of the command, with a parameter for each option."""
        shared = inspect.signature(_shared, eval_str=True).parameters
        quick = shared["quick"].replace(default=typer.Option(False, "--quick", help=self.quick))
        kinds = get_type_hints(self.options)
        own = [each.parameter(name, kinds[name]) for name, each in _declared(self.options).items()]

        def run(**given: Any) -> None:
            file = given["report"]
            options = self.chosen(given, given["quick"])
            report = self.kept(file) if file is not None else with_bars(partial(self.report, options))
            present(
                report,
                self.all_facts(report),
                self.all_tables(report),
                given["json"],
                given["markdown"],
                given["plot"],
                partial(draw, self.plots) if self.plots else None,
                width=self.width,
            )

        run.__doc__ = self.help
        run.__signature__ = inspect.Signature([*(shared | {"quick": quick}).values(), *own])  # type: ignore[attr-defined]
        return run


def _declared(options: Any) -> dict[str, BenchOption]:
    return {each.name: each.metadata["option"] for each in fields(options) if "option" in each.metadata}


def _shared(
    *,
    quick: bool = False,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
    report: KeptReport = None,
) -> None:
    """Options of every bench."""


# The measured code
def digests(code: Sequence[str]) -> dict[str, str]:
    """Each file or folder -> a digest of its Python, without comments and docstrings."""
    return {each: _digest(sorted((ROOT / each).rglob("*.py")) or [ROOT / each]) for each in code}


def _digest(files: Sequence[Path]) -> str:
    return hashlib.sha256("\n".join(bare(file.read_text()) for file in files).encode()).hexdigest()[:16]


def bare(text: str) -> str:
    """Code without comments and docstrings."""
    collects = gc.isenabled()
    gc.disable()  # Python 3.11 fails here where a collected object's end parses too, as a warning's traceback does
    try:
        tree = ast.parse(text)
    finally:
        if collects:
            gc.enable()
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [each for each in block if not _is_text(each)] or [ast.Pass()] * bool(block))
    return ast.unparse(tree)


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
