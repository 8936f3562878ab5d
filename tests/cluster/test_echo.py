"""The prompt in an answer's stream: its tokens, text and log-probabilities, in sessions and after a broken stream."""

from __future__ import annotations

import asyncio
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from dendro.answer import Completion, EchoedPrompt, Round, build_request
from dendro.calls import Opened
from dendro.errors import BadAnswer, BadRequest, EngineFailed
from dendro.internal.v1 import calls_pb2
from dendro.logprobs import EchoedLogprobs, TokenLogprobs
from dendro.progress import AnswerProgress
from dendro.text import Finish, Limits, Sampling, Text
from dendro.v1 import generation_pb2 as pb
from dendro.wire import answer_from, verifier_answer_message

from cluster.api.local import LocalClient
from cluster.config import Config
from cluster.router import echo as echo_module
from cluster.running import local_ingress
from cluster.sessions import MemorySessions
from tests.support import tiny_models
from tests.support.edge import EdgePeers, ingress, plain_answer, plain_logprobs, resume_of

PROMPT = "walk the σ tree "
IDS = list(PROMPT.encode())


def echo_of(done: Completion) -> tuple[list[int], str, list[TokenLogprobs | None]]:
    tokens = [token for part in done.prompt for token in part.token_ids]
    return tokens, "".join(part.text for part in done.prompt), [each for part in done.prompt for each in part.logprobs]


