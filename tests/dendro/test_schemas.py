"""What a JSON schema admits is what JSON Schema says; what cannot be had is refused by the keyword's name."""

from __future__ import annotations

import itertools
import json
import random
import re

import jsonschema
import numpy as np
import pytest
from dendro.errors import BadRequest
from dendro.grammars import Grammar
from dendro.lark_text import token_references
from dendro.patterns import other_keys, translated
from dendro.schemas import SchemaError, enforceable
from dendro.structure import Structure, StructureForm

from tests.support.byte_grammars import admits, compiled, made

pytest.importorskip("llguidance")

CHARACTERS = '"\\/\n\t\b\f\r\x00\x1f\x7faé😀 \u2028\ufeff9_'


def spellings(character: str) -> set[str]:
    """JSON strings of one character."""
    made = {json.dumps(character), json.dumps(character, ensure_ascii=False)}
    if character == "/":
        made.add('"\\/"')
    if ord(character) < 1 << 16:
        made |= {f'"\\u{ord(character):04x}"', f'"\\u{ord(character):04X}"'}
    return made


PATTERNS = (
    *('[^"]', r"[^\\]", r'[^"\\]', r"[\x00-\x1f]", r"\D", r"\W", r"\S", r"[\s\S]", r"[^\s]", ".", r'(?:a|[^"])'),
    *(r"[^\n]", '"', r"\P{L}", "[^/]", r"[\W_]"),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_holds_of_the_string_and_not_of_its_spelling(pattern):
    grammar = compiled({"type": "string", "pattern": f"^{pattern}$"})
    ascii_only = re.ASCII if re.search(r"\\[DW]", pattern) else 0  # as in ECMA-262
    expression = "[^a-zA-Zé]" if "P{L}" in pattern else pattern
    admitted = 0
    for character in CHARACTERS:
        for text in spellings(character):
            if admits(grammar, text):
                admitted += 1
                assert re.fullmatch(expression, character, ascii_only), text
    assert admitted


@pytest.mark.parametrize(
    "pattern, reason",
    [
        ("(?x)a b", "no inline flags"), ("(?i)a", "no inline flags"), ("a\\", "lone backslash"), (r"\Aa", "no escape"),
        (r"\ud83d", "surrogate"), ("[a", "without its"), (r"a\z", "no escape"),
    ],
)  # fmt: skip
def test_a_pattern_that_has_no_meaning_in_json_schema_is_refused_with_its_place(pattern, reason):
    with pytest.raises(BadRequest, match=f"/properties/a~1b/pattern: .*{reason}"):
        compiled({"type": "object", "properties": {"a/b": {"type": "string", "pattern": pattern}}})


@pytest.mark.parametrize(
    "pattern, characters",
    [
        (r"\cJ", "\n"), (r"\0", "\0"), (r"\ud83d\ude00", "😀"), (r"\u{1f600}", "😀"), (r"\x2F", "/"), (r"[\ba]", "a"),
        (r"[\x5c-\x5c]", "\\"), (r"[\cI\ud83d\ude00]", "\t😀"), ("[^]", set(CHARACTERS) - set("\b\f\0\x1f")),
    ],
)  # fmt: skip
def test_escapes_of_ecma_262_stand_for_their_characters(pattern, characters):
    grammar = compiled({"type": "string", "pattern": f"^{pattern}$"})
    admitted = {character for character in CHARACTERS if any(admits(grammar, text) for text in spellings(character))}
    assert admitted == set(characters)


ALL_CONTROLS = [f"\\x{number:02x}" for number in range(32)]


@pytest.mark.parametrize("pattern", ["^(?:{})$", "^(?:{}|a)$", "^[x]|(?:{})"])
def test_control_characters_named_one_by_one_admit_no_quote(pattern):
    """llguidance makes one class of them."""
    for names in (ALL_CONTROLS, [chr(number) for number in range(32)], [r"\s", *ALL_CONTROLS[:9], *ALL_CONTROLS[14:]]):
        with pytest.raises(BadRequest, match="/pattern: names all control characters"):
            compiled({"type": "string", "pattern": pattern.format("|".join(names))})
    grammar = compiled({"type": "string", "pattern": pattern.format("|".join(ALL_CONTROLS[1:]))})
    assert admits(grammar, '"\\u0001"') and not admits(grammar, '"\\""') and not admits(grammar, '"\\\\"')


LABELS = ("a", "A-9", "a--b", "a" * 63, "0-" * 31 + "0", "1")
NO_LABELS = ("", "-a", "a-", "a" * 64, "xn--a", "XN--nxasmq6b", "ab--c", "a_b", "é")


def test_a_host_name_has_labels_and_an_end():
    grammar = compiled({"type": "string", "format": "hostname"})
    for label in LABELS:
        assert admits(grammar, f'"{label}"') and admits(grammar, f'"b.{label}.c"'), label
    for label in NO_LABELS:
        assert not admits(grammar, f'"{label}"') and not admits(grammar, f'"b.{label}.c"'), label
    longest = ".".join(["a" * 63] * 3 + ["a" * 61])
    assert admits(grammar, f'"{longest}"') and not admits(grammar, f'"{longest}a"')
    short = compiled({"type": "string", "format": "hostname", "maxLength": 3, "pattern": "^a"})
    assert admits(short, '"abc"') and not admits(short, '"abcd"') and not admits(short, '"bcd"')


@pytest.mark.parametrize("pattern, admitted", [("[[a]", '"["'), ("[a&&b]", '"&"'), ("[!--]", '","'), (r"\<a", '"<a"')])
def test_what_is_an_operator_in_rusts_syntax_alone_is_a_character(pattern, admitted):
    assert admits(compiled({"type": "string", "pattern": f"^{pattern}$"}), admitted)


@pytest.mark.parametrize("number", ["9007199254740993", "-9007199254740993", "1e22", "0.1234567890123456789"])
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_constant_that_would_lose_digits_is_refused_by_its_name(keyword, number):
    schema = f'{{"properties": {{"a": {{"{keyword}": {number if keyword == "const" else f"[1, {number}]"}}}}}}}'
    with pytest.raises(BadRequest, match=f"/properties/a/{keyword}.*digits"):
        compiled(schema)


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 9007199254740993}, {"exclusiveMinimum": 9007199254740992}, {"maximum": -9007199254740993},
        {"maximum": 9223372036854775807}, {"exclusiveMaximum": 9007199254740994}, {"minimum": -9223372036854775808},
        {"minimum": 9007199254740992, "exclusiveMinimum": 9007199254740995}, {"maximum": 18446744073709551615},
    ],
    ids=str,
)  # fmt: skip
def test_bounds_beyond_float64_are_kept(bounds):
    schema = {"type": "integer"} | bounds
    grammar, admitted = compiled(schema), 0
    for bound in (*bounds.values(), 1 << 53, -(1 << 53), 0, 1 << 62, (1 << 63) - 1024, -(1 << 63) + 1024):
        for number in range(bound - 5, bound + 6):
            if admits(grammar, str(number)):
                admitted += 1
                jsonschema.validate(number, schema)
    assert admitted


