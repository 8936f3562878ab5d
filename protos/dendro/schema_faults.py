"""Finds the place in a structure of what llguidance refuses. For a JSON schema llguidance's message says what is wrong
but not where. It also quotes the grammar, which for a schema or an expression was not written by the client."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping

from dendro.lark_text import schema_at
from dendro.patterns import translated
from dendro.schema_refs import Json, References, Schema, inner, pointer

REFUSED = "failed to compile JSON schema: "
MESSAGE = re.compile(
    rf"(?P<head>.*?): at \d+\(\d+\): {REFUSED}(?P<reason>.*?)"
    r"(?: while processing [^\s#]*#(?P<within>\S*))?(?: 1 \| %llguidance.*)?"
)
QUOTING = re.compile(r"(?P<head>.*?): (?:at )?(?P<line>\d+)\(\d+\): (?P<reason>.*?)(?: \d+ \| .*)?")
"""Form of llguidance's message for a fault of a grammar, with the faulty line and the lines around it."""
KINDS = {"null", "boolean", "number", "string", "array", "object"}
OVERLAP = (
    "alternatives that may overlap, or whose constants are different numbers, arrays or objects, cannot be enforced; "
    "use anyOf, or give them different types or constant strings"
)


def located(fault: str, form: str, text: str) -> str:
    """Rewrite llguidance's fault of a structure: with its place, and without what llguidance quotes. form: a value of
    StructureForm   text: of the structure, as the client gave it"""
    if form == "json_schema":
        return placed(fault, text)
    message = QUOTING.fullmatch(fault)
    if message is None:
        return fault
    head, reason = message["head"], message["reason"]
    if form != "grammar":
        return f"{head}: {reason}"
    line = int(message["line"]) - 1  # the first is the server's own
    schema = schema_at(text, line) if reason.startswith(REFUSED) else None
    if schema is None:
        return f"line {line}: {head}: {reason}"
    return f"line {line}, %json: " + placed(f"{head}: at {line}(1): {reason}", schema)


def placed(fault: str, text: str) -> str:
    """Rewrite llguidance's fault of a schema: with the place as a JSON pointer, if found, and without the schema, which
    llguidance repeats. text: the schema as JSON"""
    message = MESSAGE.fullmatch(fault)
    if message is None:
        return fault
    head, reason = message["head"], message["reason"]
    schema = json.loads(text.removeprefix("\ufeff"))
    places = (place for found, place in _faults(reason, schema) if found.startswith(message["within"] or ""))
    place = next(places, None)
    if reason.startswith("oneOf constraints"):
        reason = OVERLAP
    return f"{head}: {place}: {reason}" if place else f"{head}: {reason}"


def _faults(reason: str, root: Json) -> Iterator[tuple[str, str]]:
    """The places of schemas that a reason is true of, and of what is wrong in them."""
    rules = ((rule, found) for expression, rule in RULES.items() if (found := re.match(expression, reason)))
    rule, match = next(rules, (None, None))
    if rule is None or match is None or not isinstance(root, dict):
        return
    for place, schema in References(root).all_reached():
        for keyword in rule(schema, match):
            yield place, f"{place}/{keyword}"


def _has(schema: Schema, match: re.Match[str]) -> Iterator[str]:
    if match[1] in schema and not (match[1] == "uniqueItems" and schema[match[1]] is False):
        yield match[1]


def _names(keyword: str) -> Callable[[Schema, re.Match[str]], Iterator[str]]:
    """Match a keyword whose value is, has, or ends with the text of the pattern's first group."""

    def rule(schema: Schema, match: re.Match[str]) -> Iterator[str]:
        value, wanted = schema.get(keyword), next(filter(None, match.groups()), None)
        if wanted is None:  # the library quotes an empty text
            return
        listed = value if isinstance(value, list) else [value]
        if wanted in listed or (keyword == "$ref" and isinstance(value, str) and value.endswith(wanted)):
            yield keyword

    return rule


