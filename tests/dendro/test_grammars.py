"""Structures: exactly the tokens are allowed after which the text can become one of the structure's texts."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from dendro import grammars, guidance
from dendro.errors import BadRequest
from dendro.grammars import Grammars, GrammarText
from dendro.guidance import LIMITS, TokenTexts, fault_of_grammar
from dendro.lark_forms import HEADER
from dendro.structure import MAX_CHOICES, MAX_STRUCTURE_BYTES, Structure, StructureForm
from dendro.tree import DraftTree

END, STOP = 0, 1  # of no text
WORDS = [b"ab", b"abc", b"bc", b"aa", b'":', b'{"', b" a", b"12", "\u00fc".encode(), b'"}']
BYTES = {token: word for token, word in enumerate([*(bytes([byte]) for byte in range(256)), *WORDS], 2)}
SIZE = len(BYTES) + 2


def compiler(token_bytes=BYTES) -> Grammars:
    return Grammars(lambda: token_bytes, SIZE)


async def begun(structure: Structure, stop_ids=(STOP,)) -> GrammarText:
    return (await compiler().compiled(structure)).text(0, [END], stop_ids)


def ids_of(text: str) -> list[int]:
    return [byte + 2 for byte in text.encode()]


def allowed(text: GrammarText) -> set[int]:
    found = text.masks(DraftTree.root_only(0)).allowed(0)
    return set(np.flatnonzero(found).tolist()) if found is not None else set()


def expected(sentences: set[bytes], before: bytes) -> set[int]:
    """By trying every token."""
    tokens = {token for token, more in BYTES.items() if any(each.startswith(before + more) for each in sentences)}
    return tokens | ({END, STOP} if before in sentences and tokens else set())


FLAGS = [f'{{"a":{space}{value}}}' for space, value in product(("", " "), ("true", "false"))]
FINITE = [
    (Structure.choices(["ab", "abc", "a b", 'say "yes"', "\u00fcber", "x\ny", "(a|b)*", "\\d"]), None),
    (Structure.regex("(a|bc){1,2}"), ["a", "bc", "aa", "abc", "bca", "bcbc"]),
    (Structure.regex("a/b\nc|[^\\x00-\\x7F]"), None),
    (Structure.grammar('start: "ab" (c | "12")\nc: "c"'), ["abc", "ab12"]),
    (Structure.json_schema({"enum": [12, "\u00fc", None]}), ["12", '"\u00fc"', "null"]),
    (
        Structure.json_schema(
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        ),
        [f"{{{left}{body[1:-1]}{right}}}" for body in FLAGS for left, right in product(("", " "), repeat=2)]
        + [
            f"{{{left}{body[1:-1].replace(':', ' :')}{right}}}"
            for body in FLAGS
            for left, right in product(("", " "), repeat=2)
        ],
    ),
]


@pytest.mark.parametrize(
    "structure, texts", [each for each in FINITE if each[1] or each[0].form is StructureForm.CHOICES]
)
async def test_allowed_are_exactly_the_tokens_whose_text_can_still_become_one_of_the_structures_texts(structure, texts):
    sentences = {each.encode() for each in texts or structure.texts}
    text = await begun(structure)
    for sentence in sentences:
        for length in range(len(sentence)):
            text.follow([byte + 2 for byte in sentence[:length]])
            assert allowed(text) == expected(sentences, sentence[:length]), sentence[:length]
            assert not text.complete
        text.follow([byte + 2 for byte in sentence])
        assert allowed(text) == expected(sentences, sentence) and text.complete == (not expected(sentences, sentence))


SENTENCE = '{"a": [12, 3], "b": "abcab"}'
SCHEMA = Structure.json_schema(
    {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            "b": {"type": "string", "pattern": "(ab|c)+"},
        },
        "additionalProperties": False,
    }
)


async def test_each_row_of_a_tree_has_the_mask_of_its_own_path_followed_alone():
    rng = np.random.default_rng(0)
    text, alone = await begun(SCHEMA), await begun(SCHEMA)
    ids = ids_of(SENTENCE)
    for start in range(len(ids) - 4):
        text.follow(ids[:start])
        tokens, parents, paths = [0], [-1], [[]]
        for _ in range(12):  # right guesses, allowed ones and others
            above = int(rng.integers(len(tokens)))
            path = ids[:start] + paths[above]
            right = ids[len(path)] if path == ids[: len(path)] else int(rng.integers(SIZE))
            token = right if rng.random() < 0.6 else int(rng.integers(SIZE))
            if (above, token) in zip(parents, tokens, strict=True):
                continue
            tokens.append(token), parents.append(above), paths.append([*paths[above], token])
        masks = text.masks(DraftTree.of(tokens, parents))
        for row, path in enumerate(paths):
            try:
                alone.follow([*ids[:start], *path])
            except BadRequest:
                assert masks.allowed(row) is None, path
                continue
            if (found := masks.allowed(row)) is not None:
                assert set(np.flatnonzero(found).tolist()) == allowed(alone), path
            else:
                assert alone.complete or path[-1] == END
    assert allowed(text) == allowed(text)  # the masks moved nothing


async def test_an_answer_that_is_cut_and_goes_on_otherwise_is_followed_as_from_its_beginning():
    text, ids = await begun(SCHEMA), ids_of(SENTENCE)
    text.follow(ids)
    assert text.complete
    for length in (3, 9, 0, len(ids), 5):
        fresh = await begun(SCHEMA)
        fresh.follow(ids[:length])
        text.follow(ids[:length])
        assert allowed(text) == allowed(fresh)
    with pytest.raises(BadRequest, match=r"structure: does not allow the answer's token 6, 299"):
        text.follow([*ids[:5], 299])
    text.follow(ids)
    assert text.complete


async def test_a_round_is_taken_up_to_where_the_structure_is_complete_or_the_answer_ends():
    text = await begun(Structure.choices(["ab", "abc"]))
    assert text.take(ids_of("abc") + [7, 8]) == 3 and text.complete
    text.follow([])
    assert text.take([*ids_of("ab"), END, 9]) is None and not text.complete
    text.follow([*ids_of("ab"), END])
    with pytest.raises(BadRequest, match="does not allow an end after the answer's first 1 tokens"):
        text.follow([*ids_of("a"), END])


async def test_a_stop_token_of_text_is_text_and_an_end_token_is_none():
    a, b = ids_of("ab")
    text = await begun(Structure.regex("a*b"), stop_ids=[a])
    assert a in allowed(text) and STOP not in allowed(text)
    grammar = await compiler().compiled(Structure.regex("a*b?"))
    assert b not in allowed(grammar.text(0, [b])) - {b} and END not in allowed(grammar.text(0, [b]))


async def test_a_text_that_no_token_continues_is_stuck_and_an_answer_that_none_begins_is_refused():
    lacking = {token: word for token, word in BYTES.items() if b"z" not in word}
    text = (await compiler(lacking).compiled(Structure.choices(["abz", "ac"]))).text(0, [END])
    text.follow(ids_of("a"))
    masks = text.masks(DraftTree.of([ids_of("a")[0], *ids_of("bc")], [-1, 0, 0]))
    assert text.stuck == {1} and text.why_stuck and masks.allowed(1) is masks.allowed(2) is None
    with pytest.raises(BadRequest, match="structure.choices: no answer can begin"):
        await compiler(lacking).compiled(Structure.choices(["z"]))


HUGE = "x" * (MAX_STRUCTURE_BYTES + 1)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: Structure.json_schema("{bad"), "structure.json_schema: is no JSON"),
        (lambda: Structure.json_schema({"type": "strin"}), "structure.json_schema: .*Invalid type: strin"),
        (lambda: Structure.json_schema({"uniqueItems": True}), "structure.json_schema: .*uniqueItems"),
        (lambda: Structure.json_schema({"not": {}, "x-guidance": {"lenient": True}}), "structure.json_schema: .*not"),
        (
            lambda: Structure.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
            ".*Unsatisfiable",
        ),
        (lambda: Structure.json_schema({"$ref": "http://127.0.0.1/a"}), "structure.json_schema: .*not fetch"),
        (lambda: Structure.json_schema(f"{'[' * 9000}"), "structure.json_schema: .*nested more"),
        (lambda: Structure.json_schema('{"a":' * 9000), "structure.json_schema: .*nested more"),
        (lambda: Structure.json_schema(HUGE), f"structure.json_schema: has {len(HUGE)} characters"),
        (lambda: Structure.regex("a["), "structure.regex: .*unclosed character class"),
        (lambda: Structure.regex("()"), "structure.regex: describes the empty text alone"),
        (lambda: Structure.regex("\ud800"), "structure.regex: has a surrogate"),
        (lambda: Structure.grammar('start: "x" | foo'), 'structure.grammar: .*unknown name: "foo"'),
        (
            lambda: Structure.grammar('%llguidance {"no_forcing": false}\nstart: "x"'),
            "structure.grammar: .*%llguidance",
        ),
        (lambda: Structure.grammar(""), "structure.grammar: is empty"),
        (lambda: Structure.choices([]), "structure.choices: has 0 texts"),
        (lambda: Structure.choices(["a"] * (MAX_CHOICES + 1)), f"structure.choices: has {MAX_CHOICES + 1} texts"),
        (lambda: Structure.choices(["a", ""]), r"structure.choices\[1\]: is empty"),
        (lambda: Structure.choices([HUGE]), "structure.choices: has"),
    ],
)
async def test_a_structure_that_cannot_be_enforced_is_refused_by_its_field_and_the_reason(make, reason):
    with pytest.raises(BadRequest, match=f"{reason}"):
        await compiler().compiled(make())


PATTERNS = {"anyOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{count}}}"} for count in range(300)]}
DOUBLING = "".join(f"{chr(97 + level)}: {chr(98 + level)} {chr(98 + level)}\n" for level in range(25))


@pytest.mark.parametrize(
    "structure",
    [
        Structure.regex("(a{0,5000}){0,5000}b{30000}"),
        Structure.regex("(((((a?){100}){100}){100}){100}){100}"),
        Structure.regex("(.*a.{200}){50}"),
        Structure.json_schema(PATTERNS),
        Structure.grammar(f"start: a\n{DOUBLING}z: /a*/"),
    ],
    ids=["nested-counts", "product", "window", "many-patterns", "doubling"],
)
async def test_a_hostile_structure_is_refused_or_compiled_within_the_limits(structure):
    """llguidance counts its work and gives up at a limit; the answer's masks do the same."""
    try:
        text = (await compiler().compiled(structure)).text(0, [END])
    except BadRequest as error:
        assert error.field == structure.field
        return
    for token in ids_of("aaaaaaaa"):
        if token not in allowed(text):
            break
        assert text.take([token]) is None


