"""What llguidance refuses is refused with its place as a JSON pointer."""

from __future__ import annotations

import asyncio
import json

import pytest
from dendro.errors import BadRequest
from dendro.grammars import Grammars
from dendro.schema_faults import placed
from dendro.structure import Structure

pytest.importorskip("llguidance")

BYTES = Grammars(lambda: {token: bytes([token]) for token in range(256)}, 256)
STRING = {"type": "string"}


def refusal(schema: object) -> str:
    with pytest.raises(BadRequest) as refused:
        asyncio.run(BYTES.compiled(Structure.json_schema(json.dumps(schema))))
    return str(refused.value)


FAULTS = [
    ("/uniqueItems", {"uniqueItems": True}, "uniqueItems"),
    ("/items/not", {"items": {"not": STRING}}, "not"),
    ("/format", STRING | {"format": "byte"}, "Unknown format: byte"),
    ("/oneOf", {"oneOf": [STRING, {"type": ["string", "null"]}]}, "may overlap"),
    ("/oneOf/1/oneOf", {"oneOf": [STRING, {"oneOf": [{"type": "number"}, {"type": "integer"}]}]}, "may overlap"),
    ("/oneOf", {"oneOf": [{"const": 1}, {"const": "a"}, {"const": 2.5}]}, "different numbers, arrays or objects"),
    ("/oneOf", {"oneOf": [{"enum": [[1], "a"]}, {"const": [2]}]}, "give them different types or constant strings"),
    ("/unevaluatedProperties", {"unevaluatedProperties": False}, "unevaluatedProperties"),
    ("/unevaluatedItems", {"unevaluatedItems": False}, "unevaluatedItems"),
    ("/pattern", STRING | {"pattern": "^(?!a)b"}, "look-around"),
    ("/pattern", STRING | {"pattern": "\\bfoo"}, "lookarounds"),
    ("/pattern", STRING | {"pattern": "(a)\\1"}, "backreferences"),
    ("/pattern", STRING | {"pattern": "a(b"}, "unclosed group"),
    ("/patternProperties/a(b~1", {"patternProperties": {"a(b/": True}}, "unclosed group"),
    ("/patternProperties", {"patternProperties": {"a": True, "b": True}}, "not disjoint"),
    ("/maxProperties", {"type": "object", "properties": {"a": True}, "maxProperties": 3}, "min/maxProperties"),
    ("/type", {"type": "strin"}, "Invalid type: strin"),
    ("/type", {"type": ["string", "nul"]}, "Invalid type: nul"),
    ("/items/$ref", {"items": {"$ref": "#/nothing"}}, "does not exist"),
    ("/$ref", {"$ref": "http://127.0.0.1/a"}, "does not fetch"),
    ("/minLength", STRING | {"minLength": -1}, "minLength must be a whole number"),
    ("/enum", {"enum": 5}, "must be an array"),
    ("/properties", {"properties": []}, "must be an object"),
    ("/items", {"items": 5}, "must be an object or boolean"),
]


@pytest.mark.parametrize("place, schema, reason", FAULTS, ids=[f"{each[0]} {each[2]}" for each in FAULTS])
def test_what_llguidance_refuses_is_refused_with_its_place(place, schema, reason):
    """Among others of the kind that can be enforced, and behind references."""
    distinct = {"oneOf": [{"const": "a"}, {"const": "b"}, {"const": 1}, {"const": True}]}
    fine = {"oneOf": [STRING, {"type": "null"}], "minLength": 1, "pattern": "[a-z]", "format": "date", "enum": ["x"]}
    whole = {
        "type": "object",
        "properties": {"fine": fine, "distinct": distinct, "a/b": schema | {}, "named": {"$ref": "#/$defs/unused"}},
        "$defs": {"unused": fine},
    }
    message = refusal(whole)
    assert f" /properties/a~1b{place}: " in message and reason in message and "%llguidance" not in message
    message = refusal({"type": "array", "items": {"$ref": "#/$defs/bad"}, "$defs": {"good": fine, "bad": schema}})
    assert f" /$defs/bad{place}: " in message and reason in message


def test_a_fault_whose_place_is_not_found_is_told_without_the_schema():
    message = refusal({"allOf": [STRING, {"type": "integer"}]})
    assert message == "structure.json_schema: does not compile: Unsatisfiable schema: incompatible types"


@pytest.mark.parametrize("schema", ["5", "true", '{"oneOf": [1, {"required": 3, "properties": 4, "enum": 5}, {}]}'])
@pytest.mark.parametrize("reason", ['Unimplemented keys: ["a"]', "regex parse error: a", "a must be an array"])
def test_any_json_can_be_searched_for_a_fault(schema, reason):
    assert placed(f"refused: at 2(8): failed to compile JSON schema: {reason}", schema) == f"refused: {reason}"
    assert "may overlap" in placed("refused: at 2(8): failed to compile JSON schema: oneOf constraints are not", schema)


GRAMMARS = {
    'start: "x" | foo': 'line 1: does not compile: unknown name: "foo"',
    "start: a\na: /b": "line 3: does not compile: lexer error",
    'start: a b\na: "x"\nb: %json {"properties": {"c": {"not": {}}}}': (
        'line 3, %json: does not compile: /properties/c/not: Unimplemented keys: ["not"]'
    ),
}


@pytest.mark.parametrize(("rules", "fault"), GRAMMARS.items(), ids=["rule", "token", "schema"])
def test_a_fault_of_a_grammar_has_its_line_and_nothing_that_the_client_did_not_send(rules, fault):
    with pytest.raises(BadRequest) as refused:
        asyncio.run(BYTES.compiled(Structure.grammar(rules)))
    assert str(refused.value) == f"structure.grammar: {fault}"


def test_a_fault_of_an_expression_is_told_without_the_grammar_around_it():
    with pytest.raises(BadRequest) as refused:
        asyncio.run(BYTES.compiled(Structure.regex("a[")))
    assert "unclosed" in str(refused.value) and "%llguidance" not in str(refused.value)


def test_a_fault_that_quotes_a_long_format_is_told_in_bounded_time():
    """Its place was looked for by an expression whose time grew with the square of the signs."""
    structure = Structure.json_schema({"type": "string", "format": f" while processing {20_000 * '#'} x"})
    with pytest.raises(BadRequest, match="does not compile: "):
        asyncio.run(BYTES.compiled(structure))


LONG = "x" * 900


@pytest.mark.parametrize(
    ("structure", "begin"),
    [
        (Structure.regex(f"{LONG}("), "structure.regex: does not compile: invalid regex"),
        (Structure.grammar(f"start: /{LONG}(/"), "structure.grammar: line 1: does not compile: invalid regex"),
        (
            Structure.json_schema({"properties": {"a": {"type": "string", "pattern": f"{LONG}("}}}),
            "structure.json_schema: does not compile: /properties/a/pattern: regex parse error",
        ),
    ],
    ids=["regex", "grammar", "schema"],
)
def test_a_fault_of_a_long_expression_is_told_with_its_reason(structure, begin):
    with pytest.raises(BadRequest) as refused:
        asyncio.run(BYTES.compiled(structure))
    message = str(refused.value)
    assert message.startswith(begin) and message.endswith("error: unclosed group") and len(message) < 500
