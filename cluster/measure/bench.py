"""What a bench declares, and what all benches share: the command, progress, turns, the report and its files."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer
from dendro.errors import BadRequest

from cluster.command_options import JsonFile
from cluster.measure.machine import report_head
from cluster.measure.measurement import Begin
from cluster.measure.options import Default, MarkdownFile, PlotFile, as_given, numbers_in, present, with_bars
from cluster.measure.report import Cells, Report, Row, aims_table, machine_facts, with_interval

ROOT = Path(__file__).parents[2]
OLDER = "Older than the code that it measures"
S = TypeVar("S")  # the options of a bench
KeptReport = Annotated[
    Path | None, typer.Option("--report", help="Show this report, kept by --json: nothing is measured.")
]


# Options
@dataclass(frozen=True, slots=True)
class BenchOption:
    """How one field of a bench's options is given on the command line."""

    default: Default[Any]
    help: str
    least: int | None = None
    most: int | None = None
    count: int = 1  # the fewest numbers of a list
    shown: bool = True  # whether help states the default

    @property
    def listed(self) -> bool:
        """True if the option is given as numbers with commas between them."""
        return isinstance(self.default.full, tuple)

    def parameter(self, name: str) -> inspect.Parameter:
        """The command's parameter; None unless it is given."""
        limits: dict[str, Any] = {} if self.listed else {"min": self.least, "max": self.most}
        text = self.help + (self._defaults if self.shown else "")
        given = str if self.listed else type(self.default.full)
        option = typer.Option(None, help=text, show_default=False, **limits)
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=given | None)

    def value(self, name: str, given: Any, quick: bool) -> Any:
        """The field's value: as given, or its default."""
        if given is not None and self.listed:
            kind = type(self.default.full[0])
            return tuple(sorted(numbers_in(name, given, kind, self.least or 0, self.count)))
        return self.default.chosen(given, quick)

    @property
    def _defaults(self) -> str:
        full, quick = as_given(self.default.full), as_given(self.default.quick)
        return f" (default {full}; quick {quick})" if full != quick else f" (default {full})"


def option(help: str, full: Any, quick: Any = None, **limits: Any) -> Any:
    """A field of a bench's options. quick: its default with --quick, where that is another   limits: of BenchOption"""
    default = Default(full, full if quick is None else quick)
    return field(default=full, metadata={"option": BenchOption(default, help, **limits)})


def option_of(each: Field[Any]) -> BenchOption:
    found: BenchOption = each.metadata["option"]
    return found


# Tables
@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its head, and the text of a row's cell."""

    head: str
    cell: Callable[[Row], str]


def estimates(head: str, *keys: str, digits: int = 2) -> Column:
    """A column of medians and their intervals, which are found in a row under these keys, one in the other."""

    def cell(row: Row) -> str:
        found: Any = row
        for key in keys:
            found = found[key]
        return with_interval(found, digits)

    return Column(head, cell)


def table(title: str, rows: Iterable[Row], *columns: Column) -> Cells:
    return title, tuple(each.head for each in columns), [tuple(each.cell(row) for each in columns) for row in rows]


# A bench
@dataclass(frozen=True, slots=True)
class Bench(Generic[S]):
    """What distinguishes one bench from another."""

    name: str
    help: str
    quick: str  # help of --quick
    options: type[S]  # a dataclass whose fields are made by `option`
    measure: Callable[[S, Begin], dict[str, Any]]  # the report without its head and its aims
    aims: Callable[[Report], list[Row]]
    facts: Callable[[Report], Iterator[str]]  # the conditions of a measurement, beside the machine's
    tables: Callable[[Report], Iterator[Cells]]  # all but the aims'; a table without rows is not shown
    plot: Callable[[Report, Path], None]
    threads: Callable[[S], int]
    code: tuple[str, ...]  # what is measured: files and folders of the checkout

    def report(self, options: S, begin: Begin) -> Report:
        """Measure; the whole report."""
        started = time.monotonic()
        found = self.measure(options, begin)
        report = {
            **report_head(self.name, started, True, 0, self.threads(options)),
            "code": digests(self.code),
            **found,
        }
        return report | {"aims": self.aims(report)}

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
        yield from self.facts(report)
        changed = [each for each, now in digests(self.code).items() if report["code"].get(each) != now]
        if changed:
            yield f"{OLDER}: {', '.join(changed)} changed since"

    def all_tables(self, report: Report) -> Iterator[Cells]:
        return (each for each in (*self.tables(report), aims_table(report)) if each[2])

    def chosen(self, given: Mapping[str, Any], quick: bool) -> S:
        """The options, of those given on the command line and of the defaults."""
        own: Any = self.options
        return self.options(
            **{each.name: option_of(each).value(each.name, given[each.name], quick) for each in fields(own)}
        )

    def command(self) -> Callable[..., None]:
        """The function of the command, with a parameter for each option."""
        own: Any = self.options
        shared = inspect.signature(_shared, eval_str=True).parameters.values()
        first = next(iter(shared))
        quick = first.replace(default=typer.Option(False, "--quick", help=self.quick))
        parameters = [quick, *list(shared)[1:], *(option_of(each).parameter(each.name) for each in fields(own))]

        def run(**given: Any) -> None:
            file = given["report"]
            options = self.chosen(given, given["quick"])
            report = self.kept(file) if file is not None else with_bars(partial(self.report, options))
            facts, tables = self.all_facts(report), self.all_tables(report)
            present(report, facts, tables, given["json"], given["markdown"], given["plot"], self.plot)

        run.__doc__ = self.help
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run


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
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [each for each in block if not _is_text(each)] or [ast.Pass()] * bool(block))
    return ast.unparse(tree)


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
