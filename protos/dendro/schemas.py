"""JSON schemas, rewritten so that what llguidance compiles of them is what JSON Schema says.

Where a keyword's meaning cannot be had, the rewritten one admits less, never more: `docs/structured.md` lists such
keywords. What can be neither enforced nor narrowed is refused, with the keyword and its place as a JSON pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Self

from dendro.patterns import FORMATS, other_keys, translated

EXACT = 1 << 53
"""Whole numbers up to it are numbers of float64, as which llguidance reads them."""
LARGEST = 1 << 63

Json = Any
Schema = dict[str, Any]

IN_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
ALONE = (
    "items", "additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
NAMING = ("properties", "required", "patternProperties", "minProperties")
"""Keywords for which it matters how a key is spelt, or whether it is repeated."""


class SchemaError(ValueError):
    """Says what is wrong, and where."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where or 'the schema'}: {reason}")
        self._arguments = where, reason

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Unpickled as it was made, in another process."""
        return type(self), self._arguments


class _Lossy(float):
    """A number of the text that float64 does not have."""


def enforceable(text: str) -> str:
    """The schema of this JSON text, as JSON text that llguidance enforces as written. Raises SchemaError, naming the
    keyword, and ValueError for text that is no JSON."""
    schema = json.loads(text.removeprefix("\ufeff"), parse_float=_number, parse_constant=_no_number)
    if schema is True:
        schema = {}
    if schema is False:
        raise SchemaError("", "false describes no value")
    if not isinstance(schema, dict):
        raise SchemaError("", f"is {json.dumps(schema)[:40]}; a schema is an object or a boolean")
    return json.dumps(_rewritten(schema, ""))


def _number(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text} is no number of 64 bits")
    return found if Decimal(repr(found)) == Decimal(text) else _Lossy(found)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _rewritten(schema: Schema, where: str) -> Schema:
    """The schema of an object, and all within it."""
    made = {keyword: _value(keyword, value, where) for keyword, value in schema.items()}
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    for keyword in ("const", "enum"):
        if keyword in made:
            _check_exact(made[keyword], f"{where}/{keyword}")
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if _is_number(made.get(keyword)):
            _bound(made, keyword)
    if isinstance(made.get("multipleOf"), _Lossy) or _too_large(made.get("multipleOf")):
        raise SchemaError(f"{where}/multipleOf", "has more digits than float64")
    _expressions(made, where)
    if _may_be_object(made) and any(keyword in made for keyword in NAMING):
        _keys(made, where)
    return made


def _value(keyword: str, value: Json, where: str) -> Json:
    """A keyword's value, with the schemas in it rewritten."""
    place = f"{where}/{keyword}"

    def inner(each: Json, at: str) -> Json:
        return _rewritten(each, at) if isinstance(each, dict) else each

    if keyword in IN_MAPS and isinstance(value, dict):
        return {name: inner(each, f"{place}/{_pointer(name)}") for name, each in value.items()}
    if (keyword in IN_LISTS or keyword == "items") and isinstance(value, list):
        return [inner(each, f"{place}/{index}") for index, each in enumerate(value)]
    return inner(value, place) if keyword in ALONE else value


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _too_large(value: Json) -> bool:
    return _is_number(value) and abs(value) >= EXACT


def _check_exact(value: Json, where: str) -> None:
    """Raise SchemaError for a number of a constant that would be written with other digits."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_exact(each, f"{where}/{_pointer(name)}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check_exact(each, f"{where}/{index}")
    elif isinstance(value, _Lossy) or (_too_large(value) and (abs(value) >= LARGEST or int(float(value)) != value)):
        raise SchemaError(where, "has a number with more digits than float64; give it as a string")


def _bound(made: Schema, keyword: str) -> None:
    """Move a bound that float64 lacks, or beyond which it lacks whole numbers, to the next number inside."""
    bound, value = made[keyword], float(made[keyword])
    inwards = -math.inf if keyword.endswith("aximum") else math.inf
    exclusive = keyword.startswith("exclusive")
    if not isinstance(bound, _Lossy) and not _too_large(bound):
        return
    outside = value >= bound if inwards < 0 else value <= bound
    if isinstance(bound, _Lossy) or (outside and (exclusive or value != bound)):
        value = math.nextafter(value, inwards)
    while abs(value) >= LARGEST and value * inwards < 0:  # larger whole numbers are not enforced exactly
        value = math.nextafter(math.copysign(LARGEST, value), 0)
    while (Decimal(repr(value)) - Decimal(value)) * int(math.copysign(1, inwards)) < 0:
        value = math.nextafter(value, inwards)  # as a fraction's bound it is written with the fewest digits
    del made[keyword]
    plain = keyword.removeprefix("exclusive").lower()
    if _is_number(given := made.get(plain)):
        assert given is not None
        value = min(value, given) if inwards < 0 else max(value, given)
    made[plain] = int(value) if value.is_integer() else value


def _expressions(made: Schema, where: str) -> None:
    """Translate patterns; give the formats that llguidance takes too widely as patterns."""
    patterns = []
    if isinstance(made.get("pattern"), str):
        patterns.append(_translated(made.pop("pattern"), f"{where}/pattern"))
    if made.get("format") in FORMATS:
        patterns.append(FORMATS[made.pop("format")])
    if patterns:
        made["pattern"] = patterns[0]
    if patterns[1:]:
        made["allOf"] = [*made.get("allOf", ()), *({"pattern": each} for each in patterns[1:])]
    if isinstance(made.get("patternProperties"), dict):
        found = made["patternProperties"].items()
        place = f"{where}/patternProperties"
        made["patternProperties"] = {_translated(each, f"{place}/{_pointer(each)}"): value for each, value in found}


def _translated(pattern: str, where: str) -> str:
    try:
        return translated(pattern)
    except ValueError as error:
        raise SchemaError(where, str(error)) from None


def _may_be_object(made: Mapping[str, Json]) -> bool:
    kinds = made.get("type", "object")
    return "object" in (kinds if isinstance(kinds, list) else [kinds])


def _keys(made: Schema, where: str) -> None:
    """Let a key that is not declared be written without escapes only. As any JSON string, it could be a declared one in
    another spelling, and so the same key with a value of another kind."""
    properties, patterns = made.get("properties", {}), made.get("patternProperties", {})
    required = made.get("required", [])
    if not isinstance(properties, dict) or not isinstance(patterns, dict) or not isinstance(required, list):
        return  # llguidance says what is wrong
    others = made.get("additionalProperties", True)
    undeclared = [name for name in required if isinstance(name, str) and name not in properties]
    _check_least(made, len(set(map(str, required))), others is False, where)
    if others is False:
        return
    if patterns:  # which keys they leave over is not known: none is admitted
        if undeclared:
            raise SchemaError(f"{where}/required", f"{undeclared[0]!r} is not declared beside patternProperties")
        made["additionalProperties"] = False
        return
    anything = others is True or others == {}
    if undeclared and not anything:
        made["properties"] = {**properties, **dict.fromkeys(undeclared, others)}
    names = set(made.get("properties", {})) if not anything else set()
    made["patternProperties"] = {other_keys(names): True if anything else others}
    made["additionalProperties"] = False


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
