"""The parts of a request's loop know each other by their constructors alone."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("cluster/router", "cluster/peers", "cluster/proposers", "cluster/api")
OF_LIBRARIES = {"cluster/api/openai/server.py": ["self.cycle.disconnected"]}
"""Attributes of libraries' objects that a subclass sets as its base does: uvicorn's protocol sets this one so."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_message(node: ast.expr | None) -> bool:
    """Whether an annotation, or what makes a value, names a protobuf message: `pb.Usage`, `pb.Usage(...)`."""
    if isinstance(node, ast.Call):
        node = node.func
    return node is not None and ast.unparse(node).startswith(("pb.", "calls_pb2.", "generation_pb2."))


def message_attributes(tree: ast.Module) -> set[str]:
    """Attributes that a constructor sets to a new message."""
    sets = (node for node in ast.walk(tree) if isinstance(node, ast.Assign) and is_message(node.value))
    return {target.attr for node in sets for target in node.targets if isinstance(target, ast.Attribute)}


def made_here(function: Function, messages: set[str]) -> set[str]:
    """Names of a function's own objects and of messages: what it may still change."""
    arguments = function.args.args + function.args.kwonlyargs
    found = {argument.arg for argument in arguments if is_message(argument.annotation)}
    for node in ast.walk(function):
        if isinstance(node, ast.NamedExpr) and isinstance(node.value, ast.Call):
            found.add(node.target.id)
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(names)
            for name, value in zip(names, values, strict=False):
                own_message = isinstance(value, ast.Attribute) and value.attr in messages
                if isinstance(name, ast.Name) and (isinstance(value, ast.Call) or own_message):
                    found.add(name.id)
    return found


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    given = node.targets if isinstance(node, ast.Assign) else []
    given = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else given
    for target in given:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def foreign_assignments(source: str) -> list[str]:
    """Assignments to attributes of objects that the assigning function did not make, its own object apart."""
    tree = ast.parse(source)
    messages, found = message_attributes(tree), []
    for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
        mine = made_here(function, messages)
        for node in ast.walk(function):
            for target in targets_of(node):
                if not isinstance(target, ast.Attribute):
                    continue
                owner = target.value
                while isinstance(owner, ast.Attribute) and owner.attr not in messages:
                    owner = owner.value
                root = ast.unparse(owner)
                depth = ast.unparse(target).count(".")
                if (
                    not (root in ("self", "cls") and depth == 1)
                    and root not in mine
                    and root.split(".")[-1] not in messages
                ):
                    found.append(ast.unparse(target))
    return sorted(set(found))


def test_no_part_of_the_loop_sets_an_attribute_of_another():
    names = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in names.split() if name.endswith(".py") and (ROOT / name).exists()]
    assert len(files) > 20
    found = {path.relative_to(ROOT).as_posix(): foreign_assignments(path.read_text()) for path in files}
    assert {path: targets for path, targets in found.items() if targets} == OF_LIBRARIES


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("def run(verifier, account):\n    verifier.stays_off = account.stays_off", ["verifier.stays_off"]),
        (
            "class A:\n    def draft(self):\n        self._verifier.on_refused = self.strike",
            ["self._verifier.on_refused"],
        ),
        ("class A:\n    def learn(self):\n        self._shared.load.sizes += 1", ["self._shared.load.sizes"]),
        ("class A:\n    def __init__(self):\n        self.moves = 0", []),
        ("def make():\n    made = Record()\n    made.version = 2", []),
        ("def fill(complete: pb.GenerateComplete):\n    complete.usage.prompt_tokens = 2", []),
    ],
)
def test_what_counts_as_an_attribute_of_another(body, found):
    assert foreign_assignments(body) == found
