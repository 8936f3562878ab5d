"""A request of any content is accepted, or refused by the name of a field, with bounded work."""

from __future__ import annotations

import asyncio
import math
import sys
from contextlib import aclosing
from typing import Any

import pytest
from dendro.errors import BadRequest, DendroError, NotFound
from dendro.shapes import MAX_ROWS, BeamShape, DynamicShape, LevelShape, NodeShape, ProposedShape, TreeShape, UntilShape
from dendro.v1 import generation_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.grpc import status_of
from cluster.router.ingress import Ingress
from tests.support.edge import MAX_LENGTH, VOCABULARY, EdgePeers, ingress, resume_of

LINES = 12_000
"""Python lines that admitting a request may execute: a few for each of the MAX_LENGTH tokens of a text."""
HUGE = 200_000
"""Elements of a huge field; a loop over them in Python executes at least as many lines."""


class CountedNumber(int):
    """A number that counts its additions and multiplications."""

    operations = 0

    def _counting(name: Any) -> Any:  # used in the class body
        def operate(self, other):
            CountedNumber.operations += 1
            return CountedNumber(getattr(int, name)(int(self), int(other)))

        return operate

    __mul__, __rmul__, __add__, __radd__ = map(_counting, ("__mul__", "__rmul__", "__add__", "__radd__"))


@pytest.mark.parametrize("kind", [LevelShape, NodeShape])
@pytest.mark.parametrize("number", [1, 2, MAX_ROWS, 10**4000], ids=["1", "2", "64", "4001 digits"])
def test_a_shape_of_any_length_is_refused_within_a_fixed_number_of_operations(kind, number):
    CountedNumber.operations = 0
    with pytest.raises(ValueError, match="^shape: ") as refused:
        kind((CountedNumber(number),) * HUGE)
    assert CountedNumber.operations <= 4 * MAX_ROWS
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "make",
    [
        lambda number: BeamShape(number, number),
        lambda number: DynamicShape(2, 2, number),
        lambda number: DynamicShape(number, 2, 4),
        lambda number: UntilShape(DynamicShape(1, number, number), 0.5),
        lambda number: ProposedShape(number),
        lambda number: LevelShape((number,)),
        lambda number: NodeShape((number,)),
    ],
)
@pytest.mark.parametrize("number", [10**4299, 10**5000, -(10**5000)], ids=["longest", "longer", "negative"])
def test_a_number_too_long_to_print_is_refused_by_its_place_in_the_shape(make, number):
    with pytest.raises(ValueError, match="^shape: ") as refused:
        make(number)
    assert len(str(refused.value)) < 500


HOSTILE_SHAPES = [
    "(" + ",".join(["63"] * 20_000) + ")",
    "(" + "9" * 4300 + ")",
    "(" + "9" * 60_000 + ")",
    "nodes(" + "1," * 30_000 + "1)",
    "nodes(" + "0," * 30_000 + "1)",
    "beam(" + "9" * 4299 + "," + "9" * 4299 + ")",
    "dynamic(2," + "9" * 60_000 + ",5)",
    "proposed(" + "9" * 60_000 + ")",
    "until(0." + "9" * 60_000 + ",5)",
    "until(" + "9" * 400 + ",5)",
    "until(0.5," + "9" * 400 + ")",
    "until(0.5," + "1," * 200 + "1)",
    "until(\u0660.5,5)",  # a digit that is not ASCII
    "until(auto,5,least=0." + "1" * 400 + ")",
    "(" * 60_000 + ")" * 60_000,
    "a" * 60_000 + "(1)",
    " " * 60_000,
    "1," * 30_000,
    "\u0663\u0664,\u0661",  # digits that are not ASCII
    "(1\n)",
    "\0",
    "(1,1)\ud7ff",
]


