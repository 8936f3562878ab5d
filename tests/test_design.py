"""The design pages in docs/design: citations of them, their links, and the code that they name."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "README.md", "CONTRIBUTING.md", "docs", "kernels")
"""Markdown whose relative links are followed."""
NAMES_CODE = ("ARCHITECTURE.md", "docs/design", "docs/security.md")
"""Markdown whose paths in backticks exist, with the names after `::` defined there."""
SHORT = ("ARCHITECTURE.md", "README.md", "docs/design")
"""Markdown without long paragraphs."""
MOST_WORDS = 100
"""Words of a paragraph or list item."""
MOST_LINES = 200
"""Lines of a design page."""
CITATION = re.compile(r"docs/design/([\w.-]*\w)(?:#([\w-]+))?")
LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
FOLDERS = ("cluster/", "protos/", "kernels/", "drafter_service/", "verifier_service/", "tests/", "docs/", "deploy/")
SUFFIXES = (".py", ".md", ".proto", ".toml")


@cache
def tracked() -> frozenset[str]:
    """Files under version control."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return frozenset(name for name in listed.splitlines() if (ROOT / name).exists())


def markdown(roots: tuple[str, ...]) -> list[str]:
    """Markdown files that are these roots, or lie in them."""
    return sorted(
        name
        for name in tracked()
        if name.endswith(".md") and any(name == root or name.startswith(f"{root}/") for root in roots)
    )


def without_code(text: str) -> str:
    """Markdown without its fenced blocks; the lines stay."""
    kept, fenced = [], False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        kept.append("" if fenced or fence else line)
        fenced ^= fence
    return "\n".join(kept)


