"""Rewrites JSON schemas so that llguidance enforces exactly what JSON Schema says.

Where a keyword's meaning cannot be had, the rewritten one admits less, never more: `docs/structured.md` lists such
keywords. What can be neither enforced nor narrowed is refused, with the keyword and its place as a JSON pointer.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Self

from dendro.arguments import repeated_key, shown
from dendro.object_keys import NAMING, Keys, declare, is_well_formed, listed, may_be_object, shared_keys
from dendro.patterns import FORMATS, LONGEST, translated
from dendro.schema_refs import (
    ALONE,
    DEFINITIONS,
    IN_LISTS,
    IN_MAPS,
    IN_PLACE,
    Json,
    References,
    Schema,
    inner,
    parts_of,
    pointer,
)
from dendro.written_numbers import WrittenNumber, number_of

EXACT = 1 << 53
"""Whole numbers up to this one are exact in float64, the type in which llguidance reads numbers."""
LARGEST = 1 << 63
NEAREST = Decimal("1e-9")
"""Least distance of a fraction from a whole number that is excluded as its bound."""
MOST_MORE = 1 << 20
"""Bytes of a schema that are written more than once."""
DRAFTS = re.compile(
    r"http://json-schema\.org/draft-0[4-7]/(hyper-)?schema#?"
    r"|https://json-schema\.org/draft/(2019-09|2020-12)/(hyper-)?schema#?"
)
"""Accepted values of `$schema`."""


class SchemaError(ValueError):
    """Says what is wrong, and where."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where or 'the schema'}: {reason}")
        self._arguments = where, reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Lets the error be unpickled with its arguments in another process."""
        return type(self), self._arguments


def enforceable(text: str) -> str:
    """The schema of this JSON text, as JSON text that llguidance enforces as written. Raises SchemaError, naming the
    keyword, and ValueError for text that is no JSON."""
    plain = text.removeprefix("\ufeff")
    schema = json.loads(plain, parse_float=_number, parse_constant=_no_number, object_pairs_hook=_distinct)
    if schema is True:
        schema = {}
    if schema is False:
        raise SchemaError("", "false describes no value")
    if not isinstance(schema, dict):
        raise SchemaError("", f"is {json.dumps(schema)[:40]}; a schema is an object or a boolean")
    return json.dumps(_Rewriting(schema).whole())


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, none of whose keys occurs twice: readers differ in the value that they take."""
    twice = repeated_key(pairs)
    if twice is not None:
        raise SchemaError("", f"the key {shown(twice)} occurs twice in an object")
    return dict(pairs)


def _number(text: str) -> float:
    found = number_of(text)
    if not math.isfinite(found):
        raise ValueError(f"{text} is no number of 64 bits")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


