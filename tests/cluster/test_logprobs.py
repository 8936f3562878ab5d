"""Log-probabilities in an answer's stream: of each token that the client gets, whatever breaks on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from dendro.answer import build_request
from dendro.calls import OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.client import AsyncClient
from dendro.errors import BadAnswer, BadRequest, Conflict, EngineFailed
from dendro.internal.v1 import calls_pb2
from dendro.logprobs import TokenLogprobs
from dendro.progress import AnswerProgress
from dendro.text import Limits, Sampling, Text, Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb
from dendro.wire import answer_from, verifier_answer_message, verifier_call_from, verifier_call_message

from cluster.api.grpc import serve_router
from cluster.api.local import LocalClient
from cluster.peers.verifier import _check_verdict
from cluster.sessions import MemorySessions
from tests.support.edge import HELLO, EdgePeers, ingress, plain_answer, plain_logprobs, resume_of

PROMPT = "walk the "
IDS = list(PROMPT.encode())
WAYS = ("off", "auto", "(1,1,1)", "(2,1)")
STARTED = pb.GenerateResponse(started=pb.GenerateStarted())


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("speculation", WAYS)
async def test_each_token_has_its_own_and_those_of_as_many_likeliest_as_were_asked_for(speculation: str, top: int):
    server = await serve_router(ingress(EdgePeers()))
    try:
        async with AsyncClient(server.address) as client:
            options: Any = {"max_new_tokens": 20, "temperature": 0.8, "seed": 7, "speculation": speculation}
            done = await client.generate_text(PROMPT, logprobs=top, **options)
            without = await client.generate_text(PROMPT, **options)
    finally:
        await server.stop()
    assert list(done.logprobs) == plain_logprobs(IDS, done.token_ids, top)
    assert all(len(part.logprobs) == len(part.token_ids) for part in done.rounds)
    assert (without.token_ids, without.logprobs) == (done.token_ids, ())


@pytest.mark.parametrize("included", [False, True])
async def test_a_cut_at_a_stop_string_drops_those_of_the_tokens_after_it(included: bool):
    whole = plain_answer(IDS, Sampling(), 30)
    text = bytes(whole).decode(errors="replace")
    stop = next(text[at : at + 2] for at in range(5, 20) if "\ufffd" not in text[at : at + 2])
    done = await LocalClient(ingress(EdgePeers())).generate_text(
        PROMPT, stop=stop, include_stop=included, logprobs=1, speculation="(1,1,1)", max_new_tokens=30
    )
    assert done.complete.stop_string == stop and len(done.token_ids) < 30
    assert list(done.logprobs) == plain_logprobs(IDS, done.token_ids, 1)


@pytest.mark.parametrize("held", [0, 1, 5, 12])
async def test_a_resumed_answer_has_those_of_the_rest(held: int):
    whole = plain_answer(IDS, Sampling(), 12)
    request = build_request(PROMPT, max_new_tokens=12, logprobs=2, speculation="(2,1)")
    request.resume.CopyFrom(resume_of(IDS, whole[:held]))
    client = LocalClient(ingress(EdgePeers()))
    progress = AnswerProgress(request)
    progress.token_ids[:] = whole[:held]
    events = [progress.take(each) async for each in ingress(EdgePeers()).generate(request)]
    found = [each for event in events if hasattr(event, "logprobs") for each in event.logprobs]
    assert found == plain_logprobs(IDS, whole, 2)[held:] and progress.token_ids == whole
    assert list((await client.generate_text(PROMPT, max_new_tokens=12, logprobs=2)).logprobs[held:]) == found


async def test_a_written_turn_is_computed_again_for_them_and_not_written_twice():
    peers, sessions = EdgePeers(), MemorySessions()
    router = ingress(peers, sessions)
    client = LocalClient(router)
    first = await client.generate_text(PROMPT, max_new_tokens=2, keep_session=True)
    options: Any = {"session": first.complete.session, "request_id": "A", "max_new_tokens": 15, "stop": "zz"}
    law = {"temperature": 1.0, "seed": 5}
    done = await client.generate_text("on", **options, **law)
    record = await sessions.read(first.complete.session, "")
    prompt = [*IDS, *first.token_ids, *b"on"]
    again = await client.generate_text("on", logprobs=3, **options, **law)
    assert (again.token_ids, again.text, again.complete.finish) == (done.token_ids, done.text, done.complete.finish)
    assert list(again.logprobs) == plain_logprobs(prompt, done.token_ids, 3)
    assert again.complete.session == first.complete.session
    assert await sessions.read(first.complete.session, "") == record
    rounds = peers.rounds
    request = build_request("on", logprobs=3, **options, **law)
    request.resume.CopyFrom(resume_of(prompt, done.token_ids, 5))
    events = [each async for each in router.generate(request)]
    assert events[-1].HasField("complete") and peers.rounds == rounds, "the client has all: no round is needed"
    with pytest.raises(BadRequest, match="^request_id: .*the parameters are others"):
        await client.generate_text("on", logprobs=3, **options, temperature=0.0)
    peers.hello = replace(HELLO, fingerprint="updated weights")
    with pytest.raises(Conflict, match="^logprobs: the target has changed"):
        await client.generate_text("on", logprobs=3, **options, **law)
    assert (await client.generate_text("on", **options, **law)).token_ids == done.token_ids


async def test_an_earlier_turn_that_is_computed_again_has_no_marks_of_later_ones():
    """A peer refuses a mark past the text."""
    peers = EdgePeers()
    client = LocalClient(ingress(peers, MemorySessions()))
    options: Any = {"max_new_tokens": 4, "request_id": "A", "logprobs": 0}
    first = await client.generate_text(PROMPT, keep_session=True, **options)
    session = first.complete.session
    second = await client.generate_text("on", session=session, max_new_tokens=4)
    again = await client.generate_text(PROMPT, session=session, **options)
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    assert peers.texts[-1].marks == () and peers.texts[1].marks == (len(IDS) + 4,)
    third = await client.generate_text("on", session=session, max_new_tokens=1)
    assert third.started.prompt_tokens == second.started.prompt_tokens + 4 + 2


def verdict_with(logprobs: Sequence[TokenLogprobs]) -> Verdict:
    return Verdict((7, 8), (0, 1), (0,), None, 2, logprobs=tuple(logprobs))


PAIR = (TokenLogprobs(-0.5, ((7, -0.5), (9, -1.5))), TokenLogprobs(-2.25, ((9, -0.125), (0, -1.0))))


@pytest.mark.parametrize(
    ("asked", "logprobs"),
    [
        (None, PAIR),  # none were asked for
        (2, ()),
        (1, PAIR),
        (3, PAIR),
        (2, (PAIR[0], TokenLogprobs(-1.0))),
        (2, (PAIR[0], TokenLogprobs(-1.0, ((7, -1.0), (HELLO.vocabulary, -2.0))))),
    ],
)
def test_a_verdict_without_those_that_were_asked_for_is_the_verifiers_fault(asked, logprobs):
    tree = DraftTree.of([3, 7], [-1, 0])
    text = Text([1, 2, 3], Sampling(), Limits(40), logprobs=2)
    _check_verdict(verdict_with(PAIR), tree, text, HELLO)
    text.logprobs = asked
    with pytest.raises(BadAnswer, match="log-probabilities"):
        _check_verdict(verdict_with(logprobs), tree, text, HELLO)


def test_a_target_of_few_tokens_has_all_of_them_at_each_place():
    tree, hello = DraftTree.of([3, 7], [-1, 0]), replace(HELLO, vocabulary=10)
    _check_verdict(verdict_with(PAIR), tree, Text([1, 2, 3], Sampling(), Limits(40), logprobs=2), hello)
    every = TokenLogprobs(-1.0, tuple((token, -1.0) for token in range(10)))
    text = Text([1, 2, 3], Sampling(), Limits(40), logprobs=12)
    _check_verdict(verdict_with([every, every]), tree, text, hello)


@pytest.mark.parametrize(
    "change",
    [
        {"logprob": math.nan},
        {"logprob": 0.5},
        {"logprob": math.inf},
        {"top_ids": [5]},
        {"top_logprobs": [-1.0] * 21, "top_ids": range(21)},
        {"top_logprobs": [math.nan, -1.0]},
    ],
    ids=str,
)
def test_malformed_ones_of_a_peer_or_a_router_are_refused(change: dict[str, Any]):
    bad: Any = {"logprob": -0.5, "top_ids": [7, 9], "top_logprobs": [-0.5, -1.5]} | change
    message = verifier_answer_message(1, verdict_with(PAIR))
    assert answer_from(message) == verdict_with(PAIR)
    message.verdict.logprobs[1].CopyFrom(calls_pb2.TokenLogprobs(**bad))
    with pytest.raises(BadAnswer, match="logprobs"):
        answer_from(message)
    progress = AnswerProgress(build_request(PROMPT, logprobs=2))
    progress.take(STARTED)
    with pytest.raises(EngineFailed, match="chunk: .*logprobs"):
        progress.take(pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=[7], logprobs=[pb.TokenLogprobs(**bad)])))


@pytest.mark.parametrize(("asked", "entries"), [(None, 1), (2, 0), (2, 1), (2, 3)])
def test_a_chunk_with_another_number_of_them_than_tokens_is_refused_by_the_client(asked, entries: int):
    progress = AnswerProgress(build_request(PROMPT, logprobs=asked))
    progress.take(STARTED)
    chunk = pb.GenerateChunk(token_ids=[7, 8], logprobs=[pb.TokenLogprobs(logprob=-1.0)] * entries)
    with pytest.raises(EngineFailed, match=f"log-probabilities of {entries} tokens"):
        progress.take(pb.GenerateResponse(chunk=chunk))


def test_a_verdict_of_too_many_is_refused_before_they_are_copied():
    message = verifier_answer_message(1, verdict_with(PAIR))
    message.verdict.logprobs.extend([calls_pb2.TokenLogprobs(logprob=-1.0)] * 65)
    with pytest.raises(BadAnswer, match="verdict.logprobs"):
        answer_from(message)


def test_float32_numbers_arrive_unchanged():
    values = (
        -0.0,
        -1.401298464324817e-45,
        -1.1754943508222875e-38,
        -0.10000000149011612,
        -87.33654022216797,
        -math.inf,
    )
    found = verdict_with([TokenLogprobs(value, ((7, value),)) for value in values[:2]])
    for value in values:
        one = replace(found, logprobs=(TokenLogprobs(value), TokenLogprobs(value, ((3, value),))))
        assert repr(answer_from(verifier_answer_message(1, one))) == repr(one)


def test_a_call_that_asks_for_them_arrives_unchanged():
    text = Text([1, 2, 3], Sampling(), Limits(40))
    for asked in (None, 0, 20):
        parameters = RequestParameters(text.sampling, text.limits, "", (), logprobs=asked)
        call = OpenCall(TextUpdate.of(new_opening(), text, 0), parameters)
        assert verifier_call_from(verifier_call_message(1, call)) == call