def test_fractions_keep_to_bounds_that_are_excluded():
    """Also where both bounds have the same whole part, and where they come from two schemas."""
    for low, high in itertools.combinations((-1.5, -1, -0.5, 0, 0.25, 1, 1.5), 2):
        both = [{"exclusiveMinimum": low}, {"maximum": high}], [{"minimum": low}, {"exclusiveMaximum": high}]
        for parts in both:
            schema = {"type": "number"} | parts[0] | parts[1]
            grammars = compiled(schema), compiled({"type": "number", "allOf": parts})
            for text in ("-1.5", "-1.25", "-1", "-0.5", "-0.25", "0", "0.1", "0.25", "0.5", "1", "1.25"):
                found = {admits(grammar, text) for grammar in grammars}
                assert found == {jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))}, (schema, text)


def test_a_declared_key_cannot_be_spelt_as_another_or_given_twice():
    others = {"additionalProperties": {"type": "string"}}
    grammar = compiled({"type": "object", "properties": {"a": {"type": "integer"}}} | others)
    assert all(admits(grammar, text) for text in ('{"a":1}', '{"a":1,"b":"x"}', '{"ab":"x"}', '{"":"x"}', '{"é":"x"}'))
    wrong = ('{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}', '{"a":1,"a":"x"}', '{"b":"x","a":"x"}', '{"a":1,"b":2}')
    assert not any(admits(grammar, text) for text in wrong)


