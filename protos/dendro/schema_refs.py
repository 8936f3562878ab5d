"""Resolves a JSON schema's references, and finds the parts of the schema that count."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Json = Any
Schema = dict[str, Any]

DEFINITIONS = ("$defs", "definitions")
IN_MAPS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)
IN_PLACE = ("allOf", "anyOf", "oneOf")
"""Lists of schemas of the same value as the one that they are in."""
IN_LISTS = (*IN_PLACE, "prefixItems")
ALONE = (
    "items", "additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip

ASSERTIONS = frozenset(
    ("additionalItems", "additionalProperties", "allOf", "anyOf", "const", "contains", "dependencies", "else", "enum",
     "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items", "maxItems", "maxLength", "maxProperties",
     "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern",
     "patternProperties", "properties", "propertyNames", "required", "then", "type", "uniqueItems")
)  # fmt: skip
"""Keywords that are ignored beside a reference up to draft 7."""
OLD_DRAFTS = re.compile(r"^http://json-schema\.org/draft-0[4-7]/")


def pointer(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def parts_of(place: str) -> list[str]:
    """The names of a JSON pointer."""
    return [part.replace("~1", "/").replace("~0", "~") for part in place.split("/")[1:]]


class References:
    """The references of a whole schema. Raises nothing: llguidance reports faults of references."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        given = root.get("$schema")
        self._old = isinstance(given, str) and OLD_DRAFTS.match(given) is not None

    def counting(self, schema: Schema) -> Schema:
        """The keywords that count: up to draft 7 those beside a reference are ignored."""
        if not self._old or not isinstance(schema.get("$ref"), str):
            return schema
        return {keyword: value for keyword, value in schema.items() if keyword not in ASSERTIONS}

    def target(self, schema: Schema) -> tuple[str, Json] | None:
        """The place and the schema that a schema's reference names; None where it has none that is a JSON pointer."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
            return None
        found: Json = self._root
        parts = parts_of(unquote(reference[1:]))
        for part in parts:
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return None
        return "".join(f"/{pointer(part)}" for part in parts), found

    def reached(self) -> dict[str, Schema] | None:
        """The schemas that a value may be compared with, by their places; None where references are not followed."""
        found: dict[str, Schema] = {}
        waiting: list[tuple[str, Json]] = [("", self._root)]
        while waiting:
            place, schema = waiting.pop()
            if not isinstance(schema, dict) or place in found:
                continue
            found[place] = schema = self.counting(schema)
            if place and isinstance(schema.get("$id", schema.get("id")), str):
                return None
            if "$ref" in schema:
                if (target := self.target(schema)) is None:
                    return None
                waiting.append(target)
            waiting += [
                each for keyword in schema if keyword not in DEFINITIONS for each in inner(schema, place, keyword)
            ]
        return found

    def all_reached(self) -> Iterator[tuple[str, Schema]]:
        """Places and schemas of `reached`, or of the whole schema if references are not followed."""
        if (reached := self.reached()) is not None:
            yield from reached.items()
            return
        waiting: list[tuple[str, Json]] = [("", self._root)]
        while waiting:
            place, schema = waiting.pop()
            if isinstance(schema, dict):
                yield place, schema
                for keyword in schema:
                    waiting += inner(schema, place, keyword)


def inner(schema: Schema, place: str, keyword: str) -> Iterator[tuple[str, Json]]:
    """The schemas of a keyword, with their places."""
    value = schema[keyword]
    if keyword in IN_MAPS and isinstance(value, dict):
        yield from ((f"{place}/{keyword}/{pointer(name)}", each) for name, each in value.items())
    elif keyword in (*IN_LISTS, "items") and isinstance(value, list):
        yield from ((f"{place}/{keyword}/{index}", each) for index, each in enumerate(value))
    elif keyword in ALONE:
        yield f"{place}/{keyword}", value
