"""Grammars in Lark syntax, as far as they are read without compiling them: what they name, and the schemas in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

TOKEN = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\])*"?|/(?:\\.|[^/\\])*/?|<[^>]*>?|%\w+', re.DOTALL)
"""Comments, strings, expressions, names of the tokenizer's tokens, and directives."""


def token_references(grammar: str) -> Iterator[str]:
    """The tokens that a grammar names, as `<[7]>` or `<|end|>`, outside of strings, expressions, comments and
    schemas."""
    for found in _tokens(grammar):
        if grammar[found.start()] == "<":
            yield found.group()


def with_schemas(grammar: str, enforced: Callable[[str], str]) -> str:
    """The grammar with each of its schemas (`%json {...}`) as `enforced` makes it; lines stay lines. Raises ValueError,
    with the line, for what is no JSON or what `enforced` raises one for."""
    parts, place = [], 0
    for found in _tokens(grammar):
        if found.group() != "%json":
            continue
        end = _end_of_json(grammar, found.end())
        schema = grammar[found.end() : end]
        try:
            parts += [grammar[place : found.end()], " ", enforced(schema.strip()), "\n" * schema.count("\n")]
        except ValueError as error:
            raise ValueError(f"line {_line(grammar, found.start())}, %json: {error}") from None
        place = end
    return "".join([*parts, grammar[place:]])


def schema_at(grammar: str, line: int) -> str | None:
    """The first schema that begins on a line of a grammar; None where there is none."""
    for found in _tokens(grammar):
        if found.group() == "%json" and _line(grammar, found.start()) == line:
            return grammar[found.end() : _end_of_json(grammar, found.end())]
    return None


def _tokens(grammar: str) -> Iterator[re.Match[str]]:
    place = 0
    while found := TOKEN.search(grammar, place):
        yield found
        place = _end_of_json(grammar, found.end()) if found.group() == "%json" else found.end()


def _end_of_json(grammar: str, place: int) -> int:
    start = len(grammar) - len(grammar[place:].lstrip())
    try:
        return json.JSONDecoder().raw_decode(grammar, start)[1]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {_line(grammar, place)}, %json: no JSON follows: {error}") from None


def _line(grammar: str, place: int) -> int:
    return grammar.count("\n", 0, place) + 1
