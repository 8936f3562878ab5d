"""Every argument of a request is a field of its message, or a BadRequest that names it."""

from __future__ import annotations

from typing import Any

import pytest
from dendro import client as client_module
from dendro.answer import build_request
from dendro.arguments import SHOWN_CHARACTERS, repeated_key, shown
from dendro.client import AsyncClient, Client
from dendro.errors import BadRequest, one_line
from dendro.options import Options
from dendro.speculation import Speculation
from dendro.structure import Structure, StructureForm
from hypothesis import given, settings
from hypothesis import strategies as st

SURROGATE = "a\udce9"


class Odd:
    """Fails in every way that a check may try."""

    def __iter__(self):
        raise RuntimeError("iter")

    def __index__(self) -> int:
        raise RuntimeError("index")


@pytest.mark.parametrize(
    "value",
    [5, -0.0, 2**200, "a'b", "a" * 9000, b"a" * 9000, [1, "a", None], {"b": 1, "a": [2]}, ["a" * 30] * 900, 2 * [{}]],
    ids=lambda value: type(value).__name__,
)
def test_a_wrong_value_is_shown_by_the_beginning_of_its_repr(value):
    assert shown(value) == one_line(repr(value), SHOWN_CHARACTERS)


def test_a_wrong_value_is_shown_without_a_look_at_its_rest():
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[" * (SHOWN_CHARACTERS - 1) + "…"
    asked = []

    class Noted:
        def __repr__(self) -> str:
            asked.append(self)
            return "noted"

    for value in ([Noted()] * 9000, {key: Noted() for key in range(9000)}):
        assert shown(value).endswith("…")
    assert len(asked) <= 2 * SHOWN_CHARACTERS


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(codec=None, categories=None), max_size=4)  # surrogates too
    | st.binary(max_size=4)
    | st.just(Odd())
    | st.sampled_from([10**400, 1 + 2j, object, SURROGATE, Speculation(), Structure.regex("a")])
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner))
ID_MAPS = st.dictionaries(LEAVES.filter(lambda each: each.__hash__ is not None), LEAVES, max_size=3)
SPECULATIONS = st.builds(Speculation, VALUES, VALUES, VALUES, VALUES, VALUES)
NAMES = ("prompt", *Options.__annotations__)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(NAMES), VALUES | ID_MAPS | SPECULATIONS)
def test_any_value_of_an_argument_is_sent_or_refused_by_its_name(name: str, value: Any):
    arguments = {"prompt": "p", name: value}
    try:
        request = build_request(**arguments)
    except BadRequest as error:
        assert error.field.partition("[")[0].partition(".")[0] in (name, "include_stop")
        str(error).encode()
    else:
        request.SerializeToString()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from([*StructureForm, "direct"]), VALUES)
def test_any_value_of_a_structure_is_one_or_is_refused(form: str, value: Any):
    try:
        structure = Structure(value, value) if form == "direct" else getattr(Structure, form)(value)
        build_request("p", structure=structure).SerializeToString()
    except BadRequest as error:
        assert error.field.startswith("structure")


@pytest.mark.parametrize(
    "field, arguments",
    [
        ("prompt", {"prompt": SURROGATE}),
        ("prompt.token_ids[0]", {"prompt": [1.5]}),
        ("prompt.token_ids", {"prompt": b"bytes"}),
        ("stop", {"stop": None}),
        ("stop[1]", {"stop": ["a", SURROGATE]}),
        ("banned_ids[0]", {"banned_ids": [1.5]}),
        ("bad_words[0][1]", {"bad_words": [[1, "2"]]}),
        ("logit_bias", {"logit_bias": None}),
        ("model", {"model": SURROGATE}),
        ("session", {"session": SURROGATE}),
        ("echo", {"echo": "yes"}),
        ("temperature", {"temperature": 10**400}),
        ("speculation.shape", {"speculation": SURROGATE}),
        ("speculation", {"speculation": None}),
        ("structure", {"structure": "[0-9]+"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_argument_is_refused_by_its_name(field: str, arguments: dict):
    with pytest.raises(BadRequest) as refused:
        build_request(**{"prompt": "p", **arguments})
    assert refused.value.field == field


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"seed": -1}, "seed: must be an unsigned 64-bit number; got -1"),
        ({"n": 1 << 32}, "n: must be an unsigned 32-bit number; got 4294967296"),
        ({"top_p": "half"}, "top_p: must be a finite number; got 'half'"),
        (
            {"speculation": Speculation(max_nodes=-1)},
            "speculation.max_nodes: must be an unsigned 32-bit number; got -1",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_number_that_its_field_cannot_hold_is_refused_with_what_it_holds(arguments: dict, words: str):
    with pytest.raises(BadRequest) as refused:
        build_request(**{"prompt": "p", **arguments})
    assert str(refused.value) == words


@pytest.mark.parametrize("kind", [AsyncClient, Client])
@pytest.mark.parametrize(
    "field, address, options",
    [
        ("tenant", "h:1", {"tenant": "caf\u00e9"}),
        ("tenant", "h:1", {"tenant": "a\n"}),
        ("timeout_s", "h:1", {"timeout_s": 0.0}),
        ("timeout_s", "h:1", {"timeout_s": float("nan")}),
        ("timeout_s", "h:1", {"timeout_s": None}),
        ("address", None, {}),
        ("address", SURROGATE, {}),
    ],
)
async def test_a_wrong_argument_of_a_client_is_refused_by_its_name(kind, field: str, address: Any, options: dict):
    with pytest.raises(BadRequest, match=f"^{field}: "):
        kind(address, **options)


@pytest.mark.parametrize("field, options", [("prompt", {"prompt": "p" * 2000}), ("stop_ids", {"stop_ids": [9] * 2000})])
async def test_a_message_over_the_limit_is_refused_with_its_size(monkeypatch, field: str, options: dict):
    monkeypatch.setattr(client_module, "MAX_MESSAGE_BYTES", 1000)
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(BadRequest, match=rf"^{field}: has 200\d bytes of a message of 20\d\d; .* at most 1000"):
            await client.generate_text(**{"prompt": "p", **options})


class ComparedKey(str):
    """A key that counts its comparisons with others."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        ComparedKey.compared += 1
        return str.__eq__(self, other)


def test_a_repeated_key_is_found_by_as_many_comparisons_as_there_are_keys():
    keys = [ComparedKey(number) for number in range(1000)]
    ComparedKey.compared = 0
    assert repeated_key([(key, None) for key in keys]) is None
    assert repeated_key([(key, None) for key in [*keys, ComparedKey("999"), ComparedKey("700")]]) == "700"
    assert ComparedKey.compared < 10 * len(keys)
