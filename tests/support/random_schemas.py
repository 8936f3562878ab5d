"""Random JSON schemas of a public test suite's kinds, whose texts are bounded but for the digits of a fraction."""

from __future__ import annotations

from random import Random
from typing import Any

PATTERNS = ("^[a-f]{2,6}$", "^[0-9]{3}-[0-9]{2}$", "^(ab|cd){1,3}x?$", "^[A-Z][a-z]{0,5}$", "^v[0-9]+(\\.[0-9]+)?$")
WORDS = ("red", "green", "blue", "self", "return", "No\u00ebl", "a b", 'say "yes"', "line\nbreak", "\u4e2d\u6587")
NAMES = ("name", "size", "items", "on", "class", "x y", "stra\u00dfe")


def random_schema(random: Random, depth: int = 2) -> dict[str, Any]:
    """An object that has a few properties."""
    return _object(random, depth)


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.7],
        "additionalProperties": False,
    }


def _array(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(0, 2)
    items = {"items": _value(random, depth - 1), "minItems": least, "maxItems": least + random.randint(0, 2)}
    if random.random() < 0.3:
        first = [_value(random, 0) for _ in range(2)]
        items = {"prefixItems": first, "items": False, "minItems": random.randint(0, 2)}
    return {"type": "array", **items}


def _integer(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(-300, 300)
    bounds = {"minimum": low, "maximum": low + random.randint(0, 500)}
    if random.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + random.randint(2, 50)}
    return {"type": "integer", **bounds}


def _number(random: Random, depth: int) -> dict[str, Any]:
    low = random.randint(-40, 40) / 4
    return {"type": "number", "minimum": low, "maximum": low + random.randint(1, 20) / 2}


def _string(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + random.randint(0, 6)}


def _pattern(random: Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": random.choice(PATTERNS), "maxLength": 8}


def _enum(random: Random, depth: int) -> dict[str, Any]:
    return {"enum": [*random.sample(WORDS, random.randint(1, 4)), *random.sample([1, 2.5, None, True], 2)]}


def _plain(random: Random, depth: int) -> dict[str, Any]:
    return random.choice([{"type": "boolean"}, {"type": "null"}, {"const": [1, "two"]}, {"type": ["boolean", "null"]}])


def _any_of(random: Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(random, depth - 1), _value(random, depth - 1)]}


SMALL = (_integer, _number, _string, _pattern, _enum, _plain)


def _value(random: Random, depth: int) -> dict[str, Any]:
    made = random.choice((*SMALL, _object, _array, _any_of) if depth > 0 else SMALL)
    return made(random, depth)