def _bounds_keys(schema: Schema, match: re.Match[str]) -> Iterator[str]:
    yield from (keyword for keyword in ("maxProperties", "minProperties") if keyword in schema)


def _has_patterns(schema: Schema, match: re.Match[str]) -> Iterator[str]:
    if schema.get("patternProperties"):
        yield "patternProperties"


def _overlaps(schema: Schema, match: re.Match[str]) -> Iterator[str]:
    options = schema.get("oneOf")
    if isinstance(options, list) and any(_may_overlap(*pair) for pair in itertools.combinations(options, 2)):
        yield "oneOf"


def _may_overlap(one: Json, two: Json) -> bool:
    """True if llguidance cannot tell from two schemas' types and constants that no value is of both."""
    if not _kinds(one) & _kinds(two):
        return False
    if not isinstance(one, dict) or not isinstance(two, dict):
        return True
    first, second = _constants(one), _constants(two)
    if first is not None and second is not None:
        return any(not _told_apart(*pair) for pair in itertools.product(first, second))
    names = [each["properties"] if isinstance(each.get("properties"), dict) else {} for each in (one, two)]
    lists = [each.get("required") for each in (one, two)]
    required = [name for each in lists if isinstance(each, list) for name in each if isinstance(name, str)]
    return all(_may_overlap(names[0].get(name, True), names[1].get(name, True)) for name in required)


def _told_apart(one: Json, other: Json) -> bool:
    """True if two constants are of different types, or different strings or booleans."""
    kinds = [float if type(each) is int else type(each) for each in (one, other)]
    return kinds[0] is not kinds[1] or (isinstance(one, str | bool) and one != other)


def _constants(schema: Schema) -> list[Json] | None:
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def _kinds(schema: Json) -> set[str]:
    """The types of a schema's values, at most."""
    if not isinstance(schema, dict):
        return KINDS
    for keyword in ("oneOf", "anyOf"):
        if "type" not in schema and isinstance(schema.get(keyword), list):
            return {kind for each in schema[keyword] for kind in _kinds(each)}
    kinds = schema.get("type", list(KINDS))
    return {"number" if kind == "integer" else str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])}


def _is_schema(schema: Schema, match: re.Match[str]) -> Iterator[str]:
    for keyword in schema:
        for place, each in inner(schema, "", keyword):
            if not isinstance(each, dict | bool):
                yield place.removeprefix("/")


def _has_expression(schema: Schema, match: re.Match[str]) -> Iterator[str]:
    """That an expression is in the message, in which line breaks are spaces."""
    message, named = match.string.replace(r"\/", "/"), schema.get("patternProperties")
    given = [("pattern", schema.get("pattern"))]
    given += [(f"patternProperties/{pointer(each)}", each) for each in (named if isinstance(named, dict) else ())]
    for keyword, pattern in given:
        if isinstance(pattern, str) and pattern:
            with contextlib.suppress(ValueError):  # raised for a pattern that does not count
                if " ".join(translated(pattern).replace(r"\/", "/").split()) in message:
                    yield keyword


RULES: Mapping[str, Callable[[Schema, re.Match[str]], Iterator[str]]] = {
    "schema must be an object or boolean": _is_schema,
    r'Unimplemented keys: \["([^"]+)"': _has,
    "Unknown format: (.*)": _names("format"),
    "Invalid type: (.*)": _names("type"),
    "oneOf constraints": _overlaps,
    "Pointer '(.*)' does not|Anchor '(.*)' does not|Resource '(.*)' is not": _names("$ref"),
    "circular references with sibling keys are not supported: [^#]*(.*)": _names("$ref"),
    "Unsatisfiable schema: required property '(.*)' is": _names("required"),
    "min/maxProperties only": _bounds_keys,
    "patternProperty regexes": _has_patterns,
    "regex parse error|lookarounds not supported|Unable to determine if regex": _has_expression,
}
"""Reasons of llguidance, and functions that yield the keywords of a schema which they may be about."""