def test_a_key_of_a_pattern_cannot_be_spelt_as_another():
    grammar = compiled({"type": "object", "patternProperties": {"^x": {"type": "integer"}}})
    assert admits(grammar, '{"x":1}') and not admits(grammar, '{"\\u0078":"a"}') and not admits(grammar, '{"x":"a"}')


def test_repeated_keys_do_not_count_for_min_properties():
    grammar = compiled({"type": "object", "required": ["a"], "properties": {"a": True}, "minProperties": 2})
    assert admits(grammar, '{"a":1,"b":2}') and not admits(grammar, '{"a":1,"a":2}') and not admits(grammar, '{"a":1}')
    with pytest.raises(BadRequest, match="/minProperties: 3 cannot be enforced"):
        compiled({"type": "object", "required": ["a"], "properties": {"a": True}, "minProperties": 3})
    assert admits(compiled({"type": "object", "minProperties": 1}), '{"a":1}')


def test_at_least_one_key_more_than_the_required_ones_is_enforced_unless_optional_keys_and_others_may_follow():
    for least, declared, others, enforced in (
        *((1, "ab", True, True), (2, "ab", True, False), (2, "ab", False, True), (2, "a", True, True)),
        *((3, "a", True, False), (3, "abc", False, False)),
    ):
        schema = {"type": "object", "properties": dict.fromkeys(declared, True), "required": ["a"]}
        schema |= {"minProperties": least, "additionalProperties": others}
        if enforced:
            assert admits(compiled(schema), '{"a":1}') == (least == 1)
        else:
            with pytest.raises(BadRequest, match="/minProperties: "):
                compiled(schema)


@pytest.mark.parametrize("pattern", ["x(^a|b)", "\\bfoo", "a\\B", "(?m)^a", "x^"])
def test_an_anchor_that_would_look_around_is_refused(pattern):
    with pytest.raises(BadRequest, match="lookarounds not supported"):
        made(Structure.regex(pattern))
    assert admits(made(Structure.regex("^a|(b$)")), "b")


def test_intersections_keep_the_keys_of_both():
    one, two = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
    grammar = compiled({"type": "object", "allOf": [one, two]})
    assert admits(grammar, '{"a":1,"b":2,"c":"x"}') and not admits(grammar, '{"b":"x"}')


@pytest.mark.parametrize("day", ["2023-02-29", "1900-02-29", "2023-04-31", "0000-01-01", "2023-13-01"])
def test_a_day_that_does_not_exist_is_no_date(day):
    for kind, text in (("date", day), ("date-time", f"{day}T12:00:00Z")):
        grammar = compiled({"type": "string", "format": kind})
        assert not admits(grammar, f'"{text}"')
        for leap in ("2024-02-29", "2000-02-29"):
            assert admits(grammar, f'"{text.replace(day, leap)}"')


@pytest.mark.parametrize("schema", ["true", '\ufeff{"type": "integer"}', '{"items": {"uniqueItems": false}}', "{}"])
def test_harmless_forms_of_schemas_work(schema):
    assert admits(compiled(schema), "1")


def test_additional_items_beside_prefix_items_say_nothing():
    schema = {"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": False, "items": {"type": "null"}}
    grammar, checker = compiled(schema), jsonschema.Draft202012Validator(schema)
    for text in ("[]", "[1]", '["a"]', '["a",null]', '["a",1]', "[null]"):
        assert admits(grammar, text) == checker.is_valid(json.loads(text)), text