@pytest.mark.parametrize("text", HOSTILE_SHAPES, ids=lambda text: ascii(text)[:20])
def test_a_hostile_text_is_refused_as_a_shape_with_a_short_error(text):
    with pytest.raises(ValueError, match="^shape: ") as refused:
        TreeShape.parse(text)
    assert len(str(refused.value)) < 500


@settings(deadline=None, derandomize=True)
@given(
    st.text(alphabet="0123456789.,()= abdeilmnopstuy\u0663", max_size=60)
    | st.tuples(st.floats(), st.lists(st.integers(0, 70), max_size=4)).map(
        lambda until: f"until({until[0]},{','.join(map(str, until[1]))})"
    )
    | st.lists(st.integers(-3, 10**30), max_size=70).map(lambda numbers: f"({','.join(map(str, numbers))})")
    | st.tuples(
        st.sampled_from(["nodes", "beam", "dynamic", "proposed", ""]), st.lists(st.integers(0, 70), max_size=80)
    ).map(lambda shape: f"{shape[0]}({','.join(map(str, shape[1]))})")
)
def test_a_text_is_parsed_as_a_shape_of_at_most_64_rows_or_refused(text):
    try:
        shape = TreeShape.parse(text)
    except ValueError as error:
        assert str(error).startswith("shape: ")
    else:
        assert 1 <= shape.rows <= MAX_ROWS and TreeShape.parse(str(shape)) == shape


async def _first_event(edge: Ingress, request: pb.GenerateRequest) -> pb.GenerateResponse:
    async with aclosing(edge.generate(request)) as events:
        return await anext(events)


def admit(request: pb.GenerateRequest) -> tuple[int, DendroError | None]:
    """Python lines until the request is accepted or refused, and why it was refused. Other errors are raised."""
    edge, lines = ingress(EdgePeers()), 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    refused: DendroError | None = None
    loop = asyncio.new_event_loop()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        loop.run_until_complete(_first_event(edge, request))
    except DendroError as error:
        refused = error
    finally:
        sys.settrace(before)
        loop.close()
    return lines, refused


def _with(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"text": "walk", **fields})


def _fixed(shape: str) -> pb.GenerateRequest:
    return _with(speculation=pb.Speculation(mode=pb.Speculation.MODE_FIXED, shape=shape))


HUGE_FIELDS = {
    "prompt.token_ids": lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * HUGE)),
    "prompt.token_ids of no vocabulary": lambda: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1] * HUGE)),
    "resume.token_ids": lambda: _with(resume=pb.Resume(token_ids=[1] * HUGE)),
    "resume.target": lambda: _with(resume=resume_of(b"walk", target="0" * HUGE)),
    "prompt": lambda: _with(text="\u4e2d" * HUGE * 10),
    "speculation.shape": lambda: _fixed("1," * HUGE),
    "speculation.policy": lambda: _with(speculation=pb.Speculation(policy="p" * HUGE)),
    "model": lambda: _with(model="m" * HUGE),
    "request_id": lambda: _with(request_id="r" * HUGE),
    "stop": lambda: _with(stop=["s"] * HUGE),
    "stop[0]": lambda: _with(stop=["s" * 50 * HUGE]),
    "session": lambda: _with(session="." * HUGE),
    "session of letters": lambda: _with(session="s" * HUGE + "." + "t" * HUGE),
}


@pytest.mark.parametrize("field", HUGE_FIELDS)
def test_a_huge_field_is_refused_by_its_name_within_a_fixed_number_of_lines(field):
    lines, refused = admit(HUGE_FIELDS[field]())
    assert lines <= LINES
    name = field.split(" ")[0]
    if name == "session":
        assert isinstance(refused, NotFound)
    else:
        assert isinstance(refused, BadRequest) and refused.field == name
    assert refused is not None and len(status_of(refused)[1]) <= 1100, "details are sent in a header of at most 8 kB"


def test_the_longest_prompt_that_fits_is_admitted_within_the_same_number_of_lines():
    lines, refused = admit(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * (MAX_LENGTH - 1))))
    assert refused is None and lines <= LINES
    lines, refused = admit(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * MAX_LENGTH)))
    assert isinstance(refused, BadRequest)


