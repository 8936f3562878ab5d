"""The commands and the code blocks of the documentation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
MADE = re.compile(r"^- Command: `(.+)`$", re.MULTILINE)
DOLLAR = re.compile(r"\$'((?:[^'\\]|\\.)*)'")


@dataclass(frozen=True)
class FencedBlock:
    """A fenced block of a page."""

    page: str
    language: str
    text: str


@dataclass(frozen=True)
class DocumentedCommand:
    """A command of a page, without its comment."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def blocks(page: Path) -> Iterator[FencedBlock]:
    for language, text in BLOCK.findall(page.read_text()):
        yield FencedBlock(str(page.relative_to(ROOT)), language, text)


def words_of(line: str) -> tuple[str, ...]:
    """The words of a line of a shell.

    >>> words_of("dendro x --stop $'a\\\\n' 'b c'  # why")
    ('dendro', 'x', '--stop', 'a\\n', 'b c')
    """
    plain = DOLLAR.sub(lambda found: shlex.quote(found[1].encode().decode("unicode_escape")), line)
    return tuple(shlex.split(plain, comments=True))


def commands() -> list[DocumentedCommand]:
    """Every command in the blocks of a shell, and the one that made a page of measurements; each once a page."""
    found = {}
    for page in PAGES:
        for line in MADE.findall(page.read_text()):
            found[DocumentedCommand(str(page.relative_to(ROOT)), words_of(line))] = None
        for block in blocks(page):
            if block.language == "sh":
                for line in block.text.replace("\\\n", " ").splitlines():
                    if words := words_of(line):
                        found[DocumentedCommand(block.page, words)] = None
    return list(found)