ILL_TYPED = [
    ("integer", "required", True), ("integer", "required", [1]), ("integer", "minimum", True),
    ("string", "minimum", "x"),
    ("string", "exclusiveMaximum", "1"), ("integer", "maxLength", "x"), ("integer", "minItems", 1.5),
    ("integer", "maxItems", -1), ("array", "maxItems", 1 << 64), ("string", "uniqueItems", 1),
    ("number", "multipleOf", -1), ("number", "multipleOf", 0), ("integer", "pattern", 5), ("integer", "format", 5),
    ("integer", "enum", 5), ("integer", "properties", 3), ("integer", "dependentSchemas", []),
    ("integer", "items", 3), ("integer", "additionalProperties", 5), ("integer", "anyOf", {}),
    ("integer", "$schema", "http://json-schema.org/draft-03/schema#"), ("integer", "$schema", 5),
    ("integer", "$schema", "http://json-schema.org/schema#"),
]  # fmt: skip


@pytest.mark.parametrize("kind, keyword, value", ILL_TYPED, ids=[f"{each[1]} {each[2]}" for each in ILL_TYPED])
def test_a_value_that_a_keyword_cannot_have_is_refused_with_its_place(kind, keyword, value):
    """Where the schema's type makes it matter, and where it does not."""
    for schema in ({"type": kind, keyword: value}, {keyword: value}):
        with pytest.raises(
            SchemaError, match=f"^/properties/a/{re.escape(keyword)}: ({re.escape(keyword)}|schema) must be"
        ):
            enforceable(json.dumps({"type": "object", "properties": {"a": schema}}))
    with pytest.raises(SchemaError, match="^/properties/a: schema must be an object or boolean"):
        enforceable('{"properties": {"a": 5}}')


@pytest.mark.parametrize("keyword", ["$defs", "definitions"])
def test_definitions_that_nothing_refers_to_may_have_any_values(keyword):
    for value in (5, {"a": 5}, {"a": {"required": True}}):
        assert json.loads(enforceable(json.dumps({keyword: value})))[keyword] is not None


def test_a_count_may_be_written_as_a_fraction_without_a_part():
    grammar = compiled('{"type": "string", "minLength": 1.0, "maxLength": 2.0e0}')
    assert [admits(grammar, f'"{text}"') for text in ("", "a", "ab", "abc")] == [False, True, True, False]
    with pytest.raises(SchemaError, match="/maxLength: maxLength must be a whole number"):
        enforceable('{"maxLength": 2.0000000000000000000001}')


def test_a_schema_whose_parts_are_nested_too_deeply_is_refused_in_these_words():
    for depth in (63, 64, 200):
        schema = '{"properties":{"a":' * depth + '{"type":"integer"}' + "}}" * depth
        for form, structure in (("json_schema", schema), ("grammar", f"start: %json {schema}")):
            if depth == 63:
                made(Structure(StructureForm(form), (structure,)))
            else:
                with pytest.raises(
                    BadRequest, match="cannot be enforced: its objects and arrays are nested more than 127"
                ):
                    made(Structure(StructureForm(form), (structure,)))


def test_a_schema_that_describes_nothing_is_refused():
    with pytest.raises(BadRequest, match="false describes no value"):
        compiled("false")


@pytest.mark.parametrize(
    "schema", ['{"type": "null", "type": "integer"}', '{"properties": {"a": {}, "b": {}, "a": {}}}']
)
def test_a_schema_with_a_key_twice_in_an_object_is_refused(schema):
    """Its readers differ in the value that they take."""
    with pytest.raises(BadRequest, match="the schema: the key '(type|a)' occurs twice in an object"):
        compiled(schema)
    with pytest.raises(BadRequest, match="the key '(type|a)' occurs twice in an object"):
        made(Structure.grammar(f"start: %json {schema}"))


@pytest.mark.parametrize("pattern", ["a\\", "a\\\\\\"])
def test_an_expression_that_ends_with_a_lone_backslash_is_refused(pattern):
    with pytest.raises(BadRequest, match="structure.regex: ends with a lone backslash"):
        made(Structure.regex(pattern))


EXPRESSIONS_OF_RUST = (
    *("(?x)a b", "(?x)a # )\n b", "(?x: a b)\n", "(?ix)A b", "(?x-i:[b]/ a)", "[(?x)]", r"\(?x", r"\\(?x: a)"),
    *("(?x)a\\ b", r"[\](?x)]", "(?i)a", "a/b", "[/]\n", "a(?x:  )b", "a\nb"),
)