class _Rewriting:
    """Rewrites one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._references = References(root)
        self._reached = self._references.reached()
        self._above = {above for place in self._reached or () for above in _above(place)}
        self._done: set[str] = set()  # places of what was rewritten
        self._inlined: list[str] = []  # places of the schemas that stand where a reference to them was
        self._more = 0  # bytes that inlined copies add to the schema

    def whole(self) -> Schema:
        """The schema, without definitions that nothing refers to."""
        made = self._schema(self._root, "")
        for place, schema in (self._reached or {}).items():
            if place not in self._done:  # a pointer into something else than schemas refers to this place
                _put(made, place, self._schema(schema, place))
        return made

    def _schema(self, schema: Schema, where: str, keys: Keys | None = None) -> Schema:
        """Rewrite a schema and all schemas within it. keys: keys of the schemas around it that describe the same value;
        None: this one is the outermost"""
        self._done.add(where)
        schema = self._references.counting(schema)
        keys = keys or shared_keys(schema, self._references)
        if keys is not None and (target := self._references.target(schema)) and target[0] not in self._inlined:
            schema = {keyword: value for keyword, value in schema.items() if keyword != "$ref"}
            made = self._keywords(schema, where, keys)
            self._inlined.append(target[0])
            if isinstance(target[1], dict):
                inlined = self._schema(target[1], target[0], keys)
                made["allOf"] = [*made.get("allOf", ()), inlined]
                self._count(1, inlined, f"{where}/$ref")
            self._inlined.pop()
        else:
            made = self._keywords(schema, where, keys)
        return made

    def _keywords(self, schema: Schema, where: str, keys: Keys | None) -> Schema:
        made = {keyword: self._value(keyword, value, where, keys) for keyword, value in schema.items()}
        if made.get("uniqueItems") is False:
            del made["uniqueItems"]
        if not isinstance(made.get("items"), list):
            made.pop("additionalItems", None)  # no effect here; llguidance would read an old draft's prefixItems
        for keyword in made:
            made[keyword] = _typed(made, keyword, where)
        for keyword in ("const", "enum"):
            if keyword in made:
                _check_exact(made[keyword], f"{where}/{keyword}")
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if _is_number(made.get(keyword)):
                _bound(made, keyword)
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            _exclude(made, keyword)
        if isinstance(made.get("multipleOf"), WrittenNumber) or _too_large(made.get("multipleOf")):
            raise SchemaError(f"{where}/multipleOf", "has more digits than float64")
        _expressions(made, where)
        if may_be_object(made) and any(keyword in made for keyword in NAMING):
            self._keys(made, schema, where, keys)
        return made

    def _keys(self, made: Schema, schema: Schema, where: str, shared: Keys | None) -> None:
        """Let a key that is not declared be written without escapes only."""
        if not is_well_formed(schema):
            return
        for pattern, names in listed(schema).items():
            at = f"{where}/patternProperties/{pointer(pattern)}"
            self._count(len(names), schema["patternProperties"][pattern], at)
            declare(made, pattern, names)
        others = made.get("additionalProperties", True)
        _check_least(made, len(set(made.get("required", ()))), others is False, where)
        if others is False:
            return
        keys = shared or Keys.of(schema)
        at = f"{where}/additionalProperties"
        self._count(len(keys.names) + len(keys.patterns), others, at)
        self._count(1, keys.rest, at)
        made |= keys.declared(schema, made)

    def _count(self, times: int, schema: Json, where: str) -> None:
        """Raise SchemaError where what is written more than once would become too much."""
        self._more += times * len(json.dumps(schema))
        if self._more > MOST_MORE:
            raise SchemaError(where, f"would be repeated: the schema would have more than {MOST_MORE} bytes")

    def _value(self, keyword: str, value: Json, where: str, keys: Keys | None) -> Json:
        """A keyword's value, with the schemas in it rewritten."""
        place = f"{where}/{keyword}"
        same = keys if keyword in IN_PLACE else None

        def rewritten(each: Json, at: str) -> Json:
            return self._schema(each, at, same) if isinstance(each, dict) else each

        if keyword in IN_MAPS and isinstance(value, dict):
            places = {name: f"{place}/{pointer(name)}" for name in value}
            if keyword in DEFINITIONS:
                value = {name: each for name, each in value.items() if self._is_reached(each, places[name])}
            return {name: rewritten(each, places[name]) for name, each in value.items()}
        if (keyword in IN_LISTS or keyword == "items") and isinstance(value, list):
            return [rewritten(each, f"{place}/{index}") for index, each in enumerate(value)]
        return rewritten(value, place) if keyword in ALONE else value

    def _is_reached(self, schema: Json, place: str) -> bool:
        """True if a reference may lead to a definition, or into it."""
        return self._reached is None or not isinstance(schema, dict) or place in self._above


def _above(place: str) -> Iterator[str]:
    """Yields a place and all places that contain it, except the whole schema (the empty place)."""
    while place:
        yield place
        place = place.rpartition("/")[0]


