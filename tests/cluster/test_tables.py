"""Tables of commands: nothing is cut, and brackets are text."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster import cli, slow_commands
from cluster.tables import PLAIN_WIDTH, folding_table, page

COLUMNS = ("drafter", "target", "why")
ROWS = [
    ("a-drafter-of-a-long-name", "a-target-of-a-longer-name", "token 3 is '[INST]' to the target and '[/INST]' here"),
    ("b", "c", "x" * 70),
]


def printed(width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(folding_table("pairs [of 2]", COLUMNS, ROWS, lines=True))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 80, 200])
def test_every_letter_of_every_cell_is_printed_at_every_width(width: int):
    lines = printed(width)
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    rows, parts = [], [""] * len(COLUMNS)
    for line in lines:
        if line[0] in "│┃":
            cells = line.replace("┃", "│").strip("│").split("│")
            parts = [before + cell.replace(" ", "") for before, cell in zip(parts, cells, strict=True)]
        elif any(parts):
            rows.append(tuple(parts))
            parts = [""] * len(COLUMNS)
    assert rows == [tuple(cell.replace(" ", "") for cell in row) for row in (COLUMNS, *ROWS)]
    assert "pairs [of 2]" in "\n".join(lines)


def test_output_that_is_no_terminal_has_a_width_of_its_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "")
    assert page().width == PLAIN_WIDTH and page(200).width == 200
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert page().width == 80


COMMANDS = (
    *("serve", "config", "check", "generate", "demo", "certify", "tune", "predict"),
    *("train demo", "train drafter", "train head"),
    *(f"bench {name}" for name in slow_commands.BENCHES),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_at_80_columns(command: str):
    wide, narrow = (
        CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": str(width)}).stdout
        for width in (300, 80)
    )
    assert "…" not in narrow
    assert set(re.findall(r" (--[a-z-]+)", wide)) == set(re.findall(r" (--[a-z-]+)", narrow)) > {"--help"}
