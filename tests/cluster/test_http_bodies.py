"""The number of values in a body, which is counted before it is parsed."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from dendro.errors import BadRequest
from dendro.schemas import enforceable
from dendro.structure import Structure
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.openai import bodies
from cluster.api.openai.bodies import SLICE_BYTES, values_of
from cluster.api.openai.fields import Fields
from cluster.api.openai.tools import read_tools
from cluster.distinct_keys import distinct, json_of
from tests.cluster.test_http_edges import VALUES

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A string of a whole text, or the rest of a text in which one begins and does not end."""
GARBAGE = st.lists(st.sampled_from([*b'"\\,[{a\n', 0xFF]), max_size=40).map(bytes)


@settings(deadline=None, max_examples=500)
@given(text=GARBAGE | VALUES.map(lambda value: json.dumps(value).encode()), size=st.integers(1, 9))
def test_the_values_counted_in_slices_are_those_of_the_whole_text(text, size):
    rest = STRING.sub(b"", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "SLICE_BYTES", size)
        assert values_of(text) == rest.count(b",") + rest.count(b"[") + rest.count(b"{")


def test_no_search_for_strings_in_a_body_is_longer_than_a_slice(monkeypatch):
    """A search holds the interpreter's lock until it ends: over 8 MiB, the event loop would stand still for 0.5 s."""
    sizes, search = [], bodies._STRING.sub
    noted = SimpleNamespace(sub=lambda new, text: sizes.append(len(text)) or search(new, text))
    monkeypatch.setattr(bodies, "_STRING", noted)
    assert values_of(b'"' + b'\\"' * (2 * SLICE_BYTES) + b'",[') == 2
    assert len(sizes) == 5 and max(sizes) <= SLICE_BYTES + len(b'"\\ ')


LONG = "0.1234567890123456789"
SCHEMAS = (
    f'{{"const": {LONG}}}',
    f'{{"maximum": {LONG}}}',
    '{"enum": [0.1, [1e400]]}',
    '{"maxLength": 2.0}',
    '{"const": 1e-9999999999999999999}',
    '{"minimum": 0.5, "maximum": 1e9999999999999999999}',
    '{"é": 1}',
)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_schema_means_the_same_as_a_part_of_a_body_and_as_a_text(schema):
    """No digit of its numbers is lost."""

    def outcome(text: str) -> str:
        try:
            return enforceable(text)
        except ValueError as error:
            return str(error)

    within = json_of(f'{{"schema": {schema}}}', distinct)["schema"]
    assert outcome(Structure.json_schema(within).texts[0]) == outcome(schema)
    function = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"properties": {{"a": {schema}}}}}}}}}'
    tools = read_tools(Fields(json_of(f'{{"tools": [{function}]}}', distinct)))
    assert outcome(tools.schemas["f"]) == outcome(f'{{"type": "object", "properties": {{"a": {schema}}}}}')


def test_a_schema_of_a_body_that_is_nested_too_deeply_is_refused_by_its_field():
    deep: Any = {}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(BadRequest, match="^structure.json_schema: cannot be written as JSON: it nests objects"):
        Structure.json_schema(deep)
    function = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(BadRequest, match=r"^tools\[0\].function.parameters: cannot be written as JSON: it nests"):
        read_tools(Fields({"tools": [function]}))
