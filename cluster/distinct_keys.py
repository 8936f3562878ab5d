"""Reads YAML and JSON in which no key occurs twice in an object. Readers differ in which of a repeated key's values
counts, so none is taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import yaml
from dendro.arguments import repeated_key, shown
from dendro.written_numbers import number_of
from yaml.nodes import MappingNode, ScalarNode

MOST_NESTED = 100
"""Most levels of mappings and lists in YAML. A recursive reader would run out of stack on deeper ones."""


NUMBERS = {
    "int": r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)",
    "float": r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
"""Forms of numbers that are written without quotes, by kind. Anything else is a text. PyYAML follows YAML 1.1, for
which `1:30` is 90 and `010` is 8; most other readers disagree."""


class RepeatedKey(ValueError):
    """A key that occurs twice. line: of its second place, from 1; None where it is not known"""

    def __init__(self, key: object, line: int | None = None) -> None:
        super().__init__(key, line)

    def __str__(self) -> str:
        key, line = self.args
        where = "" if line is None else f"line {line}: "
        return f"{where}the key {shown(key)} occurs twice in an object"


class _DistinctLoader(yaml.SafeLoader):
    """PyYAML's loader, which takes the last value of a repeated key and does not limit depth."""

    _depth = 0
    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in found if tag.rpartition(":")[2] not in NUMBERS]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise yaml.YAMLError(f"it nests mappings and lists more than {MOST_NESTED} deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        assert isinstance(node, MappingNode)
        found: set[tuple[type, object]] = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                continue
            value = self.construct_object(key) if key.tag != "tag:yaml.org,2002:merge" else key.value
            if (type(value), value) in found:
                raise RepeatedKey(value, key.start_mark.line + 1)
            found.add((type(value), value))
        return node


for _kind, _form in NUMBERS.items():
    _whole = re.compile(f"^({_form})$")
    _DistinctLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _whole, list("-+.0123456789"))


def yaml_of(text: str) -> Any:
    """The value of a YAML text. Raises RepeatedKey, and yaml.YAMLError for a text that is no YAML."""
    try:
        return yaml.load(text, _DistinctLoader)
    except (yaml.YAMLError, RepeatedKey):
        raise
    except Exception as error:  # PyYAML's readers of `!!bool x`, dates and numbers raise what they meet
        raise yaml.YAMLError(f"a value is not of its kind: {type(error).__name__}: {error}") from None


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, as the `object_pairs_hook` of a reader. Raises RepeatedKey without a line."""
    twice = repeated_key(pairs)
    if twice is not None:
        raise RepeatedKey(twice)
    return dict(pairs)


def check_distinct(text: str) -> None:
    """Raise RepeatedKey, with its line where that is found, if an object of a JSON text has a key twice. Any other text
    passes: the reader that takes its values refuses one that is no JSON."""
    try:
        json.loads(text, object_pairs_hook=distinct)
    except RepeatedKey:
        with suppress(yaml.YAMLError):  # nearly all JSON is YAML, whose reader knows lines
            yaml_of(text)
        raise
    except (ValueError, RecursionError):
        return


def json_of(text: str, object_of: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict) -> Any:
    """The value of a JSON text, numbers that float64 lacks with their digits. Raises ValueError for any other, in words
    that say nothing of this program. object_of: makes an object of its keys and values"""
    try:
        return json.loads(text, parse_float=number_of, parse_constant=_no_constant, object_pairs_hook=object_of)
    except RecursionError:
        raise ValueError("it nests objects and arrays too deeply") from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):
            raise ValueError("a number has too many digits") from None
        raise


def _no_constant(name: str) -> NoReturn:
    """Refuse NaN and the infinities, which Python reads."""
    raise ValueError(f"{name} is no number of JSON")
