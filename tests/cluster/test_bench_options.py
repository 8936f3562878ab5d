"""Options of the commands that measure: help states their defaults, and numbers out of range are refused."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module

import pytest
from typer.testing import CliRunner

from cluster import cli, slow_commands
from cluster.measure import options
from cluster.measure.bench import Bench, BenchOption
from cluster.measure.options import as_given, with_bars

BENCHES = [("bench", name) for name in slow_commands.BENCHES]


def output_of(*words: str) -> tuple[int, str]:
    """Exit status and output, on one line and without borders."""
    done = CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"})
    return done.exit_code, re.sub(r"[\s│]+", " ", done.output)


def test_a_default_is_the_quick_one_with_quick_alone_and_none_where_the_option_is_given():
    number = BenchOption("A number.", 9, 1)
    found = [number.value("number", given, quick) for given in (None, 0, 4) for quick in (False, True)]
    assert found == [9, 1, 0, 0, 4, 4]


@pytest.mark.parametrize(("every_s", "lines"), [(0.0, ["1 of 3", "2 of 3", "3 of 3"]), (1e9, ["3 of 3"])])
def test_progress_is_lines_where_the_standard_error_is_no_terminal(capsys, monkeypatch, every_s, lines):
    monkeypatch.setattr(options, "LINE_EVERY_S", every_s)

    def measure(begin):
        step = begin("prompts", 3)
        for _ in range(3):
            step()
        return "figures"

    assert with_bars(measure) == "figures"
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "prompts: 3 steps"
    assert [line.removeprefix("prompts: ").partition(",")[0] for line in printed[1:]] == lines


@pytest.mark.parametrize("command", [*BENCHES, ("tune",), ("predict",)], ids=" ".join)
def test_help_states_the_defaults_of_every_option_that_quick_changes(command: tuple[str, ...]):
    status, text = output_of(*command, "--help")
    assert status == 0
    module = vars(import_module(place_of(command))).values()
    declared = [
        each.metadata["option"]
        for bench in module
        if isinstance(bench, Bench)
        for each in fields(bench.options)
        if "option" in each.metadata
    ]
    defaults = {*(each for each in module if isinstance(each, BenchOption)), *declared}
    changed = {(as_given(each.full), as_given(each.quick)) for each in defaults if each.full != each.quick}
    shown = re.findall(r"\(default ([^();]+); quick ([^()]+)\)", text)
    assert shown and set(shown) <= changed


def place_of(command: tuple[str, ...]) -> str:
    """The module of a command."""
    own = f"cluster.{command[0]}.command"
    return own if command[0] in slow_commands.MEASURING else slow_commands.BENCHES[command[-1]][0]


@pytest.mark.parametrize(
    "words",
    [
        "bench speed --prompts 0",
        "bench speed --tokens -1",
        "bench speed --repetitions 0",
        "bench speed --seed -1",
        "bench ahead --prompts 0",
        "bench ahead --tokens 0",
        "bench edits --seed -1",
        "bench drafter --repetitions 0",
        "bench kernels --dtype int8",
        "bench kernels --threads 65",
        "bench load --tokens 1",
        "bench edits --seed 4294967296",
        "tune --tokens 1",
        "tune --held-out 0",
        "predict --timed 0",
        "predict --held-out -1",
    ],
)
def test_a_number_out_of_range_is_refused_by_the_name_of_its_option(words: str):
    *command, option, value = words.split()
    status, text = output_of(*command, option, value)
    assert status == 2 and f"Invalid value for {option}: " in text.replace("'", "")
