"""OpenAI's HTTP API: chat and completions, over real sockets, by OpenAI's own clients."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from dendro.errors import PeerLost
from dendro.text import Sampling

from cluster.api.local import LocalClient
from cluster.router.ingress import Ingress
from cluster.sessions import MemorySessions
from tests.support.edge import END, HELLO, MAX_LENGTH, SERVED, ByteTokenizer, EdgePeers, ingress, plain_answer
from tests.support.edge import config as edge_config
from tests.support.http_api import HELLO as MESSAGES
from tests.support.http_api import HELLO_TEXT, client_of, http_at

PROMPT = [*b"[user]hello", END, *b"[assistant]"]
KEPT: dict[str, Any] = {"dendro": {"keep_session": True}}
OFF: dict[str, Any] = {"dendro": {"speculation": "off"}}


def text_of(tokens):
    return bytes(tokens).decode(errors="replace")


@asynccontextmanager
async def calling(peers=None, **sections):
    async with http_at(peers, **sections) as (server, _), client_of(server) as client:
        yield client


async def test_a_chats_answer_is_the_one_that_grpc_gives_for_the_same_seed():
    made = ingress(EdgePeers())
    async with http_at(served_ingress=made) as (server, _), client_of(server) as client:
        answer = await client.chat.completions.create(
            model="demo", messages=MESSAGES, max_completion_tokens=40, temperature=0.7, seed=11
        )
        ours = await LocalClient(made).generate_text(PROMPT, max_new_tokens=40, temperature=0.7, seed=11)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == ours.text == text_of(plain_answer(PROMPT, Sampling(0.7, seed=11), 40))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 40)
    assert answer.usage.total_tokens == len(PROMPT) + 40
    assert answer.model == "demo" and answer.system_fingerprint == HELLO.target and answer.object == "chat.completion"


@pytest.mark.parametrize("speculation", ["off", "(2,1)"])
async def test_a_stream_has_the_same_text_in_parts_and_its_usage_last(speculation):
    async with calling() as client:
        stream = await client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"dendro": {"speculation": speculation}},
        )
        parts = [part async for part in stream]
    *texts, ended, last = parts
    assert texts[0].choices[0].delta.role == "assistant" and len(texts) > 10
    whole = "".join(part.choices[0].delta.content for part in texts)
    assert whole == text_of(plain_answer(PROMPT, Sampling(), 40))
    assert ended.choices[0].finish_reason == "length" and ended.choices[0].delta.content is None
    assert last.choices == [] and last.usage.completion_tokens == 40 and ended.usage is None
    assert len({part.id for part in parts}) == 1 and parts[0].id.startswith("chatcmpl-")
    stats = ended.model_extra["dendro"]["choices"][0]["speculation"]
    assert stats["emitted_tokens"] == 40 and (stats["accepted_tokens"] > 0) == (speculation != "off")


async def test_the_blocking_client_gets_the_same_answers():
    async with http_at() as (server, _):

        def ask():
            with openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="none", max_retries=0) as client:
                create: Any = client.chat.completions.create
                asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
                whole = create(**asked).choices[0].message.content
                parts = [part.choices[0].delta.content or "" for part in create(**asked, stream=True)]
                return whole, "".join(parts), [each.id for each in client.models.list()]

        whole, parts, models = await asyncio.to_thread(ask)
    assert whole == parts == text_of(plain_answer(PROMPT, Sampling(), 30)) and models == ["demo"]


@pytest.mark.parametrize("prompt", ["walk the ", list(b"walk the "), [list(b"walk the ")], ["walk the "]])
async def test_a_completion_continues_a_text_or_its_ids(prompt):
    async with calling() as client:
        answer = await client.completions.create(model="demo", prompt=prompt, max_tokens=20, temperature=0)
        stream = await client.completions.create(model="demo", prompt=prompt, max_tokens=20, temperature=0, stream=True)
        parts = [part.choices[0].text async for part in stream]
    text = text_of(plain_answer(list(b"walk the "), Sampling(), 20))
    assert answer.choices[0].text == "".join(parts) == text and answer.object == "text_completion"


async def test_the_content_may_be_parts_of_text_and_the_role_developer_is_known():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    async with calling() as client:
        answer = await client.chat.completions.create(model="demo", messages=messages, max_tokens=5, temperature=0)
    prompt = [*b"[developer]be brief", END, *b"[user]one\ntwo", END, *b"[assistant]"]
    assert answer.choices[0].message.content == text_of(plain_answer(prompt, Sampling(), 5))


async def test_a_clients_own_answer_can_be_sent_back():
    async with calling() as client:
        first = await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=5)
        messages = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "and?"}]
        second = await client.chat.completions.create(model="demo", messages=messages, max_tokens=5)
    sent = [*PROMPT, *first.choices[0].message.content.encode(), END, *b"[user]and?", END, *b"[assistant]"]
    assert second.usage.prompt_tokens == len(sent)


async def test_an_answer_to_which_litellms_proxy_added_its_fields_can_be_sent_back():
    async with calling() as client:
        first = await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=5)
        passed_on = first.choices[0].message.model_dump() | {"provider_specific_fields": {"refusal": None}}
        messages = [*MESSAGES, passed_on, {"role": "user", "content": "and?"}]
        second = await client.chat.completions.create(model="demo", messages=messages, max_tokens=5)
    sent = [*PROMPT, *first.choices[0].message.content.encode(), END, *b"[user]and?", END, *b"[assistant]"]
    assert second.usage.prompt_tokens == len(sent)


async def test_a_session_goes_on_with_the_new_messages_and_a_repeated_turn_is_written_once():
    peers, sessions = EdgePeers(), MemorySessions()
    made = ingress(peers, sessions)
    async with http_at(served_ingress=made) as (server, _), client_of(server) as client:
        create = client.chat.completions.create
        first = await create(
            model="demo", messages=MESSAGES, max_tokens=8, seed=3, extra_body={"dendro": {"keep_session": True}}
        )
        session = first.model_extra["dendro"]["choices"][0]["session"]
        assert session
        asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "and?"}], "max_tokens": 8}
        headers, body = {"Idempotency-Key": "turn-2"}, {"dendro": {"session": session}}
        second = await create(**asked, extra_headers=headers, extra_body=body)
        rounds = peers.rounds
        again = await create(**asked, extra_headers=headers, extra_body=body)
        assert peers.rounds == rounds, "answered from the record"
        assert again.choices[0].message.content == second.choices[0].message.content
        assert again.id == second.id == "chatcmpl-turn-2"
        record = await sessions.read(session, "")
        assert (
            len(record.tokens)
            == second.usage.total_tokens
            == first.usage.total_tokens + 8 + len("<end>[user]and?<end>[assistant]")
        )
        assert first.model_extra["dendro"]["seed"] == second.model_extra["dendro"]["seed"] == 3


class UnansweredSessions(MemorySessions):
    """A store that makes the next write, and answers neither it nor the read that follows."""

    silent = 0

    async def read(self, token, tenant):
        if self.silent == 1:
            self.silent = 0
            raise PeerLost("session: the store does not answer")
        return await super().read(token, tenant)

    async def write(self, token, tenant, record):
        await super().write(token, tenant, record)
        if self.silent == 2:
            self.silent = 1
            raise PeerLost("session: the store does not answer")


@pytest.mark.parametrize("key", ["", "turn-2"], ids=["without a key", "with a key"])
async def test_openais_client_does_not_write_a_turn_twice_by_itself(key):
    sessions = UnansweredSessions()
    made = ingress(EdgePeers(), sessions)
    async with http_at(served_ingress=made) as (server, _), client_of(server, max_retries=2) as client:
        create = client.chat.completions.create
        first = await create(model="demo", messages=MESSAGES, max_tokens=4, extra_body=KEPT)
        session = first.model_extra["dendro"]["choices"][0]["session"]
        sessions.silent = 2
        headers, body = {"Idempotency-Key": key} if key else {}, {"dendro": {"session": session}}
        turn = create(model="demo", messages=MESSAGES, max_tokens=4, extra_headers=headers, extra_body=body)
        if key:
            assert (await turn).id == f"chatcmpl-{key}"
        else:
            with pytest.raises(openai.InternalServerError, match="the store does not answer"):
                await turn
    assert not sessions.silent and (await sessions.read(session, "")).version == 2


async def test_of_two_turns_at_once_openais_client_repeats_none_after_the_other():
    peers, sessions = EdgePeers(), MemorySessions()
    made = ingress(peers, sessions)
    async with http_at(served_ingress=made) as (server, _), client_of(server, max_retries=2) as client:
        create = client.chat.completions.create
        first = await create(model="demo", messages=MESSAGES, max_tokens=4, extra_body=KEPT)
        session = first.model_extra["dendro"]["choices"][0]["session"]
        peers.pause_s = 0.02
        asked = {"model": "demo", "messages": MESSAGES, "max_tokens": 4, "extra_body": {"dendro": {"session": session}}}
        turns = await asyncio.gather(create(**asked), create(**asked), return_exceptions=True)
    assert sorted(type(turn).__name__ for turn in turns) == ["ChatCompletion", "ConflictError"]
    assert (await sessions.read(session, "")).version == 2


class NumberedTokenizer(ByteTokenizer):
    """The same ids, whose texts are their numbers."""

    def token_bytes(self) -> dict[int, bytes]:
        return {token: b"<%d>" % token for token in range(256)}


async def test_a_session_that_is_continued_without_a_model_has_the_texts_of_its_targets_tokens():
    target = {"checkpoint": "target", "max_length": MAX_LENGTH, "max_depth": 8}
    second = dataclasses.replace(SERVED["demo"], name="second", tokenizer=NumberedTokenizer())
    two = edge_config(targets={"demo": target, "second": target})
    made = Ingress(two, EdgePeers(), MemorySessions(), SERVED | {"second": second})
    async with http_at(served_ingress=made) as (server, _), client_of(server) as client:
        asked: dict[str, Any] = {"messages": MESSAGES, "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 1}
        first = await client.chat.completions.create(model="second", extra_body=KEPT, **asked)
        session = {"dendro": {"session": first.dendro["choices"][0]["session"]}}
        for model in ("", "second"):
            answer = await client.chat.completions.create(model=model, extra_body=session, **asked)
            assert answer.model == "second"
            assert all(each.token.startswith("<") for each in answer.choices[0].logprobs.content)
        unknown = {"dendro": {"session": session["dendro"]["session"] + "x"}}
        with pytest.raises(openai.NotFoundError, match="session: there is no such session"):
            await client.chat.completions.create(model="", extra_body=unknown, **asked)


async def test_tokenize_and_detokenize_are_those_of_the_prompt():
    async with http_at() as (server, _), client_of(server) as client:
        client = client.with_options(base_url=f"http://{server.address}")
        chat: Any = await client.post("/tokenize", body={"messages": MESSAGES}, cast_to=object)
        assert chat["tokens"] == PROMPT and chat["count"] == len(PROMPT)
        text: Any = await client.post("/tokenize", body={"prompt": "hi"}, cast_to=object)
        assert text["tokens"] == [*b"hi"]
        shown = {"tokens": PROMPT, "show_special_tokens": True}
        back: Any = await client.post("/detokenize", body=shown, cast_to=object)
        assert back["prompt"] == HELLO_TEXT


async def test_the_models_are_listed_and_found_by_name():
    async with calling() as client:
        (listed,) = [model async for model in client.models.list()]
        assert (await client.models.retrieve("demo")).id == listed.id == "demo"
        assert listed.model_extra["max_model_len"] == 512
        with pytest.raises(openai.NotFoundError, match="'other' is not served here; there is demo"):
            await client.models.retrieve("other")
        with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
            await client.completions.create(model="other", prompt="a")


async def test_a_model_is_listed_with_the_same_time_at_each_call():
    async with calling() as client:
        (listed,) = [model async for model in client.models.list()]
        assert listed.created == (await client.models.retrieve("demo")).created == 0


async def test_a_request_of_grpc_and_one_of_http_share_the_routers_places():
    peers = EdgePeers()
    peers.pause_s = 0.02
    async with http_at(peers, router={"max_requests": 1}) as (server, requests), client_of(server) as client:
        with requests.run("", "grpc's", 1), pytest.raises(openai.RateLimitError, match="1 answers run here") as full:
            await asyncio.create_task(client.completions.create(model="demo", prompt="a"))
        assert full.value.response.headers["retry-after"] == "1"
        assert requests.stats()["refused"] == 1
