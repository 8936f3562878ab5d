"""What all benches share: options, turns, the command, kept reports and the pages made of them."""

from __future__ import annotations

import ast
import gc
import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import typer
from dendro.errors import BadRequest
from typer.testing import CliRunner

from cluster import slow_commands
from cluster.measure import bench as framework
from cluster.measure.bench import OLDER, Aim, Bench, Plot, ReportTable, bare, filled, option
from cluster.measure.engine_times import by_turns
from cluster.measure.options import BY_HAND
from cluster.measure.report import as_markdown

ROOT = Path(__file__).parents[2]
KEPT = sorted((ROOT / "docs/results").glob("*.json"))


@dataclass(frozen=True)
class ToyOptions:
    sizes: tuple[int, ...] = option("Sizes.", (1, 2, 3), (1, 2), least=1)
    times: int = option("Times.", 7, least=1, most=9)


def toy(measured: list[ToyOptions], code: tuple[str, ...] = ("LICENSE.py",)) -> Bench[ToyOptions]:
    async def measure(options, begin):
        measured.append(options)
        begin("toy", 1)()
        return {"plan": {"fact": "a fact", "none": ""}, "rows": [{"size": size} for size in options.sizes]}

    return Bench(
        "toy",
        "Measure nothing.",
        "Two sizes.",
        ToyOptions,
        measure,
        facts=("{fact}", "{none} is left out"),
        tables=(ReportTable("Sizes", "rows", "size"),),
        plots=(Plot("rows", "size", "size"),),
        code=code,
    )


@pytest.fixture
def code(tmp_path, monkeypatch) -> Path:
    """The measured file."""
    monkeypatch.setattr(framework, "ROOT", tmp_path)
    file = tmp_path / "measured.py"
    file.write_text('"""A module."""\nx = 1\n')
    return file


def run(bench: Bench[ToyOptions], *words: object):
    app = typer.Typer()
    app.command()(bench.command())
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "200"})


def test_options_are_those_given_or_the_defaults(code):
    measured: list[ToyOptions] = []
    bench = toy(measured, (code.name,))
    for words in ([], ["--quick"], ["--quick", "--times", "2", "--sizes", "8,4"]):
        assert run(bench, *words).exit_code == 0
    assert measured == [ToyOptions(), ToyOptions((1, 2)), ToyOptions((4, 8), 2)]
    assert run(bench, "--times", "10").exit_code == 2
    with pytest.raises(BadRequest, match="sizes"):
        raise run(bench, "--sizes", "4,4").exception


def test_a_kept_report_is_shown_without_measuring_and_what_was_written_by_hand_stays(code, tmp_path):
    measured: list[ToyOptions] = []
    bench, kept, page = toy(measured, (code.name,)), tmp_path / "toy.json", tmp_path / "toy.md"
    page.write_text(f"old\n{BY_HAND}\n\n## By hand\n")
    first = run(bench, "--json", kept)
    again = run(bench, "--report", kept, "--markdown", page)
    assert again.stdout == first.stdout and len(measured) == 1
    assert page.read_text().startswith("# dendro bench toy\n") and "old" not in page.read_text()
    assert page.read_text().endswith(f"| 3 |\n\n{BY_HAND}\n\n## By hand\n")
    kept.write_text('{"bench": "speed"}')
    with pytest.raises(BadRequest, match="report: .* is no report of `dendro bench toy`"):
        bench.kept(kept)
    kept.write_text("{")
    with pytest.raises(BadRequest, match="report: .* cannot be read as JSON"):
        bench.kept(kept)


def test_a_report_older_than_the_code_that_it_measures_says_so(code):
    bench = toy([], (code.name,))
    report = bench.report(ToyOptions(), lambda title, steps: lambda: None)
    assert "a fact" in bench.all_facts(report)
    code.write_text('"""Another text."""\nx = 1  # the same code\n')
    assert not [fact for fact in bench.all_facts(report) if OLDER in fact]
    code.write_text("x = 2\n")
    assert [fact for fact in bench.all_facts(report) if OLDER in fact] == [f"{OLDER}: measured.py changed since"]


