"""Docstrings and comments can be understood alone, and their examples give what they print.

None begins where its reader must find the noun elsewhere.

A docstring (of a module, class, function or assigned name) and a comment are faults if their first word is
- a preposition ("of the current round"), or "as": the noun before it is missing;
- "its", "their", "those", "the same", "the other", "the others", "whether so", "whether it" or "whether they": the
  reader must know what came before.

A comment beside code, on its line, may also begin with
- "at most" or "at least": a bound of the field beside it;
- "in" and a unit or an interval, as in "in [0, 1)" or "in microseconds";
- "by", a key and a colon, as in "by drafter: tokens since its last tree": keys and values of a mapping.

Comments on consecutive lines are one comment. `# type:`, `# noqa` and formatters' directives are not comments.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("cluster", "drafter_service", "kernels", "protos/dendro", "verifier_service")
"""Folders without a fault, LATER excepted."""
LATER: tuple[str, ...] = ()
"""Beginnings of paths in ROOMS that still have faults."""
PACKAGES = (
    *(("protos/", "dendro"), ("kernels/", "tree_kernels"), ("kernels/", "tree_layers")),
    *(("", "drafter_service"), ("", "verifier_service"), ("", "cluster")),
)
"""Root and folder of each package whose examples are run."""
PREPOSITIONS = """
    about above across after against along among as at before behind below beneath beside besides between beyond but by
    despite down during except for from in inside instead into like near of off on onto out outside over past per since
    than through throughout to toward towards under until up upon via with within without
"""
POINTING = "its their those the_same the_other the_others whether_so whether_it whether_they"
BOUND = re.compile(r"(at (most|least)\b|in ([\[(]|(micro|milli)?seconds|tokens|bytes|rows|us\b|ms\b)|by [^:]{1,40}: )")


def ellipsis(text: str, beside_code: bool = False) -> bool:
    """True if a docstring or comment begins with a word whose noun stands elsewhere."""
    lowered = text.strip().lower()
    if beside_code and BOUND.match(lowered):
        return False
    words = re.findall(r"^[a-z]+(?= |$)|(?<=^the )[a-z]+|(?<=^whether )[a-z]+", lowered)
    return bool(words) and not {words[0], "_".join(words[:2])}.isdisjoint(f"{PREPOSITIONS} {POINTING}".split())


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is a statement."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str, bool]]:
    """Line and first line's text of each comment, and True if it stands beside code."""
    last_alone = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#! ")
            beside_code = bool(token.line[: token.start[1]].strip())
            continues = not beside_code and last_alone == token.start[0] - 1
            last_alone = -1 if beside_code else token.start[0]
            if not continues and not re.match(r"(type:|noqa|fmt:|pragma)", text):
                yield token.start[0], text, beside_code


def faults(source: str) -> list[tuple[int, str]]:
    """Line and text of each docstring or comment that begins with an ellipsis, by line."""
    found = [(line, text) for line, text in docstrings(source) if ellipsis(text)]
    found += [(line, text) for line, text, beside_code in comments(source) if ellipsis(text, beside_code)]
    return sorted(found)


def files(room: str) -> list[Path]:
    """The Python files of a folder, without generated ones; or the file, if it is one."""
    if (ROOT / room).is_file():
        return [ROOT / room]
    return sorted(path for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name)


def examples() -> dict[str, Path]:
    """Modules with examples by their import names."""
    found = {}
    for root, folder in PACKAGES:
        for path in files(f"{root}{folder}"):
            if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE):
                name = ".".join(path.relative_to(ROOT / root).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


@pytest.mark.parametrize("module", examples())
def test_examples_give_what_they_print(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted and not result.failed


@pytest.mark.parametrize("room", ROOMS)
def test_every_docstring_and_comment_names_its_subject(room):
    paths = [path for path in files(room) if not str(path.relative_to(ROOT)).startswith(LATER)]
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in paths
        for line, text in faults(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Of a step of so many rows those of this process."""',
        'def at():\n    """As `at`, of one more level."""',
        'class Law:\n    """Its parameters."""',
        'SHARE = 1\n"""The same, of drafters."""',
        "# without a tree\nx = 1",
        "x = 1  # of the current round",
        "x = {}  # by the time it took",
    ],
)
def test_a_text_that_begins_with_an_ellipsis_is_a_fault(source):
    assert len(faults(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Predicted microseconds of one more level."""',
        "x = 1  # at most one a round",
        "x = 1  # in [0, 1)",
        "x = {}  # by drafter: tokens since its last tree",
        "# Rows of a tree,\n# of the current round, in order.\nx = 1  # noqa: E501",
        'x = "# of no comment"',
    ],
)
def test_a_text_that_names_its_subject_is_no_fault(source):
    assert not faults(source)
