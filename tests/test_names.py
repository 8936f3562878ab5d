"""Rules of naming and layout that hold in the whole repository."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = {
    "cluster": "",
    "drafter_service": "",
    "verifier_service": "",
    "dendro": "protos",
    "tree_kernels": "kernels",
    "tree_layers": "kernels",
}
MOST_LINES = 700
BANNED_CLASSES = ("Asked", "Company", "Dialect", "House", "Kind", "Plan", "Side", "Tally")
"""Class names of which nobody can guess what they are."""
BANNED_WORDS = (
    "all told",
    "company",
    "crowd",
    "dialect",
    "house",
    "muster",
    "reckoned",
    "said",
    "set back",
    "summons",
    "tally",
    "told",
)
"""Words for which the field has its own: see "Terms" in ARCHITECTURE.md."""
PROSE = (".py", ".md", ".proto", ".yaml", ".toml", ".tpl", ".txt", "Makefile", "Dockerfile")
GENERATED = tuple(
    f"docs/{name}.md"
    for name in (
        *(
            "ahead",
            "benchmarks",
            "certify-llama-cpp",
            "certify-smollm2",
            "drafter",
            "edits",
            "families",
            "kernels",
            "load",
            "load-demo",
            "load-surface",
            "pairs",
            "papers",
            "parameters",
        ),
        *(
            "speed",
            "speed-costly",
            "speed-llama",
            "speed-mamba2",
            "speed-smollm2",
            "speed-temperature-1",
            "tuning",
        ),
    )
)
"""Pages that benches and tests write; their lines are what was printed."""
EXEMPT = ("THIRD_PARTY", "tests/deploy/data/", "tests/test_names.py", "cluster/demo/models/", "cluster/demo/corpus")


@cache
def tracked() -> list[Path]:
    """Files under version control, without generated code."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if "_pb2" not in name and (ROOT / name).exists()]


@cache
def modules() -> dict[str, Path]:
    """Our modules by their import names, without tests."""
    found = {}
    for package, root in SOURCE_ROOTS.items():
        base = ROOT / root
        for path in tracked():
            if path.suffix == ".py" and path.is_relative_to(base / package):
                name = ".".join(path.relative_to(base).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_a_class_name_is_defined_once_in_the_repository():
    places = defaultdict(list)
    for path in tracked():
        if path.suffix == ".py":
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}
    assert not set(places) & set(BANNED_CLASSES)


def test_no_banned_word_comes_back():
    banned = re.compile(rf"\b({'|'.join(BANNED_WORDS)})\b", re.IGNORECASE)
    found = [
        f"{name}:{number}: {line.strip()}"
        for path in tracked()
        if path.name.endswith(PROSE) and not (name := str(path.relative_to(ROOT))).startswith(EXEMPT)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if banned.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_file_of_ours_is_longer_than_700_lines():
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_no_private_name_crosses_a_file():
    crossing = [
        f"{name} imports {alias.name} of {node.module}"
        for name, path in modules().items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.module in modules()
        for alias in node.names
        if alias.name.startswith("_") and f"{node.module}.{alias.name}" not in modules()
    ]
    assert not crossing


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions count, too, and those of types alone."""
    graph: dict[str, set[str]] = {}
    for name, path in modules().items():
        imported = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    imported.add(submodule if submodule in modules() else node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
        graph[name] = (imported & set(modules())) - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_every_log_is_under_dendro():
    """A replica gives the handlers of its log file to the logger `dendro` alone."""
    source = "\n".join(path.read_text() for path in modules().values())
    logs = re.findall(r"^log = logging\.getLogger\((.+)\)$", source, re.MULTILINE)
    assert len(logs) > 10 and not [log for log in logs if not log.startswith('"dendro.')]


def test_lines_of_prose_are_wrapped():
    """Tables, links, headings and code blocks of Markdown cannot be."""
    long = []
    for path in tracked():
        if path.suffix != ".md" or str(path.relative_to(ROOT)).startswith((*GENERATED, *EXEMPT)):
            continue
        fenced = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            fenced ^= line.lstrip().startswith("```")
            if len(line) > 120 and not fenced and not line.lstrip().startswith(("|", "#", "!", "[", "<")):
                long.append(f"{path.relative_to(ROOT)}:{number}")
    assert not long, "\n".join(long)


def test_what_several_tests_use_is_in_their_support_package():
    """In tests/ itself are only tests, pytest's own files, and commands that are run by hand."""
    others = [
        path.name
        for path in tracked()
        if path.parent == ROOT / "tests"
        and path.suffix == ".py"
        and not path.name.startswith("test_")
        and path.name not in ("__init__.py", "conftest.py")
        and '__name__ == "__main__"' not in path.read_text()
    ]
    assert not others, others