def _put(schema: Json, place: str, value: Schema) -> None:
    """Put a schema at a place; where that does not exist any more, llguidance says so."""
    *above, last = parts_of(place)
    with contextlib.suppress(LookupError, ValueError, TypeError):
        for part in above:
            schema = schema[int(part) if isinstance(schema, list) else part]
        schema[int(last) if isinstance(schema, list) else last] = value


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _are_strings(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_Kind = tuple[Callable[[Json], bool], str]
_COUNT: _Kind = _is_count, "a whole number from 0 to 2^64 - 1"
_NUMBER: _Kind = _is_number, "a number"
_EXCLUSIVE: _Kind = lambda value: _is_number(value) or isinstance(value, bool), "a number"  # draft 4 has booleans
_STRING: _Kind = lambda value: isinstance(value, str), "a string"
_ARRAY: _Kind = lambda value: isinstance(value, list), "an array"
_OBJECT: _Kind = lambda value: isinstance(value, dict), "an object"

KINDS: Mapping[str, _Kind] = {
    **dict.fromkeys(("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _EXCLUSIVE),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("pattern", "format", "$ref"), _STRING),
    "type": (lambda value: isinstance(value, str) or _are_strings(value), "a string or array of strings"),
    "required": (_are_strings, "an array of strings"),
    "uniqueItems": (lambda value: isinstance(value, bool), "a boolean"),
    **dict.fromkeys(("enum", *IN_LISTS), _ARRAY),
    **dict.fromkeys((keyword for keyword in IN_MAPS if keyword not in DEFINITIONS), _OBJECT),
    "$schema": (
        lambda value: isinstance(value, str) and DRAFTS.fullmatch(value) is not None,
        "that of a draft from 4 on, such as https://json-schema.org/draft/2020-12/schema",
    ),
}
"""What the values of keywords must be. llguidance checks those alone that matter for a schema's types."""


def _typed(schema: Schema, keyword: str, where: str) -> Json:
    """A keyword's value, where it is a count as an int. Raises SchemaError for a value that the keyword cannot have,
    or has in drafts before 4 alone."""
    value = schema[keyword]
    is_kind, kind = KINDS.get(keyword, (None, ""))
    if is_kind is _is_count and type(value) is float and value.is_integer():
        value = int(value)
    if is_kind is not None and not is_kind(value):
        raise SchemaError(f"{where}/{keyword}", f"{keyword} must be {kind}")
    for place, each in inner(schema, where, keyword) if keyword not in DEFINITIONS else ():
        if not isinstance(each, dict | bool):
            raise SchemaError(place, "schema must be an object or boolean")
    return value


def _too_large(value: Json) -> bool:
    return _is_number(value) and abs(value) >= EXACT


def _check_exact(value: Json, where: str) -> None:
    """Raise SchemaError for a number of a constant that would be written with other digits."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_exact(each, f"{where}/{pointer(name)}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check_exact(each, f"{where}/{index}")
    elif isinstance(value, WrittenNumber) or (
        _too_large(value) and (abs(value) >= LARGEST or int(float(value)) != value)
    ):
        raise SchemaError(where, "has a number with more digits than float64; give it as a string")


def _bound(made: Schema, keyword: str) -> None:
    """Move a bound that float64 lacks, or beyond which it lacks whole numbers, to the next number inside."""
    bound, value = made[keyword], float(made[keyword])
    inwards = -math.inf if keyword.endswith("aximum") else math.inf
    exclusive = keyword.startswith("exclusive")
    if not isinstance(bound, WrittenNumber) and not _too_large(bound):
        return
    outside = value >= bound if inwards < 0 else value <= bound
    if isinstance(bound, WrittenNumber) or (outside and (exclusive or value != bound)):
        value = math.nextafter(value, inwards)
    while abs(value) >= LARGEST and value * inwards < 0:  # larger whole numbers are not enforced exactly
        value = math.nextafter(math.copysign(LARGEST, value), 0)
    while (Decimal(repr(value)) - Decimal(value)) * int(math.copysign(1, inwards)) < 0:
        value = math.nextafter(value, inwards)  # a fraction's bound is written with the fewest digits
    del made[keyword]
    plain = keyword.removeprefix("exclusive").lower()
    if _is_number(given := made.get(plain)):
        assert given is not None
        value = min(value, given) if inwards < 0 else max(value, given)
    made[plain] = int(value) if value.is_integer() else value


def _exclude(made: Schema, keyword: str) -> None:
    """Move an excluded bound of fractions inwards if it is a whole number: llguidance would admit the bound itself
    where the other bound is a fraction with the same whole part."""
    plain, sign = keyword.removeprefix("exclusive").lower(), 1 if keyword.endswith("inimum") else -1
    if isinstance(made.get(keyword), bool):  # the form of draft 4
        excludes = made.pop(keyword)
        if excludes and _is_number(made.get(plain)):
            made[keyword] = made.pop(plain)
    kinds = made.get("type", "number")
    bound = made.get(keyword)
    if not isinstance(kinds, str | list) or "number" not in kinds:
        return
    if bound is None or not _is_number(bound) or bound != int(bound):
        return
    del made[keyword]
    moved = sign * max(math.nextafter(sign * bound, math.inf), float(Decimal(sign * bound) + NEAREST))
    given = made.get(plain)
    made[plain] = sign * max(sign * given, sign * moved) if given is not None and _is_number(given) else moved


def _expressions(made: Schema, where: str) -> None:
    """Translate patterns; give the formats that llguidance takes too widely as patterns."""
    patterns = []
    if isinstance(made.get("pattern"), str):
        patterns.append(_translated(made.pop("pattern"), f"{where}/pattern"))
    form = made.get("format")
    if isinstance(form, str) and form in FORMATS:
        patterns.append(FORMATS[made.pop("format")])
        if form in LONGEST and isinstance(made.setdefault("maxLength", LONGEST[form]), int):
            made["maxLength"] = min(made["maxLength"], LONGEST[form])
    if patterns:
        made["pattern"] = patterns[0]
    if patterns[1:]:
        made["allOf"] = [*made.get("allOf", ()), *({"pattern": each} for each in patterns[1:])]
    if isinstance(made.get("patternProperties"), dict):
        found = made["patternProperties"].items()
        place = f"{where}/patternProperties"
        made["patternProperties"] = {_translated(each, f"{place}/{pointer(each)}"): value for each, value in found}


def _translated(pattern: str, where: str) -> str:
    try:
        return translated(pattern)
    except ValueError as error:
        raise SchemaError(where, str(error)) from None


def _check_least(made: Schema, required: int, closed: bool, where: str) -> None:
    """Raise SchemaError where repeated keys could be counted for `minProperties`: a key counts once, and those that are
    declared cannot be repeated."""
    least = made.get("minProperties")
    if not isinstance(least, int) or isinstance(least, bool):
        return
    if least <= required:
        del made["minProperties"]
    elif least > required + 1 and not (closed and not made.get("patternProperties")):
        raise SchemaError(f"{where}/minProperties", f"{least} cannot be enforced: keys could be repeated")