def around(median):
    return {"median": median, "low": median - 1, "high": median + 1, "coverage": 0.95}


def test_rows_make_a_table_for_each_title_and_a_column_for_each_key():
    rows = [{"kind": kind, "way": way, "ms": {"a": around(2), "b": None}} for kind in "xy" for way in ("on", "off")]
    found = list(ReportTable("of {kind}", "rows", "way; * ms = ms/*:.1f").cells({"rows": rows}))
    assert [title for title, *_ in found] == ["of x", "of y"]
    assert found[0][1:] == (("way", "a ms"), [(way, "2.0 (1.0-3.0)") for way in ("on", "off")]), "b has no value"
    assert list(ReportTable("of {kind}", "rows", "way").cells({"rows": []})) == []


@pytest.mark.parametrize("aim, met", [(("least", 3.0), (False, True)), (("most", 5.0), (False, True))])
def test_an_aim_is_judged_by_the_worst_row_of_its_name_at_its_end(aim, met):
    rows = [{"kind": "x", "over": around(5)}, {"kind": "x", "over": around(3)}, {"kind": "y", "over": around(4)}]
    end = "low" if aim[0] == "least" else "high"
    found = list(Aim("{kind} over", "rows", "over", end=end, why="of {kind}", **dict([aim])).judged({"rows": rows}))
    assert [(row["aim"], row["met"]) for row in found] == [("x over", met[0]), ("y over", met[1])]
    assert [row.get("why") for row in found] == [
        None if each else "of " + row["aim"][0] for row, each in zip(found, met, strict=True)
    ]
    (unmeasured,) = Aim("{kind} over", "rows", "over", most=1.0).judged({"rows": [{"kind": "z", "over": None}]})
    assert unmeasured["met"] is None and unmeasured["why"] == "was not measured"


def test_a_fact_without_its_field_is_left_out():
    assert filled("{a:.1f} s", {"a": 2}) == "2.0 s"
    assert filled("{a} s", {}) is filled("{a} s", {"a": ""}) is filled("{a[0]} s", {"a": []}) is None


def test_code_without_comments_and_docstrings_is_still_code():
    assert (
        bare('def f():\n    """Text."""\n') == bare("def f():\n    pass  # nothing\n") != bare("def f():\n    return\n")
    )


class Parsing:
    """An object whose end parses code."""

    def __init__(self) -> None:
        self.itself = self  # only the garbage collector ends it

    def __del__(self) -> None:
        ast.parse("a + b")


def test_code_is_parsed_though_the_end_of_a_collected_object_parses_too():
    text = "\n".join(f"x{number} = (1, [2, {{3: y}}])" for number in range(400))
    before = gc.get_threshold()
    gc.set_threshold(50)
    try:
        for _ in range(20):
            for _ in range(20):
                Parsing()
            assert bare(text)
    finally:
        gc.set_threshold(*before)


async def test_ways_take_turns_and_their_first_turn_is_not_counted():
    called = []

    async def call(way):
        called.append(way)

    times = await by_turns("ab", call, 2)
    assert called == ["a", "b"] * 3 and {way: len(taken) for way, taken in times.items()} == {"a": 2, "b": 2}


@pytest.mark.parametrize("file", KEPT, ids=[file.stem for file in KEPT])
def test_a_page_is_what_its_kept_report_gives(file):
    bench = getattr(import_module(slow_commands.BENCHES[file.stem][0]), file.stem.replace("-", "_").upper())
    report = bench.kept(file)
    assert bench.code == tuple(each for each in bench.code if (ROOT / each).exists())
    shown = as_markdown(report, bench.all_facts(report), bench.all_tables(report), f"plots/{file.stem}.png")
    page = (ROOT / f"docs/{file.stem}.md").read_text().partition(f"\n{BY_HAND}")[0]
    assert without_age(page) == without_age(shown)
    assert json.loads(file.read_text())["bench"] == file.stem


def without_age(page: str) -> list[str]:
    """Lines, without that which depends on the checkout's code."""
    return [line for line in page.splitlines() if OLDER not in line]