@pytest.mark.parametrize("pattern", EXPRESSIONS_OF_RUST)
def test_an_expression_means_the_same_within_a_grammar(pattern):
    grammars, python = [made(Structure.regex(pattern))], re.compile(pattern)
    if "/" not in pattern:
        grammars.append(made(Structure.grammar(f"start: /{pattern}/")))
    texts = {"".join(each) for length in range(1, 4) for each in itertools.product("abAx(?)/ \n\\]", repeat=length)}
    expected = {text for text in texts if python.fullmatch(text)}
    for grammar in grammars:
        assert {text for text in texts if admits(grammar, text)} == expected != set()


SCHEMAS_OF_GRAMMARS = (
    {"type": "string", "pattern": '^[^"]$'},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "string", "format": "date"},
    {"enum": ['} %json {"', "//", "<x>"]},
)


FORMS = (
    'start: "=" %json SCHEMA',
    'start: w // %json {\nw: "=" %json\n\n  SCHEMA',
    'start: %lark { start: "=" %json SCHEMA }',
)


@pytest.mark.parametrize("schema", SCHEMAS_OF_GRAMMARS)
@pytest.mark.parametrize("form", FORMS)
def test_a_schema_within_a_grammar_is_enforced_as_one_alone(schema, form):
    alone = compiled(schema)
    within = made(Structure.grammar(form.replace("SCHEMA", json.dumps(schema, indent=1))))
    texts = ['"a"', '"\\""', '{"a":1}', '{"a":1,"\\u0061":"x"}', '{ "a": 1, "b": "x" }', '{  "a":1}', '"2023-02-29"']
    for text in (*texts, '"2024-02-29"', '"} %json {\\""', '"//"', '"<x>"'):
        assert admits(within, f"={text}") == admits(alone, text), text


@pytest.mark.parametrize(
    "grammar, reason",
    [
        (
            'start: a\na: %json {"properties": {"a": {"const": 9007199254740993}}}',
            "line 2, %json: .*/properties/a/const",
        ),
        ('start: "a"\n  | %json\n{"pattern": "(?i)a"}', "line 2, %json: cannot be enforced: /pattern"),
        ("start: %json false", "line 1, %json: .*describes no value"),
        ("start: %json {", "line 1, %json: no JSON follows"),
        ('start: %json // {}\n {"type": "integer"}', "line 1, %json: no JSON follows"),
        ('start: %json {"type": "integer", "not": {}, "x-guidance": {"lenient": true}}', ".*not"),
    ],
)
def test_a_schema_within_a_grammar_that_cannot_be_enforced_is_refused_with_its_place(grammar, reason):
    with pytest.raises(BadRequest, match=f"structure.grammar: {reason}"):
        made(Structure.grammar(grammar))


@pytest.mark.parametrize("grammar", ["start: <[5]>", "start: <|end|>", 'start: "a" <[0-9]>', "start: a\na: <[*]> // <"])
def test_a_grammar_that_names_tokens_is_refused_without_a_panic(grammar):
    with pytest.raises(BadRequest, match="structure.grammar: names the token <"):
        made(Structure.grammar(grammar))


def test_tokens_in_strings_expressions_and_comments_are_none():
    assert not list(token_references('start: "<[1]>" /a<\\/b>/ // <[2]>\n# <x>\nb: "\\"<c>"'))


def test_other_keys_are_all_but_those_named():
    names, beginnings = {"a", "ab", "", "b.c", "-]^"}, {"x-", "x-y", "ba"}
    python = re.sub(r"\\u\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", other_keys(names, beginnings))
    for key in ("".join(each) for length in range(4) for each in itertools.product('abcx-.]^"\\\n', repeat=length)):
        other = key not in names and not key.startswith(tuple(beginnings)) and not set(key) & set('"\\\n')
        assert (re.fullmatch(python, key) is not None) == other, key