def test_an_id_outside_the_vocabulary_is_refused_by_its_index():
    _, refused = admit(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, VOCABULARY, VOCABULARY + 1])))
    assert isinstance(refused, BadRequest) and refused.field == "prompt.token_ids[2]"


texts = st.text(max_size=40) | st.sampled_from(["", "\0", "\n", "x" * 5000, "\u202e", "é" * 300, "a.b", "é.é", "."])
numbers = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, VOCABULARY, 2**31, 2**32 - 1])
wide = st.integers(0, 2**64 - 1) | st.sampled_from([0, 2**63, 2**64 - 1])
doubles = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 1e-7])
ids = st.lists(numbers, max_size=20) | st.sampled_from([[1] * MAX_LENGTH, [1] * (MAX_LENGTH + 1), [2**32 - 1] * 3000])


def _maybe(**fields):
    """A subset of the fields, each drawn from its strategy."""
    return st.fixed_dictionaries({}, optional=fields)


requests = st.tuples(
    _maybe(
        request_id=texts,
        model=st.sampled_from(["", "demo"]) | texts,
        max_new_tokens=numbers,
        ignore_end=st.booleans(),
        session=texts,
        keep_session=st.booleans(),
        stop=st.lists(texts, max_size=20),
        include_stop=st.booleans(),
        resume=st.builds(pb.Resume, token_ids=ids, seed=wide, prompt_tokens=wide, prompt_digest=wide, target=texts),
        sampling=_maybe(
            temperature=doubles, top_k=numbers, top_p=doubles, min_p=doubles, seed=wide, sample_index=numbers
        ).map(lambda fields: pb.Sampling(**fields)),
        speculation=_maybe(
            mode=st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3),
            shape=st.sampled_from(["(1,1)", "proposed(7)", "off", *HOSTILE_SHAPES]) | texts,
            policy=st.sampled_from(["conservative_ucb", "paper_ucb"]) | texts,
            max_nodes=numbers,
            deadline_ms=numbers,
        ).map(lambda fields: pb.Speculation(**fields)),
    ),
    st.just({})
    | st.builds(lambda text: {"text": text}, texts)
    | st.builds(lambda numbers: {"token_ids": pb.TokenIds(ids=numbers)}, ids),
).map(lambda parts: pb.GenerateRequest(**parts[0], **parts[1]))


@settings(deadline=None, derandomize=True, max_examples=150)
@given(requests)
def test_any_request_is_accepted_or_refused_by_the_name_of_a_field(request):
    lines, refused = admit(request)
    assert lines <= LINES
    assert refused is None or isinstance(refused, BadRequest | NotFound)
    if isinstance(refused, BadRequest):
        top = refused.field.split(".")[0].split("[")[0]
        named = {each.name for each in pb.GenerateRequest.DESCRIPTOR.fields} | {"prompt"}
        named |= {each.name for each in pb.Sampling.DESCRIPTOR.fields}
        assert top in named and refused.reason
        assert status_of(refused)[1].isprintable() and len(status_of(refused)[1]) <= 1100


@pytest.mark.parametrize("request_id", ["a\nb", "a b", "\u202eevil", "é", "\0", "x" * 129, "\x7f"], ids=ascii)
def test_a_request_id_that_is_unsafe_in_a_log_line_is_refused_and_not_logged_verbatim(request_id, caplog):
    caplog.set_level("INFO", "dendro.router")
    _, refused = admit(_with(request_id=request_id))
    assert isinstance(refused, BadRequest) and refused.field == "request_id"
    assert all(record.getMessage().isprintable() and len(record.getMessage()) < 400 for record in caplog.records)


def test_a_request_id_of_128_printable_characters_is_accepted():
    assert admit(_with(request_id="~!" * 64))[1] is None
