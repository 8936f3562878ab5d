"""Values are the same after a round trip over the wire, and malformed messages are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dendro import wire
from dendro.calls import (
    CloseCall,
    Closed,
    DraftCall,
    Hello,
    OpenCall,
    Opened,
    PreparedTree,
    RequestParameters,
    TextUpdate,
    VerifyCall,
)
from dendro.errors import BadAnswer, BadRequest, Conflict, EngineFailed, NotFound, Overloaded, PeerLost
from dendro.internal.v1 import calls_pb2, drafter_pb2, tree_pb2, verifier_pb2
from dendro.modes import VerificationMode
from dendro.shapes import MAX_ROWS, TreeShape
from dendro.text import Finish, Limits, Sampling, Verdict
from dendro.tree import ChildLaw, DraftTree
from dendro.wire import ListMessages
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

TOKENS = st.integers(0, 2**32 - 1)
WORDS = st.integers(0, 2**64 - 1)


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    rows = draw(st.integers(1, MAX_ROWS))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, rows)]
    tokens = draw(st.lists(TOKENS, min_size=rows, max_size=rows, unique=True))
    values = draw(st.lists(st.floats(-(2.0**100), 0, width=32, allow_subnormal=False), min_size=rows, max_size=rows))
    trace = draw(st.lists(st.integers(0, 2**31 - 1), max_size=6))
    return DraftTree(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        np.array(values, np.float32),
        draw(st.text(max_size=5)),
        np.array(trace, np.int32),
        draw(st.integers(0, wire.MAX_US)),
        draw(st.integers(1, 64)),
    )


@st.composite
def updates(draw: st.DrawFn, start: int | None = None) -> TextUpdate:
    tokens = tuple(draw(st.lists(TOKENS, min_size=1, max_size=8)))
    first = draw(st.integers(0, 1000)) if start is None else start
    return TextUpdate(draw(st.binary(min_size=16, max_size=16)), first + len(tokens), draw(WORDS), first, tokens)


@st.composite
def opens(draw: st.DrawFn) -> OpenCall:
    update = draw(updates(start=0))
    sampling = Sampling(
        temperature=draw(st.just(0.0) | st.floats(1e-6, 10)),
        top_k=draw(st.integers(0, 1000)),
        top_p=draw(st.floats(0.01, 1)),
        min_p=draw(st.floats(0, 0.99, allow_subnormal=False)),
        seed=draw(WORDS),
        sample_index=draw(st.integers(0, 2**32 - 1)),
        repetition_penalty=draw(st.floats(0.01, 100)),
        presence_penalty=draw(st.floats(-100, 100)),
        frequency_penalty=draw(st.floats(-100, 100)),
        logit_bias=tuple(sorted(draw(st.dictionaries(TOKENS, st.floats(-100, 100), max_size=4)).items())),
        banned_ids=tuple(draw(st.lists(TOKENS, max_size=4))),
        allowed_ids=tuple(draw(st.lists(TOKENS, max_size=4))),
        bad_words=tuple(map(tuple, draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=3)))),
    )
    marks = tuple(draw(st.lists(st.integers(1, update.base), max_size=3, unique=True)))
    longest = draw(st.integers(update.base, 2**31 - 1))
    stop_ids = tuple(draw(st.lists(TOKENS, max_size=3)))
    limits = Limits(longest, draw(st.booleans()), draw(st.integers(0, longest)), stop_ids)
    parameters = RequestParameters(
        sampling=sampling,
        limits=limits,
        tenant=draw(st.text(max_size=5)),
        marks=marks,
        vocabulary=draw(st.integers(0, 2**31 - 1)),
        tokenizer=draw(st.text(max_size=5)),
        prompt_length=draw(st.integers(0, update.base)),
    )
    traceparent = draw(st.text(max_size=wire.MAX_TRACEPARENT))
    return OpenCall(update, parameters, draw(st.text(max_size=5)), draw(st.booleans()), traceparent)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    tokens = tuple(draw(st.lists(TOKENS, min_size=1, max_size=8)))
    path = (0, *(draw(st.integers(1, 63)) for _ in tokens[1:]))
    ranks = tuple(draw(st.lists(st.integers(0, 62), max_size=8)))
    length = len(tokens) + draw(st.integers(0, 3))
    finish = draw(st.sampled_from([None, Finish.END_OF_TEXT, Finish.LENGTH]))  # a verifier sees no text
    return Verdict(
        tokens,
        path,
        ranks,
        finish,
        length,
        draw(st.integers(0, wire.MAX_US)),
        draw(st.integers(0, wire.MAX_US)),
        draw(st.integers(1, 64)),
        trimmed=draw(st.integers(0, 63)),
        cold=draw(st.booleans()),
    )


SHAPES = st.sampled_from(["off", "(1,1,1,1)", "(3,2,2,1,1)", "(63,)"]).map(TreeShape.parse)
OPENED = st.builds(Opened, *[st.integers(0, 2**31 - 1)] * 3)
CLOSED = st.builds(Closed, st.integers(0, 2**31 - 1))


def same_tree(one: DraftTree, other: DraftTree) -> bool:
    arrays = all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in ("tokens", "parents", "values", "trace")
    )
    return arrays and (one.proposer, one.draft_us, one.texts) == (other.proposer, other.draft_us, other.texts)


@given(trees())
@settings(max_examples=50, deadline=None)
def test_a_tree_is_unchanged_by_a_round_trip(tree: DraftTree):
    sent = wire.tree_message(tree).SerializeToString()
    assert same_tree(wire.tree_from(tree_pb2.DraftTree.FromString(sent)), tree)


CHANCES = st.floats(0, 1, width=32)


@given(st.one_of(opens(), st.builds(DraftCall, updates(), SHAPES, CHANCES), st.builds(CloseCall, updates())))
@settings(max_examples=50, deadline=None)
def test_a_drafters_call_is_unchanged_by_a_round_trip(call):
    sent = wire.drafter_call_message(7, call).SerializeToString()
    message = drafter_pb2.DrafterCall.FromString(sent)
    assert message.call == 7 and wire.drafter_call_from(message) == call


@given(st.one_of(opens(), st.builds(CloseCall, updates())))
@settings(max_examples=30, deadline=None)
def test_a_verifiers_call_is_unchanged_by_a_round_trip(call):
    message = verifier_pb2.VerifierCall.FromString(wire.verifier_call_message(7, call).SerializeToString())
    assert message.call == 7 and wire.verifier_call_from(message) == call


@given(updates(), trees(), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_verify_call_is_unchanged_by_a_round_trip(update: TextUpdate, tree: DraftTree, ahead: bool):
    message = verifier_pb2.VerifierCall.FromString(
        wire.verifier_call_message(1, VerifyCall(update, tree, ahead and not tree.guesses)).SerializeToString()
    )
    back = wire.verifier_call_from(message)
    assert isinstance(back, VerifyCall) and back.update == update and same_tree(back.tree, tree)
    assert back.ahead == (ahead and not tree.guesses)


def test_a_tree_with_guesses_cannot_announce_a_round_without_a_tree():
    call = VerifyCall(TextUpdate(bytes(16), 2, 0, 2, ()), DraftTree.of([1, 2], [-1, 0]))
    message = wire.verifier_call_message(1, call)
    message.verify.ahead = True
    with pytest.raises(BadRequest, match="verify.ahead"):
        wire.verifier_call_from(message)


@given(st.one_of(verdicts(), OPENED, CLOSED))
@settings(max_examples=50, deadline=None)
def test_a_verifiers_answer_is_unchanged_by_a_round_trip(answer):
    message = verifier_pb2.VerifierAnswer.FromString(wire.verifier_answer_message(3, answer).SerializeToString())
    assert message.call == 3 and wire.answer_from(message) == answer


@given(st.one_of(OPENED, CLOSED))
@settings(max_examples=20, deadline=None)
def test_a_drafters_answer_is_unchanged_by_a_round_trip(answer):
    message = drafter_pb2.DrafterAnswer.FromString(wire.drafter_answer_message(3, answer).SerializeToString())
    assert wire.answer_from(message) == answer


@given(trees(), st.binary(min_size=16, max_size=16), WORDS, WORDS)
@settings(max_examples=20, deadline=None)
def test_a_prepared_tree_is_unchanged_by_a_round_trip(tree, opening, base, digest):
    sent = wire.drafter_answer_message(0, PreparedTree(opening, base, digest, tree)).SerializeToString()
    back = wire.answer_from(drafter_pb2.DrafterAnswer.FromString(sent))
    assert isinstance(back, PreparedTree) and same_tree(back.tree, tree)
    assert (back.opening, back.base, back.digest) == (opening, base, digest)


def test_a_hello_is_unchanged_by_a_round_trip():
    hello = Hello(1, "m", "f", "t", 4096, 2048, 64, 16, "bfloat16", "bitwise", 77, (0, 2), True, "facts", (1, 8, 32))
    hello = replace(hello, orders=True, timed_steps=((1, 900), (8, 1_100)))
    assert wire.hello_from(calls_pb2.Hello.FromString(wire.hello_message(hello).SerializeToString())) == hello


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("tree.tokens", "of no kind"),
        NotFound("opening: x"),
        Conflict("c"),
        Overloaded("o"),
        PeerLost("p"),
        EngineFailed("e"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_type_and_its_message(error):
    with pytest.raises(type(error), match=f"^{error}$"):
        wire.answer_from(wire.drafter_answer_message(1, error))


def test_an_internal_error_is_sent_without_its_message():
    message = wire.verifier_answer_message(1, RuntimeError("the secret"))
    assert "secret" not in message.error.message
    with pytest.raises(EngineFailed):
        wire.answer_from(message)


ROOT: dict[str, Any] = {"tokens": [5], "parents": [-1], "values": [0.0]}


@pytest.mark.parametrize(
    "fields, name",
    [
        ({}, "tree.tokens"),
        ({"tokens": [1] * 65, "parents": [-1] + [0] * 64, "values": [0.0] * 65}, "tree.tokens"),
        ({"tokens": [1] * 1_000_000}, "tree.tokens"),
        ({**ROOT, "values": []}, "tree.parents"),
        ({**ROOT, "parents": [0]}, "tree.parents"),
        ({"tokens": [5, 6], "parents": [-1, 1], "values": [0.0, 0.0]}, "tree.parents"),
        ({"tokens": [5, 6], "parents": [-1, -2], "values": [0.0, 0.0]}, "tree.parents"),
        ({"tokens": [5, 6, 7], "parents": [-1, 2, 0], "values": [0.0] * 3}, "tree.parents"),
        ({"tokens": [5, 6, 6], "parents": [-1, 0, 0], "values": [0.0] * 3}, "tree.tokens"),
        ({**ROOT, "values": [float("nan")]}, "tree.values"),
        ({**ROOT, "values": [float("-inf")]}, "tree.values"),
        ({**ROOT, "values": [0.5]}, "tree.values"),
    ],
    ids=[
        "no rows",
        "65 rows",
        "a million rows",
        "no values",
        "the root has a parent",
        "a cycle",
        "below -1",
        "a parent that comes later",
        "twin siblings",
        "nan",
        "-inf",
        "a chance above one",
    ],
)
def test_a_malformed_tree_is_refused_by_the_name_of_its_field(fields, name):
    with pytest.raises(BadRequest) as refused:
        wire.tree_from(tree_pb2.DraftTree(**fields))
    assert refused.value.field.startswith(name)


@pytest.mark.parametrize("widths", [[0], [64], [2**32 - 1] * 8, [1] * 64, [4, 4, 4, 4]])
def test_a_malformed_shape_is_refused(widths):
    with pytest.raises(BadRequest):
        wire.shape_from(tree_pb2.TreeShape(widths=widths))


MOST = 2**64 - 1


def steps(rows: int, us: int) -> calls_pb2.TimedStep:
    return calls_pb2.TimedStep(rows=rows, us=us)


def test_a_statistic_out_of_range_is_set_to_the_nearest_end_of_its_range():
    tree = wire.tree_from(tree_pb2.DraftTree(**ROOT, draft_us=MOST, texts=0, trace=[2**32 - 1] * 100_000))
    assert (tree.draft_us, tree.texts) == (wire.MAX_US, 1)
    assert tree.trace.tolist() == [2**31 - 1] * wire.MAX_TRACE
    fields: dict[str, Any] = {
        "tokens": [1],
        "path": [0],
        "length": 1,
        "verify_us": MOST,
        "queue_us": MOST,
        "step_rows": 2**32 - 1,
    }
    verdict = wire.verdict_from(verifier_pb2.Verdict(**fields, texts=2**32 - 1))
    assert (verdict.verify_us, verdict.queue_us) == (wire.MAX_US, wire.MAX_US)
    assert (verdict.step_rows, verdict.texts) == (wire.MAX_STEP_ROWS, wire.MAX_TEXTS)
    opened = calls_pb2.Opened(restored=MOST, processed=MOST, open_us=MOST)
    assert wire.answer_from(drafter_pb2.DrafterAnswer(opened=opened)) == Opened(2**31 - 1, 2**31 - 1, wire.MAX_US)
    assert wire.answer_from(drafter_pb2.DrafterAnswer(closed=calls_pb2.Closed(saved=MOST))) == Closed(2**31 - 1)


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"vocabulary": 0}, "hello.vocabulary"),
        ({"vocabulary": 2**32 - 1}, "hello.vocabulary"),
        ({"max_length": 0}, "hello.max_length"),
        ({"max_rows": 0}, "hello.max_rows"),
        ({"end_ids": [1] * 100_000}, "hello.end_ids"),
        ({"step_sizes": range(1, 100_000)}, "hello.step_sizes"),
        ({"step_sizes": [0, 8]}, "hello.step_sizes"),
        ({"step_sizes": [8, 8]}, "hello.step_sizes"),
        ({"step_sizes": [16, 8]}, "hello.step_sizes"),
        ({"step_sizes": [8, 2**32 - 1]}, "hello.step_sizes"),
        ({"timed_steps": [steps(1, 1)] * 2}, "hello.timed_steps.rows"),
        ({"timed_steps": [steps(0, 1)]}, "hello.timed_steps.rows"),
        ({"timed_steps": [steps(rows, 1) for rows in range(1, 130)]}, "hello.timed_steps.rows"),
        ({"timed_steps": [steps(1, 1), steps(2, 0)]}, "hello.timed_steps.us"),
        ({"timed_steps": [steps(1, MOST)]}, "hello.timed_steps.us"),
        ({"timed_steps": [steps(1, 2), steps(2, 1)]}, "hello.timed_steps.us"),
    ],
)
def test_a_hello_without_room_for_a_text_is_refused_by_the_name_of_its_field(fields, name):
    with pytest.raises(BadRequest) as refused:
        wire.hello_from(calls_pb2.Hello(**{"vocabulary": 9, "max_length": 9, "max_rows": 9, **fields}))
    assert refused.value.field == name


def test_limits_of_a_hello_above_ours_are_lowered_to_ours():
    fields: dict[str, Any] = {
        "vocabulary": 9,
        "max_length": MOST,
        "max_rows": 2**32 - 1,
        "max_depth": 2**32 - 1,
        "model": "m\n" * 9999,
    }
    hello = wire.hello_from(calls_pb2.Hello(**fields))
    assert (hello.max_length, hello.max_rows, hello.max_depth) == (2**31 - 1, MAX_ROWS, MAX_ROWS - 1)
    assert hello.model.isprintable() and len(hello.model) <= wire.MAX_NAME


@pytest.mark.parametrize("fields", [{}, {"tokens": [1] * 65, "path": [0] * 65, "length": 65}, {"finish": 9}], ids=str)
def test_a_malformed_answer_is_the_fault_of_its_peer_and_not_of_the_call(fields):
    with pytest.raises(BadAnswer):
        wire.answer_from(verifier_pb2.VerifierAnswer(verdict=verifier_pb2.Verdict(**fields)))
    with pytest.raises(BadAnswer):
        wire.answer_from(drafter_pb2.DrafterAnswer(tree=tree_pb2.DraftTree(tokens=[1], parents=[3])))
    for empty in (verifier_pb2.VerifierAnswer(), drafter_pb2.DrafterAnswer()):
        with pytest.raises(BadAnswer):
            wire.answer_from(empty)


GOOD = {"opening": b"o" * 16, "base": 3, "digest": 1, "start": 0, "tokens": [1, 2, 3]}


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"call": 1}, "update.opening"),
        ({"update": {**GOOD, "opening": b"short"}}, "update.opening"),
        ({"update": {**GOOD, "start": 1}}, "update.base"),
        ({"update": {**GOOD, "base": 0, "tokens": []}}, "update.base"),
        ({"update": GOOD}, "call"),
        ({"update": {**GOOD, "start": 1, "base": 4}, "open": {"max_length": 9}}, "update.start"),
        ({"update": GOOD, "open": {"max_length": 2}}, "max_length"),
        ({"update": GOOD, "open": {"max_length": 9, "marks": [4]}}, "marks"),
        ({"update": GOOD, "open": {"max_length": 9, "marks": [1] * 1000}}, "marks"),
        ({"update": {**GOOD, "start": MOST - 3, "base": MOST}}, "update.base"),
        ({"update": {**GOOD, "start": 5}}, "update.base"),
        ({"update": GOOD, "open": {"max_length": 9, "sampling": {"temperature": -1}}}, "temperature"),
        ({"update": GOOD, "open": {"max_length": 9, "sampling": {"top_p": 0}}}, "top_p"),
        ({"update": GOOD, "draft": {"shape": {"widths": [0]}}}, "shape"),
    ],
)
def test_a_malformed_call_is_refused_by_the_name_of_its_field(fields, name):
    with pytest.raises(BadRequest) as refused:
        wire.drafter_call_from(drafter_pb2.DrafterCall(**fields))
    assert refused.value.field == name


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_random_bytes_raise_only_bad_request(noise: bytes):
    readers: tuple[tuple[Any, Callable[[Any], object]], ...] = (
        (drafter_pb2.DrafterCall, wire.drafter_call_from),
        (verifier_pb2.VerifierCall, wire.verifier_call_from),
        (verifier_pb2.Verdict, wire.verdict_from),
        (tree_pb2.DraftTree, wire.tree_from),
    )
    for kind, read in readers:
        try:
            message = kind.FromString(noise)
        except DecodeError:
            continue
        try:
            read(message)
        except BadRequest:
            continue


@given(trees(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_gives_another_tree_or_bad_request(tree: DraftTree, data: st.DataObject):
    sent = bytearray(wire.tree_message(tree).SerializeToString())
    sent[data.draw(st.integers(0, len(sent) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert isinstance(wire.tree_from(tree_pb2.DraftTree.FromString(bytes(sent))), DraftTree)
    except (DecodeError, BadRequest):
        return


def test_frames_keep_the_order_of_messages_and_their_size_limit():
    calls = [
        drafter_pb2.DrafterCall(call=1, update=calls_pb2.TextUpdate(tokens=[300] * size)) for size in (10, 10, 90, 5)
    ]
    frames = wire.batched(calls, 80)
    assert [call for frame in frames for call in frame] == calls
    assert [len(frame) for frame in frames] == [2, 1, 1]


@pytest.mark.parametrize("name", ["banned_ids", "allowed_ids", "bad_words", "bad_words[0]", "logit_bias", "stop_ids"])
def test_more_parameters_than_a_request_may_have_are_refused_before_they_are_copied(name: str):
    update = TextUpdate(b"o" * 16, 1, 1, 0, (5,))
    call = OpenCall(update, RequestParameters(Sampling(), Limits(9), "", ()))
    message = wire.verifier_call_message(1, call)
    many = range(100_000)
    match name:
        case "stop_ids":
            message.open.stop_ids.extend(many)
        case "logit_bias":
            message.open.sampling.logit_bias.update(dict.fromkeys(many, 1.0))
        case "bad_words":
            message.open.sampling.bad_words.extend([calls_pb2.TokenIds(ids=[1])] * len(many))
        case "bad_words[0]":
            message.open.sampling.bad_words.add().ids.extend(many)
        case _:
            getattr(message.open.sampling, name).extend(many)
    with pytest.raises(BadRequest, match=f"^{re.escape(name)}: has 100000 entries; at most "):
        wire.verifier_call_from(message)


def test_a_prompt_longer_than_the_text_and_a_least_length_above_the_limit_are_refused():
    update = TextUpdate(b"o" * 16, 1, 1, 0, (5,))
    for field, value, named in (("prompt_tokens", 2, "prompt_tokens"), ("min_length", 10, "min_length")):
        message = wire.verifier_call_message(1, OpenCall(update, RequestParameters(Sampling(), Limits(9), "", ())))
        setattr(message.open, field, value)
        with pytest.raises(BadRequest, match=f"^{named}: is {value}"):
            wire.verifier_call_from(message)


LAW_TREE = replace(
    DraftTree.of([5, 7, 9, 2], [-1, 0, 0, 1]),
    laws=(
        ChildLaw(0, np.array([7, 9, 1]), np.array([0.5, 0.25, 0.25])),
        ChildLaw(1, np.array([2]), np.array([1.0])),
    ),
)


def test_the_laws_of_drawn_guesses_are_unchanged_by_a_round_trip():
    back = wire.tree_from(wire.tree_message(LAW_TREE))
    assert [law.row for law in back.laws] == [0, 1]
    for law, sent in zip(back.laws, LAW_TREE.laws, strict=True):
        assert (law.ids == sent.ids).all() and (law.probabilities == sent.probabilities).all()


def _negative(message):
    message.laws[0].probabilities[1] = -0.25


def _above_one(message):
    message.laws[0].probabilities[1] = 0.75


def _missing(message):
    del message.laws[0].probabilities[2:]


def _of_no_number(message):
    message.laws[1].probabilities[0] = math.nan


def _too_long(message):
    message.laws[0].ids.extend(range(100, 1_000_100))


def _too_many(message):
    message.laws.extend([message.laws[1]] * 1000)


def _of_a_leaf(message):
    message.laws[1].row = 3


def _of_one_row_alone(message):
    del message.laws[1]


@pytest.mark.parametrize(
    "lie", [_negative, _above_one, _missing, _of_no_number, _too_long, _too_many, _of_a_leaf, _of_one_row_alone]
)
def test_a_law_that_is_none_is_refused_by_its_field(lie):
    message = wire.tree_message(LAW_TREE)
    lie(message)
    with pytest.raises(BadRequest, match=r"^tree\.laws"):
        wire.tree_from(message)


@pytest.mark.parametrize("mode, lenience", [("coupled", 1.0), ("multi-step", 1.0), ("lenient", 0.25)])
def test_a_requests_mode_is_unchanged_by_a_round_trip(mode: str, lenience: float):
    sampling = Sampling(temperature=0.5, mode=VerificationMode(mode), lenience=lenience)
    parameters = RequestParameters(sampling, Limits(9), "", ())
    call = OpenCall(TextUpdate(bytes(16), 2, 5, 0, (1, 2)), parameters)
    back = wire.verifier_call_from(wire.verifier_call_message(1, call))
    assert isinstance(back, OpenCall) and back.parameters.sampling == sampling


def test_the_answers_of_a_request_send_their_lists_and_other_requests_their_own():
    """Lists that several texts share are converted once."""
    first = Sampling(temperature=1.0, seed=3, banned_ids=(1, 2), bad_words=((3, 4),), logit_bias=((5, 1.5),))
    others = Sampling(banned_ids=(1, 2)), Sampling(allowed_ids=(7,)), Sampling()
    for sampling in (first, first.of_sample(7), others[0], first, *others[1:]):
        parameters = RequestParameters(sampling, Limits(10), "", ())
        call = OpenCall(TextUpdate(bytes(16), 1, 2, 0, (9,)), parameters)
        assert wire.verifier_call_from(wire.verifier_call_message(1, call)).parameters == parameters
    lists = ListMessages()
    assert lists.message_of(first) is lists.message_of(first.of_sample(8)) is not lists.message_of(others[0])