def test_other_keys_of_many_are_told_by_their_first_characters():
    """Otherwise llguidance would take longer than a structure may."""
    names = {f"{number:03}{word}" for number in range(240) for word in ("name", "value", "items")}
    expression = other_keys(names)
    assert len(expression) < 30_000
    python = re.compile(re.sub(r"\\u\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", expression))
    assert not any(map(python.fullmatch, names)) and all(map(python.fullmatch, ["name", "", "24", "240name", "a" * 99]))
    schema = {"properties": dict.fromkeys(names, {}), "additionalProperties": {"type": "integer"}}
    grammar = compiled({"type": "object", "required": sorted(names)[:700]} | schema)
    assert grammar.text(0).place().text.any()


def walked(grammar: Grammar, rng: random.Random, most: int = 300) -> str | None:
    """A random text of the grammar; None where it is not finished in so many bytes. Ends are likely."""
    place, out = grammar.text(0).place(), b""
    while len(out) < most:
        allowed = np.flatnonzero(np.unpackbits(place.text, bitorder="little")[:256]).tolist()
        if not allowed or (place.may_end and rng.random() < 0.3):
            return out.decode(errors="strict")
        likely = [token for token in allowed if chr(token) in '"}],']
        token = rng.choice(likely if likely and rng.random() < 0.4 else allowed)
        below = place.after(token)
        assert below is not None, f"{out!r} goes on with {bytes([token])!r}, which is refused"
        place, out = below, out + bytes([token])
    return None


EXPRESSIONS = (r"^[^\"a]{1,3}$", r"^\S[^\\]$", r"^[^\\\s]*x$", "^.?$", r"^\D{2}$")
KINDS = ("date", "ipv4", "uuid", "date-time")  # jsonschema takes no offset in a time
NAMES = ("a", "ab", "b", "é", "long name")


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    """A schema of the keywords whose meaning is enforced or narrowed."""
    kind = rng.choice(["string", "integer", "number", "boolean", "constant", *["object", "array"][: 2 * (depth < 2)]])
    if kind == "string":
        made: dict = {"type": "string", "maxLength": rng.randint(2, 12)}
        if rng.random() < 0.5:
            return {"type": "string", "pattern": rng.choice(EXPRESSIONS)}
        return rng.choice([made, {"type": "string", "format": rng.choice(KINDS)}])
    if kind in ("integer", "number"):
        low = rng.choice([-5, 0, 7, 1 << 60])
        return {"type": kind, "minimum": low, "maximum": low + rng.choice([3, 300] if low < 8 else [1 << 20, 1 << 61])}
    if kind == "constant":
        return {"enum": [1, "a\n", None, {"a": [1, 2.5]}, (1 << 53) - 1][: rng.randint(1, 5)]}
    if kind == "object":
        names = rng.sample(NAMES, rng.randint(0, 3))
        made = {"type": "object", "properties": {name: random_schema(rng, depth + 1) for name in names}}
        made["required"] = [name for name in names if rng.random() < 0.5]
        if rng.random() < 0.7:
            made["additionalProperties"] = rng.choice([True, False, random_schema(rng, depth + 1)])
        return made
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(0, 3)}
    return {"type": "boolean"}


def check_walks(seeds: range, walks: int) -> int:
    """Assert that random texts of random schemas are valid. Returns how many were."""
    valid = 0
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        grammar = compiled(schema)
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for _ in range(walks):
            text = walked(grammar, rng)
            if text is not None:
                found = next(checker.iter_errors(json.loads(text)), None)
                assert found is None, f"seed {seed}: {text} is not of {schema}: {found.message}"
                valid += 1
    return valid


def test_random_texts_of_random_schemas_are_valid():
    assert check_walks(range(25), 4) > 50


@pytest.mark.long
def test_random_texts_of_many_random_schemas_are_valid():
    assert check_walks(range(100, 500), 5) > 1000


def test_translations_are_made_once():
    """What was translated is in the other syntax: a second time its intersections would be read as characters."""
    assert translated("[^a]") != translated(translated("[^a]"))
    assert json.loads(enforceable('{"type": "string", "pattern": "[^a]"}'))["pattern"] == translated("[^a]")