def headings_of(text: str) -> list[str]:
    """The anchors of Markdown's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+?) *$", without_code(text), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]


@cache
def headings(name: str) -> list[str]:
    return headings_of((ROOT / name).read_text())


def citation_faults(text: str, in_code: bool) -> list[str]:
    """Citations of design pages that lead nowhere. in_code: a heading is required, too"""
    faults = []
    for page, heading in CITATION.findall(text):
        name = f"docs/design/{page}"
        if name not in tracked():
            faults.append(f"{name}: there is no such page")
        elif heading and heading not in headings(name):
            faults.append(f"{name}: has no heading #{heading}")
        elif in_code and not heading:
            faults.append(f"{name}: name a heading, as in {name}#{headings(name)[0]}")
    return faults


def link_faults(name: str, text: str) -> list[str]:
    """Relative links of a Markdown file that lead nowhere."""
    faults = []
    for found in LINK.findall(without_code(text)):
        target = found[0] or found[1]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        to = (ROOT / name).parent / path if path else ROOT / name
        if not to.exists() or not to.resolve().is_relative_to(ROOT):
            faults.append(f"{name}: {target} does not exist")
        elif heading and heading not in headings(str(to.resolve().relative_to(ROOT))):
            faults.append(f"{name}: {target} has no such heading")
    return faults


@cache
def defined(name: str) -> frozenset[str]:
    """Names that a Python file defines: functions, classes, assigned names; those in a class as `Class.name`, too."""
    found = set[str]()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            names = []
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            found.update(prefix + each for each in names)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse((ROOT / name).read_text()).body, "")
    return frozenset(found)


def code_faults(name: str, text: str) -> list[str]:
    """Paths in backticks that do not exist, and names after `::` that their file does not define."""
    faults = []
    for quoted in re.findall(r"`([^`\s]+)`", without_code(text)):
        path, _, symbol = quoted.partition("::")
        if not re.fullmatch(r"[\w./-]+", path) or not (path.startswith(FOLDERS) or path.endswith(SUFFIXES)):
            continue
        if not (ROOT / path).exists():
            faults.append(f"{name}: {path} does not exist")
        elif symbol and symbol not in defined(path):
            faults.append(f"{name}: {path} defines no {symbol}")
    return faults


def paragraphs(text: str) -> list[str]:
    """The paragraphs and list items of Markdown, without tables, headings and code."""
    found, current, indented = list[str](), list[str](), False
    for line in [*without_code(text).splitlines(), ""]:
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        after_blank = not current
        indented = line.startswith("    ") and not item and (after_blank or indented)
        if not line.strip() or item or line.startswith("#") or line.lstrip().startswith("|") or indented:
            if current:
                found.append(" ".join(current))
            current = [line.strip()] if item else []
        else:
            current.append(line.strip())
    return found


def test_every_citation_of_the_design_leads_to_a_heading():
    faults = []
    for name in sorted(tracked()):
        if name.endswith((".py", ".proto", ".md", ".yaml", ".toml", ".tpl")) and name != "tests/test_design.py":
            for fault in citation_faults((ROOT / name).read_text(), in_code=name.endswith((".py", ".proto"))):
                faults.append(f"{name}: {fault}")
    assert not faults, "\n".join(faults)


def test_every_relative_link_of_the_documentation_leads_somewhere():
    faults = [fault for name in markdown(PAGES) for fault in link_faults(name, (ROOT / name).read_text())]
    assert not faults, "\n".join(faults)


def test_the_code_that_the_design_names_exists():
    faults = [fault for name in markdown(NAMES_CODE) for fault in code_faults(name, (ROOT / name).read_text())]
    assert not faults, "\n".join(faults)


def test_no_paragraph_of_the_design_is_long():
    long = [
        f"{name}: {len(paragraph.split())} words: {paragraph[:60]}"
        for name in markdown(SHORT)
        for paragraph in paragraphs((ROOT / name).read_text())
        if len(paragraph.split()) > MOST_WORDS
    ]
    assert not long, "\n".join(long)


def test_a_design_page_has_at_most_200_lines_and_each_heading_once():
    for name in markdown(("docs/design",)):
        assert len((ROOT / name).read_text().splitlines()) <= MOST_LINES, name
        assert not [heading for heading, times in Counter(headings(name)).items() if times > 1], name


def test_every_design_page_is_in_the_index():
    index = (ROOT / "docs/design/README.md").read_text()
    assert not [
        name for name in markdown(("docs/design",)) if f"({Path(name).name})" not in index and "README" not in name
    ]


PLACE = "docs/design/"


@pytest.mark.parametrize(
    "faults",
    [
        lambda: citation_faults(f"see {PLACE}nowhere.md#the-walk", in_code=True),
        lambda: citation_faults(f"see {PLACE}noise.md#no-such-heading.", in_code=True),
        lambda: citation_faults(f"see {PLACE}noise.md", in_code=True),
        lambda: link_faults("docs/design/README.md", "[noise](nowhere.md)"),
        lambda: link_faults("docs/design/README.md", "[noise](noise.md#no-such-heading)"),
        lambda: link_faults("docs/design/README.md", "[noise]: ../nowhere.md"),
        lambda: code_faults("docs/design/README.md", "`cluster/nowhere.py`"),
        lambda: code_faults("docs/design/README.md", "`cluster/router/rounds.py::no_such_name`"),
    ],
)
def test_what_leads_nowhere_is_a_fault(faults):
    assert len(faults()) == 1


def test_what_leads_somewhere_is_no_fault():
    assert not citation_faults(f"see {PLACE}noise.md#the-walk.", in_code=True)
    assert not link_faults("docs/design/README.md", "[noise](noise.md#the-walk), [site](https://example.org/x)")
    assert not code_faults("docs/design/README.md", "`cluster/router/rounds.py::rounds`, `a/b`, `x / y`")


def test_a_paragraph_ends_at_a_blank_line_an_item_or_a_table():
    text = "# A\none two\nthree\n\n    code code\n\n- four\n  five\n- six\n| a | b |\n```\ncode\n```\nseven\n"
    assert paragraphs(text) == ["one two three", "- four five", "- six", "seven"]