@pytest.mark.parametrize("part", [1, 3, 9, 512])
async def test_it_comes_before_the_answer_and_the_first_token_of_a_text_has_none(
    part: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(echo_module, "ECHO_PART", part)
    peers = EdgePeers()
    client = LocalClient(ingress(peers))
    events = [event async for event in client.generate(PROMPT, echo=True, logprobs=2, max_new_tokens=5)]
    kinds = [type(event) for event in events]
    assert kinds.index(Round) > max(at for at, kind in enumerate(kinds) if kind is EchoedPrompt) > 0
    done = await client.generate_text(PROMPT, echo=True, logprobs=2, max_new_tokens=5)
    assert echo_of(done) == (IDS, PROMPT, [None, *plain_logprobs(IDS[:1], IDS[1:], 2)])
    assert peers.echoed == [1, 1] and list(done.logprobs) == plain_logprobs(IDS, done.token_ids, 2)
    without = await client.generate_text(PROMPT, echo=True, max_new_tokens=5)
    assert echo_of(without) == (IDS, PROMPT, []) and len(peers.echoed) == 2
    assert (await client.generate_text(PROMPT, logprobs=2, max_new_tokens=5)).prompt == ()


@pytest.mark.parametrize("speculation", ["auto", "off", "(2,1)"])
async def test_a_prompt_is_scored_alone_where_no_token_is_asked_for(speculation: str):
    peers = EdgePeers()
    client = LocalClient(ingress(peers))
    done = await client.generate_text(PROMPT, echo=True, logprobs=2, max_new_tokens=0, speculation=speculation)
    assert echo_of(done) == (IDS, PROMPT, [None, *plain_logprobs(IDS[:1], IDS[1:], 2)])
    assert (done.token_ids, done.text, done.complete.finish) == ((), "", Finish.LENGTH)
    assert peers.rounds == 0 and not done.complete.speculation.contradictions and peers.all_closed.is_set()
    several = await client.generate_samples(PROMPT, echo=True, max_new_tokens=0, n=3, temperature=1.0)
    assert [each.token_ids for each in several] == [()] * 3 and peers.rounds == 0


@pytest.mark.parametrize("options", [{}, {"echo": True, "keep_session": True}, {"echo": True, "min_new_tokens": 1}])
async def test_an_answer_without_tokens_is_refused_where_it_has_no_use(options: dict[str, Any]):
    field = "min_new_tokens" if "min_new_tokens" in options else "max_new_tokens"
    with pytest.raises(BadRequest, match=f"^{field}: is "):
        await LocalClient(ingress(EdgePeers(), MemorySessions())).generate_text(PROMPT, max_new_tokens=0, **options)


async def test_a_turn_of_a_session_echoes_its_own_prompt_given_the_text_before_it():
    peers, sessions = EdgePeers(), MemorySessions()
    client = LocalClient(ingress(peers, sessions))
    first = await client.generate_text(PROMPT, max_new_tokens=4, keep_session=True)
    before = [*IDS, *first.token_ids]
    options: Any = {"session": first.complete.session, "echo": True, "max_new_tokens": 6, "request_id": "A"}
    done = await client.generate_text(" and", logprobs=1, **options)
    assert echo_of(done) == (list(b" and"), " and", plain_logprobs(before, list(b" and"), 1))
    assert done.prompt[0].offset == len(before) and peers.echoed == [len(before)]
    again = await client.generate_text(" and", logprobs=1, **options)  # computed again
    assert (again.prompt, again.logprobs) == (done.prompt, done.logprobs)
    written = await client.generate_text(" and", **options)  # from the record
    assert echo_of(written) == (list(b" and"), " and", []) and written.complete.speculation.rounds == 0


async def test_a_resumed_answer_echoes_only_where_the_client_has_no_token():
    for held in (0, 3):
        request = build_request(PROMPT, echo=True, logprobs=1, max_new_tokens=6)
        request.resume.CopyFrom(resume_of(IDS, plain_answer(IDS, Sampling(), held)))
        events = [each.WhichOneof("event") async for each in ingress(EdgePeers()).generate(request)]
        assert ("prompt" in events) == (not held)


def part_of(offset: int, tokens: int, logprobs: int) -> pb.GenerateResponse:
    entries = [pb.TokenLogprobs(logprob=-1.0)] * logprobs
    return pb.GenerateResponse(
        prompt=pb.GeneratePrompt(offset=offset, token_ids=[7] * tokens, text="x", logprobs=entries)
    )


def test_the_client_takes_each_part_once_and_refuses_what_does_not_follow():
    progress = AnswerProgress(build_request(PROMPT, echo=True, logprobs=0))
    other = AnswerProgress(build_request(PROMPT))
    for each in (progress, other):
        each.take(pb.GenerateResponse(started=pb.GenerateStarted()))
    first = progress.take(part_of(0, 3, 2))
    assert isinstance(first, EchoedPrompt) and first.logprobs[0] is None and len(first.logprobs) == 3
    assert progress.take(part_of(0, 3, 2)) is None, "a resumed stream repeats it"
    assert isinstance(progress.take(part_of(3, 2, 2)), EchoedPrompt)
    for wrong in (part_of(6, 1, 1), part_of(5, 2, 1), part_of(5, 0, 0)):
        with pytest.raises(EngineFailed, match="prompt at offset|log-probabilities of"):
            progress.take(wrong)
    with pytest.raises(EngineFailed, match="was not expected"):
        other.take(part_of(0, 3, 0))


async def test_with_several_answers_it_comes_once():
    peers = EdgePeers()
    done = await LocalClient(ingress(peers)).generate_samples(PROMPT, n=3, echo=True, logprobs=1, max_new_tokens=4)
    assert [echo_of(each)[0] for each in done] == [IDS, [], []] and peers.echoed == [1]


async def test_a_prompt_with_too_many_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dendro.logprobs.MAX_ECHOED", 60)
    with pytest.raises(BadRequest, match=f"^echo: has {len(IDS)} tokens with 21 log-probabilities each; at most 60"):
        await LocalClient(ingress(EdgePeers())).generate_text(PROMPT, echo=True, logprobs=20)


def test_an_opening_with_them_arrives_unchanged_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch):
    each = TokenLogprobs(-0.5, ((7, -0.5),)), TokenLogprobs(-math.inf, ((70_000, -0.25),))
    opened = Opened(1, 2, 3, EchoedLogprobs.of(each))
    message = verifier_answer_message(1, opened)
    assert answer_from(message) == opened and tuple(answer_from(message).logprobs) == each
    monkeypatch.setattr("dendro.logprobs.MAX_ECHOED", 1)
    with pytest.raises(BadAnswer, match="echoed: has 24 bytes, which are no numbers of at most 1"):
        answer_from(message)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": b"\0" * 7},
        {"logprobs": struct.pack("<2f", -1.0, math.nan)},
        {"logprobs": struct.pack("<2f", -1.0, 0.5)},
        {"top_logprobs": struct.pack("<2f", -1.0, math.inf)},
        {"top": 2},
        {"top": 0},
        {"top": 21, "top_ids": b"\0" * 168, "top_logprobs": b"\0" * 168},
        {"top_ids": b""},
    ],
)
def test_malformed_ones_are_refused(wrong: dict[str, Any]):
    given = {"logprobs": b"\0" * 8, "top": 1, "top_ids": b"\0" * 8, "top_logprobs": b"\0" * 8}
    message = verifier_answer_message(1, Opened(1, 2, 3))
    message.opened.echoed.CopyFrom(calls_pb2.EchoedLogprobs(**given))
    assert len(answer_from(message).logprobs) == 2
    message.opened.echoed.CopyFrom(calls_pb2.EchoedLogprobs(**given | wrong))
    with pytest.raises(BadAnswer, match="echoed: |logprobs: "):
        answer_from(message)