async def test_without_llguidance_a_structure_is_refused_with_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BadRequest, match=r"structure.regex: needs the package llguidance: pip install .*structured"):
        await compiler().compiled(Structure.regex("a"))


async def test_a_structure_is_compiled_once_and_the_last_used_are_kept(monkeypatch):
    monkeypatch.setattr(grammars, "KEPT", 2)
    made = compiler()
    first = await made.compiled(Structure.regex("a"))
    await made.compiled(Structure.regex("b"))
    assert await made.compiled(Structure.regex("a")) is first
    await made.compiled(Structure.regex("c"))
    assert await made.compiled(Structure.regex("a")) is first
    assert len(made._kept) == 2


async def test_a_structure_that_many_wait_for_counts_once_as_compiled_or_refused():
    made = compiler()
    for pattern, refused in (("a", 0), ("a(", 1)):
        waiting = [asyncio.ensure_future(made.compiled(Structure.regex(pattern))) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # the first caller is gone
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (made.compiles, made.refused) == (1, refused)


HANGING = Structure.json_schema({"type": "string", "allOf": [{"pattern": f".*a.{{{each}}}.*"} for each in range(20)]})


async def test_a_structure_that_compiles_for_too_long_ends_its_process_and_no_other_tenants_structure_waits():
    """Of as many tenants as there are threads; each refusal is kept."""
    made = Grammars(lambda: BYTES, SIZE, replace(LIMITS, compile_s=0.2))
    for tenant in ("one", "two", "one"):
        with pytest.raises(BadRequest, match="structure.json_schema: was not compiled within 0.2 s of CPU time"):
            await made.compiled(HANGING, tenant)
    assert await made.compiled(Structure.regex("a"), "two")


WIDE = [
    {"properties": {f"k{each}": {}}, "patternProperties": {f"^x{each}": {}}, "additionalProperties": {"type": "null"}}
    for each in range(500)
]


async def test_a_schemas_text_is_read_within_the_limits_of_its_compilation():
    made = Grammars(lambda: BYTES, SIZE, replace(LIMITS, compile_s=0.05))
    with pytest.raises(BadRequest, match="structure.json_schema: was not compiled within 0.05 s of CPU time"):
        await made.compiled(Structure.json_schema({"allOf": WIDE}))


@pytest.mark.parametrize("most_s, fault", [(0.0, "its parser takes more than 0 s of CPU time"), (60.0, "")])
def test_a_grammar_whose_parser_would_keep_other_threads_from_running_is_refused(most_s: float, fault: str):
    found = fault_of_grammar(TokenTexts([b"a", b""], [1]).tokenizer(), f"{HEADER}start: /a+/", LIMITS, most_s)
    assert found.startswith(fault) and bool(found) == bool(fault)


@pytest.mark.slow
async def test_a_structure_that_crashes_the_compiler_or_takes_all_memory_is_refused():
    names = [f"r{each}" for each in range(1750)]  # nested as deeply as the compiler recurses
    rules = "\n".join(f'{name}: ({names[(at + 1) % 1750]} | r1) "a" | "a"' for at, name in enumerate(names))
    made = Grammars(lambda: BYTES, SIZE, replace(LIMITS, compile_mb=16, symbols=500_000, compile_s=5.0))
    with pytest.raises(BadRequest, match="structure.grammar: takes more than 16 MiB to compile, or crashes"):
        await made.compiled(Structure.grammar(f"start: {' | '.join(names)}\n{rules}"))
    with pytest.raises(BadRequest, match="structure.json_schema: takes more than 16 MiB to compile"):
        await made.compiled(HANGING)
    assert await made.compiled(Structure.regex("a"))


HUNGRY = Structure.regex("((((((a|b)?){8}){8}){8}){8}){8}x")
"""llguidance's lexer learns much from each of its tokens: more from `aa` than from `a`."""
PAIRS = {word.decode(): token for token, word in BYTES.items() if word in (b"ab", b"aa")}
ANSWERS = [ids_of("a" * 12), ids_of("ab" * 6), ids_of("ba" * 6), [PAIRS["aa"]] * 6, [PAIRS["ab"], PAIRS["aa"]] * 3]


def read(text: GrammarText, ids: list[int], guesses: list[int]) -> tuple[int, str]:
    """Take tokens as a verifier does, one a round; return how many, and why no more. guesses: of each tree"""
    for taken, token in enumerate(ids):
        if text.place().stuck:
            return taken, text.place().why_stuck
        rows = list(dict.fromkeys([*guesses, token]))
        text.masks(DraftTree.of([0, *rows], [-1] + [0] * len(rows)))
        text.foresee([token])
        assert text.take([token]) is None
    return len(ids), text.place().why_stuck


@pytest.mark.parametrize(
    "fuel, ends", [(3000, [3, 3, 3, 1, 1]), (20_000, [5, 5, 5, 3, 3]), (1_000_000, [12, 12, 12, 6, 6])]
)
async def test_an_answer_ends_at_the_same_token_whatever_else_its_structures_lexer_has_read(fuel, ends, monkeypatch):
    """The answers to a structure share llguidance's lexer, which fails for all once a mask has exhausted it."""
    monkeypatch.setattr(guidance, "STEP_FUEL", fuel)
    monkeypatch.setattr(grammars, "WORN_FUEL", fuel // 2)
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        shared = await compiler().compiled(HUNGRY)
        for guesses in ([], ids_of("ab"), [*ids_of("ab"), *PAIRS.values()]):
            for number in order:
                taken, why = read(shared.text(0, [END]), ANSWERS[number], guesses)
                assert taken == ends[number] and ("too many expressions" in why) == (taken < len(ANSWERS[number]))


async def test_a_structure_whose_lexer_one_answer_exhausted_is_compiled_again_for_the_next(monkeypatch):
    monkeypatch.setattr(guidance, "STEP_FUEL", 3000)
    made = compiler()
    first = await made.compiled(HUNGRY)
    assert await made.compiled(HUNGRY) is first
    read(first.text(0, [END]), ANSWERS[0], [])
    assert await made.compiled(HUNGRY) is not first
