"""The keys of an object that a JSON schema does not declare, in a form in which no key can be spelt as another.

llguidance lets a key of `additionalProperties` be any JSON string, so a declared key could come again, spelt with an
escape. A key of `patternProperties` can be spelt in one way only. Where several schemas describe one object (`allOf`, a
reference with siblings), llguidance combines their patterns only if these are the same or have no key in common. So
each of the schemas gets the names and the patterns of all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dendro.patterns import other_keys, translated
from dendro.schema_refs import IN_PLACE, Json, References, Schema

NAMING = ("properties", "required", "patternProperties", "minProperties")
"""Keywords for which it matters how a key is spelt, or whether it is repeated."""


MOST_FOLLOWED = 200
"""References of schemas of one object. Where there are more, llguidance refuses patterns that it cannot combine."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names and patterns of keys in all schemas of one object."""

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    several: bool  # True if several schemas describe the object
    alike: bool  # True if every other key may have any value
    rest: str | None  # an expression of other keys; None where it is not known which the patterns leave over

    @classmethod
    def of(cls, *schemas: Schema) -> Keys:
        """Collect the keys of schemas whose keywords have the right types."""
        names, patterns = list[str](), list[str]()
        for each in schemas:
            names += (*each.get("properties", ()), *each.get("required", ()))
            found = listed(each)
            names += (name for group in found.values() for name in group)
            patterns += (pattern for pattern in each.get("patternProperties", ()) if pattern not in found)
        alike = all(_others(each) in (True, False, {}) for each in schemas)
        begin = set(map(beginning, patterns))
        rest = None if "" in begin else other_keys(set() if alike else set(names), begin)
        return cls(tuple(dict.fromkeys(names)), tuple(dict.fromkeys(patterns)), len(schemas) > 1, alike, rest)

    def declared(self, schema: Schema, made: Schema) -> Schema:
        """Keywords of keys for one of the schemas, which is open to keys that it does not declare. made: the rewritten
        schema"""
        own, others = schema.get("patternProperties", {}), _others(made)
        given, patterns = made.get("properties", {}), made.get("patternProperties", {})
        found: Schema = {"additionalProperties": False}
        if self.patterns or not self.alike:
            starts = tuple(beginning(each) for each in own if re.fullmatch(rf"\^{PLAIN}", each, re.ASCII))
            missing = {name: True if name.startswith(starts) else others for name in self.names if name not in given}
            found["properties"] = given | missing
        found["patternProperties"] = patterns | {translated(each): others for each in self.patterns if each not in own}
        if self.rest is not None:
            found["patternProperties"][self.rest] = others
        return found


def _others(schema: Schema) -> Json:
    return schema.get("additionalProperties", True)


CHARACTER = r"(?:[\w \-/:@#%&=,;~<>!'`]|\\[.\-/$^*+?()[\]{}|])"
PLAIN = f"{CHARACTER}+"
"""Characters that stand for themselves in a pattern."""


def beginning(pattern: str) -> str:
    """A text that all matches of a pattern begin with; empty where none is known."""
    found = re.match(rf"\^({CHARACTER}*){CHARACTER}", pattern, re.ASCII)
    if not found or _has_alternatives(pattern):
        return ""
    return _plain(found[1] if pattern[found.end() : found.end() + 1] in tuple("?*{") else found[0][1:])


def _has_alternatives(pattern: str) -> bool:
    """True if an expression has a | outside of its groups."""
    depth = 0
    for token in re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", pattern, re.DOTALL):
        if token == "|" and not depth:
            return True
        depth += {"(": 1, ")": -1}.get(token, 0)
    return False


def exact(pattern: str) -> list[str]:
    """The texts that a pattern lists; empty for a pattern of another form."""
    if re.fullmatch(rf"\^{PLAIN}\$", pattern, re.ASCII):
        return [_plain(pattern[1:-1])]
    listed = re.fullmatch(rf"\^\((?:\?:)?({PLAIN}(?:\|{PLAIN})*)\)\$", pattern, re.ASCII)
    return [_plain(each) for each in re.findall(PLAIN, listed[1], re.ASCII)] if listed else []


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def listed(schema: Schema) -> dict[str, list[str]]:
    """Keys by pattern, for the patterns that list their keys: as declared keys they cannot be given twice. Empty for
    schemas that count keys, since llguidance counts only where all declared keys are required."""
    if "minProperties" in schema or "maxProperties" in schema:
        return {}
    found = {pattern: exact(pattern) for pattern in schema.get("patternProperties", ())}
    return {pattern: names for pattern, names in found.items() if names}


def declare(made: Schema, pattern: str, names: list[str]) -> None:
    """Make properties of a pattern that lists its keys."""
    patterns, properties = dict(made["patternProperties"]), dict(made.get("properties", {}))
    value = patterns.pop(translated(pattern))
    for name in names:
        properties[name] = {"allOf": [properties[name], value]} if name in properties else value
    made |= {"properties": properties, "patternProperties": patterns}


def may_be_object(schema: Mapping[str, Json]) -> bool:
    kinds = schema.get("type", "object")
    return "object" in (kinds if isinstance(kinds, list) else [kinds])


def shared_keys(schema: Schema, references: References) -> Keys | None:
    """The keys of all schemas of one object, of which this is the outermost; None where each can be read alone."""
    combining = [keyword for keyword in ("allOf", "anyOf", "oneOf", "$ref") if keyword in schema]
    if not combining or (len(combining) == 1 and combining != ["allOf"] and not any(each in schema for each in NAMING)):
        return None
    found, seen = [], set[str]()
    for each in _of_object(schema, references, seen):
        found.append(each)
        if len(seen) > MOST_FOLLOWED:
            return None
    keys = Keys.of(*found)
    return keys if keys.several and (keys.patterns or not keys.alike) else None


def _of_object(schema: Json, references: References, seen: set[str]) -> Iterator[Schema]:
    """The schemas of the same object that have something to say about its keys."""
    if not isinstance(schema, dict):
        return
    schema = references.counting(schema)
    if may_be_object(schema) and is_well_formed(schema) and any(keyword in schema for keyword in NAMING):
        yield schema
    for keyword, value in schema.items():
        if (
            keyword == "$ref"
            and (target := references.target(schema))
            and not (target[0] in seen or len(seen) > MOST_FOLLOWED)
        ):
            seen.add(target[0])
            yield from _of_object(target[1], references, seen)
        elif keyword in IN_PLACE and isinstance(value, list):
            for each in value:
                yield from _of_object(each, references, seen)


def is_well_formed(schema: Schema) -> bool:
    """True if the keywords of keys have values of the right kinds; llguidance says what is wrong with others."""
    required = schema.get("required", [])
    return (
        isinstance(schema.get("properties", {}), dict)
        and isinstance(schema.get("patternProperties", {}), dict)
        and isinstance(required, list)
        and all(isinstance(each, str) for each in required)
    )