def test_they_must_be_what_was_asked_for():
    two = EchoedLogprobs.of([TokenLogprobs(-0.5, ((7, -0.5),)), TokenLogprobs(-2.0, ((9, -0.25),))])
    assert two.fit(2, 1, 10) and EchoedLogprobs.of([]).fit(0, 3, 10) and EchoedLogprobs.of([]).fit(0, None, 10)
    assert not (two.fit(2, 1, 9) or two.fit(2, 2, 10) or two.fit(3, 1, 10) or two.fit(2, None, 10))
    assert (two[1], list(two[1:])) == (TokenLogprobs(-2.0, ((9, -0.25),)), [two[1]])


@pytest.mark.parametrize(("top", "hops"), [(0, 0), (20, 4)])
async def test_parts_are_made_when_they_are_sent_and_large_ones_off_the_loop(
    top: int, hops: int, monkeypatch: pytest.MonkeyPatch
):
    """So the loop never has more than a part's work at once."""
    monkeypatch.setattr(echo_module, "ECHO_PART", 64)
    monkeypatch.setattr("dendro.tasks.LONG", 1000)
    threads, in_thread = [], asyncio.to_thread

    async def to_thread(work: Any) -> Any:
        threads.append(work)
        return await in_thread(work)

    monkeypatch.setattr("dendro.tasks.asyncio.to_thread", to_thread)
    prompt = [at % 250 for at in range(200)]
    events = ingress(EdgePeers()).generate(build_request(prompt, echo=True, logprobs=top, max_new_tokens=2))
    parts = [event async for event in events if event.HasField("prompt")]
    assert [len(part.prompt.token_ids) for part in parts] == [64, 64, 64, 8]
    made = [work for work in threads if getattr(work, "func", None) is echo_module._part]
    assert len(made) == hops


def test_a_text_asks_for_them_by_position():
    text = Text([1, 2, 3], Sampling(), Limits(40), logprobs=2, echo_from=1)
    assert (text.logprobs, text.echo_from) == (2, 1)


@pytest.mark.slow
async def test_they_do_not_depend_on_what_the_cluster_has_kept_of_the_prompt(tmp_path: Path):
    tiny_models.make_checkpoint(tmp_path)
    model = {"checkpoint": str(tmp_path), "dtype": "float32"}
    config = Config.of({"targets": {"target": model | {"max_length": 512}}, "drafters": {"drafter": model}}, tmp_path)
    prompt = [(7 * at * at + 3 * at) % 250 for at in range(300)]
    options: Any = {"max_new_tokens": 12, "ignore_end": True, "logprobs": 2, "echo": True}
    async with local_ingress(config) as router:
        client = LocalClient(router)
        fresh = await client.generate_text(prompt, speculation="off", **options)
        again = await client.generate_text(prompt, speculation="(2,1)", **options)
        assert (again.prompt, again.token_ids, again.logprobs) == (fresh.prompt, fresh.token_ids, fresh.logprobs)
        assert len(echo_of(fresh)[2]) == 300 and echo_of(fresh)[2][0] is None
        scored = await client.generate_text(prompt, **(options | {"max_new_tokens": 0}))
        assert (scored.prompt, scored.token_ids) == (fresh.prompt, ())
        first = await client.generate_text(prompt[:200], keep_session=True, max_new_tokens=1, seed=1)
        turn = await client.generate_text([5, 6, 7], session=first.complete.session, speculation="off", **options)
        whole = await client.generate_text([*prompt[:200], *first.token_ids, 5, 6, 7], speculation="off", **options)
        assert echo_of(turn)[2] == echo_of(whole)[2][-3:] and turn.logprobs == whole.logprobs
        assert turn.complete.target is not None and turn.complete.target.restored_tokens == 192
