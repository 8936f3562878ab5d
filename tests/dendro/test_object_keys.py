"""Keys that are not declared, of objects that one schema describes or several: no answer is invalid, few are lost."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from dendro.errors import BadRequest
from dendro.object_keys import beginning, exact

from tests.support.byte_grammars import admits, compiled

pytest.importorskip("llguidance")

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


NAMES = ("a", "b", "ab", "x1", "c", "")
PATTERNS = ("^x", "^a", "^x-", "[0-9]$", "^(a|c)$", "^a[b-z]*$")
OBJECTS = [
    "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in zip(names, values, strict=True)) + "}"
    for count in range(3)
    for names in itertools.permutations(NAMES, count)
    for values in itertools.product(("1", '"s"'), repeat=count)
]
SPELT = ['{"\\u0061":1}', '{"\\u0061":"s"}', '{"a":1,"\\u0061":"s"}', '{"\\u00781":"s"}', '{"a":1,"a":"s"}']


def random_part(rng: random.Random) -> dict[str, Any]:
    """One of several schemas of an object."""
    kinds: list[Any] = [INTEGER, STRING, True, {}]
    made: dict[str, Any] = {
        "properties": {name: rng.choice(kinds) for name in rng.sample(NAMES[:5], rng.randint(0, 2))},
        "patternProperties": {rng.choice(PATTERNS): rng.choice(kinds)},
        "required": rng.sample(NAMES[:5], 1),
        "additionalProperties": rng.choice([True, False, INTEGER, STRING]),
        "minProperties": 1,
    }
    chances = {"properties": 0.6, "patternProperties": 0.35, "required": 0.3, "additionalProperties": 0.5}
    keywords = [keyword for keyword in made if rng.random() < chances.get(keyword, 0.1)]
    return {keyword: made[keyword] for keyword in rng.sample(keywords, len(keywords))}


def random_object(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object"} | random_part(rng)
    definitions = {"d": random_part(rng), "e": random_part(rng)}
    if rng.random() < 0.6:
        made["allOf"] = [random_part(rng) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.3:
        made["anyOf"] = [random_part(rng) for _ in range(2)]
    if rng.random() < 0.4:
        made["$ref"] = "#/$defs/d"
    if rng.random() < 0.5:
        definitions["d"]["allOf"] = [{"$ref": "#/$defs/e"}]
    return {keyword: made[keyword] for keyword in rng.sample(list(made), len(made))} | {"$defs": definitions}


def check_random_objects(seeds: range) -> tuple[int, int]:
    """Assert that what random schemas admit is valid. Returns how many were compiled, and how many have valid objects
    but were refused."""
    done = refused = 0
    for seed in seeds:
        schema = random_object(random.Random(seed))
        checker = jsonschema.Draft202012Validator(schema)
        valid = {text for text in OBJECTS + SPELT if checker.is_valid(json.loads(text))}
        try:
            grammar = compiled(schema)
        except BadRequest:
            refused += bool(valid)
            continue
        found = {text for text in OBJECTS + SPELT if admits(grammar, text)}
        assert found <= valid, f"seed {seed}: {schema} admits {found - valid}"
        assert found or not valid, f"seed {seed}: {schema} admits nothing"
        done += 1
    return done, refused


def test_objects_of_several_schemas_are_valid_and_few_schemas_are_refused():
    done, refused = check_random_objects(range(40))
    assert done > 1.5 * refused


@pytest.mark.long
def test_objects_of_many_schemas_are_valid():
    done, refused = check_random_objects(range(100, 700))
    assert done > 1.5 * refused


SEVERAL = [
    ({"allOf": [{"patternProperties": {"^x-": True}}, {"properties": {"a": INTEGER}}]}, ['{"a":1,"x-a":2,"b":3}']),
    (
        {"allOf": [{"properties": {"a": INTEGER}, "additionalProperties": STRING}, {"properties": {"b": True}}]},
        ['{"a":1,"b":"x","c":"y"}'],
    ),
    (
        {
            "$defs": {"more": {"patternProperties": {"^x-": True}}},
            "properties": {"a": INTEGER},
            "$ref": "#/$defs/more",
        },
        ['{"a":1,"x-b":[],"c":null}'],
    ),
    ({"required": ["b"], "patternProperties": {"^a": INTEGER}}, ['{"b":[],"ab":1}', '{"b":1,"c":2}']),
    ({"required": ["ab"], "patternProperties": {"^a": INTEGER}, "additionalProperties": STRING}, ['{"ab":1,"b":"x"}']),
    (
        {"patternProperties": {"^a/(.*[+])?json$": True}, "additionalProperties": STRING},
        ['{"text/plain":"x","a/json":1}'],
    ),
]


@pytest.mark.parametrize("schema, texts", SEVERAL)
def test_what_describes_one_object_in_several_ways_is_enforced(schema, texts):
    grammar = compiled({"type": "object"} | schema)
    for text in texts:
        assert admits(grammar, text), text
    assert not admits(grammar, '{"a":"x","x-b":1,"ab":"y","a/json":[],"text/plain":1}')


def test_a_pattern_that_lists_its_keys_leaves_no_answer_that_cannot_go_on():
    """After the comma, each such key was taken."""
    grammar = compiled({"type": "object", "required": ["$ref"], "patternProperties": {"^\\$ref$": STRING}})
    place = grammar.text(0).place()
    for byte in b'{"$ref":"x",':
        place = place.after(byte)
    assert not place.stuck and not admits(grammar, '{"$ref":"x","$ref":"y"}') and admits(grammar, '{"$ref":"x","a":1}')
    closed = compiled({"type": "object", "patternProperties": {"^(a|b)$": INTEGER}, "additionalProperties": False})
    assert admits(closed, '{"a":1,"b":2}') and not admits(closed, '{"a":1,"b":2,')


def test_keys_that_a_pattern_lists_can_be_counted():
    schema = {"type": "object", "patternProperties": {"^(a|b|c)$": INTEGER}, "additionalProperties": False}
    grammar = compiled(schema | {"maxProperties": 2, "minProperties": 1})
    assert admits(grammar, '{"b":1,"a":2}') and not admits(grammar, "{}") and not admits(grammar, '{"a":1,"b":2,"c":3}')


def test_the_beginning_of_a_pattern_is_that_of_all_its_matches():
    given = {
        "^x-": "x-",
        "^ab*": "a",
        "^ab+": "ab",
        "^a|b": "",
        "^a(b)|(c)": "",
        "^a[(]|b[)]": "",
        "^a(b|c)": "a",
        "x": "",
    }
    assert {pattern: beginning(pattern) for pattern in given} == given
    assert [exact(pattern) for pattern in ("^a$", "^(?:a|\\$b)$", "^a|b$", "^a+$")] == [["a"], ["a", "$b"], [], []]


def test_what_is_referred_to_by_its_place_in_something_else_is_enforced_too():
    schema = {"$ref": "#/kinds/word", "kinds": {"word": {"type": "string", "pattern": '^[^"]$'}}}
    grammar = compiled(schema)
    assert admits(grammar, '"a"') and not admits(grammar, '"\\""')


def test_definitions_that_nothing_refers_to_may_have_what_cannot_be_enforced():
    unused = {"pattern": "(?i)a", "not": {}, "const": 9007199254740993}
    assert admits(compiled({"$ref": "#/$defs/a", "$defs": {"a": INTEGER, "b": unused}}), "1")
    assert admits(compiled({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": True}}), "[1]")
    with pytest.raises(BadRequest, match=r"/\$defs/b/"):
        compiled({"$ref": "#/$defs/b", "$defs": {"a": INTEGER, "b": unused}})


@pytest.mark.parametrize("draft, counts", [("http://json-schema.org/draft-07/schema#", False), (None, True)])
def test_what_is_beside_a_reference_counts_from_draft_2019_on(draft, counts):
    schema = {"$ref": "#/definitions/a", "maximum": 5, "definitions": {"a": INTEGER}} | (
        {"$schema": draft} if draft else {}
    )
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    grammar = compiled(schema)
    for number in (3, 7):
        assert admits(grammar, str(number)) == validator.is_valid(number)
    assert validator.is_valid(7) != counts


def test_a_schema_that_would_be_written_out_too_often_is_refused():
    others = {"type": "object", "properties": {f"p{each}": {"enum": ["x" * 50]} for each in range(300)}}
    schema = {"required": [f"r{each}" for each in range(2000)], "additionalProperties": others}
    with pytest.raises(BadRequest, match="/additionalProperties: would be repeated"):
        compiled(schema)
