"""OpenAI's HTTP API: errors, limits, and clients that leave, do not read, or send anything. Over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from dendro.errors import Conflict, EngineFailed, NotFound, OutOfTime, Overloaded, PeerLost
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.api.callers import Callers
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.api.listening import bind
from cluster.api.openai import app, bodies, serving
from cluster.api.openai import server as http_server
from cluster.api.openai.chat import chat_of
from cluster.api.openai.errors import renamed
from cluster.api.requests import RunningRequests
from cluster.config import Config
from cluster.router.account import RouterTotals
from cluster.router.allowance import KeyLimits
from tests.support.edge import EdgePeers, ingress
from tests.support.edge import config as edge_config
from tests.support.fakes import FakeDrafter, FakeVerifier
from tests.support.http_api import HELLO, accepted_by_loop, client_of, http_at, post, raw, request_of
from tests.support.sockets import until
from tests.support.toy_edge import edge

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"const": "a" * 70_000}}}


class Failing:
    """An ingress whose requests end with an error after `events` events."""

    longest_text = 512

    def __init__(self, error, events=0):
        self.config, self.totals = edge_config(), RouterTotals(edge_config())
        self._error, self._events, self._peers = error, events, ingress(EdgePeers())
        self.tokenizer, self.turns = self._peers.tokenizer, self._peers.turns

    async def generate(self, request, tenant="", allowance=None, traceparent=""):
        left = self._events
        if left:
            async for event in self._peers.generate(request, tenant):
                yield event
                left -= 1
                if not left:
                    break
        raise self._error


@pytest.mark.parametrize(
    "error, status, kind, code, header",
    [
        (NotFound("session: unknown"), 404, "invalid_request_error", "session-unknown", ""),
        (Conflict("session: another came first"), 409, "invalid_request_error", "Conflict", ""),
        (Overloaded("router: full"), 429, "rate_limit_error", "Overloaded", "retry-after"),
        (OutOfTime("request: late"), 504, "server_error", "OutOfTime", "x-should-retry"),
        (PeerLost("verifier: gone"), 503, "server_error", "PeerLost", "retry-after"),
        (EngineFailed("the secret"), 500, "server_error", "EngineFailed", ""),
        (RuntimeError("the secret"), 500, "server_error", "EngineFailed", ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_an_error_has_its_status_reason_and_header_and_no_internals(error, status, kind, code, header, caplog):
    async with http_at(served_ingress=Failing(error)) as (server, _):
        for stream in (False, True):
            found, headers, answer = await post(server, CHAT, {"messages": HELLO, "stream": stream})
            assert found == status and headers["content-type"] == "application/json"
            assert (answer["error"]["type"], answer["error"]["code"]) == (kind, code)
            assert "secret" not in answer["error"]["message"] and headers["x-request-id"]
            assert not header or header in headers
    assert ("secret" in caplog.text) == (status == 500), "it is in the log"


@pytest.mark.parametrize(
    "error, calls", [(OutOfTime("request: late"), 1), (PeerLost("verifier: gone"), 2)], ids=["504", "503"]
)
async def test_openais_client_repeats_a_request_at_once_unless_it_would_take_as_long_again(error, calls):
    failing, made = Failing(error), []
    generate = failing.generate
    failing.generate = lambda *given: made.append(given) or generate(*given)
    async with http_at(served_ingress=failing) as (server, _), client_of(server, max_retries=1) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="demo", messages=HELLO)
    assert len(made) == calls
    assert ("retry-after" in refused.value.response.headers) == (calls > 1)


async def test_an_error_after_the_first_event_of_a_stream_is_its_last_event():
    async with (
        http_at(served_ingress=Failing(PeerLost("verifier: gone"), 3)) as (server, _),
        client_of(server) as client,
    ):
        stream = await client.chat.completions.create(model="demo", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="verifier: gone"):
            async for _part in stream:
                pass


@pytest.mark.parametrize(
    "path, body, param",
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "narrator", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": "a\ud800"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"messages": ["a"]}, "messages[0]"),
        (CHAT, {"messages": HELLO, "max_tokens": 100000}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        (CHAT, {"messages": HELLO, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": HELLO, "temperature": True}, "temperature"),
        (CHAT, {"messages": HELLO, "top_p": 2}, "top_p"),
        (CHAT, {"messages": HELLO, "n": 17}, "n"),
        (CHAT, {"messages": HELLO, "seed": 1 << 64}, "seed"),
        (CHAT, {"messages": HELLO, "stop": ["a", ""]}, "stop[1]"),
        (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logit_bias": {"cat": 1}}, "logit_bias['cat']"),
        (CHAT, {"messages": HELLO, "logit_bias": {"5": 10**400}}, "logit_bias['5']"),
        (CHAT, {"messages": HELLO, "logit_bias": {"5": 1, "05": 2}}, "logit_bias['05']"),
        (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": HELLO, "store": True}, "store"),
        (CHAT, {"messages": HELLO, "functions": []}, "functions"),
        (CHAT, {"messages": HELLO, "no_such": 1}, "no_such"),
        (CHAT, {"messages": HELLO, "echo": True}, "echo"),
        (CHAT, {"messages": HELLO, "dendro": {"no_such": 1}}, "dendro.no_such"),
        (CHAT, {"messages": HELLO, "dendro": {"speculation": {"max_nodes": 0.5}}}, "dendro.speculation.max_nodes"),
        (CHAT, {"messages": HELLO, "dendro": {"speculation": "(9,9"}}, "dendro.speculation.shape"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"messages": HELLO, "structure": {"regex": "a", "choices": ["b"]}}, "structure"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [1, 300]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "messages"),
        ("/tokenize", {"prompt": "a\ud800"}, "prompt"),
        ("/tokenize", {"model": "\ud800"}, "model"),
        ("/detokenize", {"tokens": [5, 300]}, "tokens[1]"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [5, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [5] * 600}, "tokens"),
        (COMPLETIONS, {"prompt": "a", "best_of": True}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "store": 0}, "store"),
        (COMPLETIONS, {"prompt": "a", "stop_ids": [True]}, "stop_ids[0]"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -5}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 1 << 32}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "dendro": {"session": "\ud800"}}, "dendro.session"),
        (CHAT, {"messages": HELLO, "dendro": {"speculation": {"max_nodes": -1}}}, "dendro.speculation.max_nodes"),
        (CHAT, {"messages": HELLO, "response_format": LONG_SCHEMA}, "response_format.json_schema"),
    ],
)
async def test_a_wrong_field_is_refused_by_its_name_in_http(path, body, param):
    async with http_at() as (server, requests):
        status, _, answer = await post(server, path, body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "BadRequest")
        assert answer["error"]["message"].startswith(f"{param}: "), answer
        assert requests.stats()["running"] == 0


def test_parts_of_renamed_fields_keep_their_place():
    names = {"structure": "response_format", "prompt.token_ids": "prompt"}
    assert renamed("structure.json_schema", names) == "response_format.json_schema"
    assert renamed("prompt.token_ids[3]", names) == "prompt[3]"
    assert renamed("stop[1]", names) == "stop[1]" and renamed("[odd", names) == "[odd"


async def test_an_idempotency_key_that_is_no_request_id_is_refused_by_its_header():
    async with http_at() as (server, _):
        for key in ("two words", "x" * 129, "caf\u00e9"):
            status, _, answer = await post(server, CHAT, {"messages": HELLO}, **{"idempotency-key": key})
            assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


async def test_fields_without_effect_are_accepted_and_null_is_as_good_as_absent():
    body = {"messages": HELLO, "max_tokens": 3, "temperature": 0, "user": "me", "metadata": {"a": "b"}, "store": False}
    nulls = {"stop": None, "seed": None, "response_format": None, "tools": None, "functions": None, "no_such": None}
    async with http_at() as (server, _):
        status, _, answer = await post(server, CHAT, {**body, **nulls, "service_tier": "auto", "modalities": ["text"]})
    assert status == 200 and answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_work_within_a_round(stream):
    peers = EdgePeers(0.01)
    async with http_at(peers) as (server, requests):
        body = json.dumps({"messages": HELLO, "max_tokens": 400, "stream": stream}).encode()
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_of(CHAT, body))
        await until(lambda: peers.rounds > 3)
        if stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await until(lambda: requests.stats()["running"] == 0)
        ended = peers.rounds
        async with asyncio.timeout(10):
            await peers.all_closed.wait()
        await asyncio.sleep(5 * peers.pause_s)
        assert peers.rounds <= ended + 1 < 100


@pytest.mark.parametrize("proposed", [{}, {"connection": "Upgrade", "upgrade": "h2c"}], ids=["alone", "upgrade"])
async def test_a_client_that_has_sent_more_requests_and_leaves_ends_its_work_within_a_round(proposed):
    """What it sends after the running request comes in several parts, each of which is kept for later."""
    peers = EdgePeers(0.01)
    async with http_at(peers) as (server, requests):
        asked = request_of(CHAT, json.dumps({"messages": HELLO, "max_tokens": 400}).encode(), **proposed)
        host, _, port = server.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        for part in (asked, asked, asked[:50]):
            writer.write(part)
            seen = peers.rounds
            await until(lambda: peers.rounds > seen + 2)  # noqa: B023
        writer.close()
        await until(lambda: requests.stats()["running"] == 0)
        assert peers.rounds < 100


async def test_an_abort_by_id_ends_the_request_of_its_tenant_alone():
    peers = EdgePeers(0.02)
    async with http_at(peers) as (server, requests), client_of(server) as client:
        create = client.chat.completions.create
        asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 400}
        named = {"Idempotency-Key": "one", "dendro-tenant": "here"}
        blocked = asyncio.create_task(create(**asked, extra_headers=named))
        other = asyncio.create_task(create(**asked, extra_headers=named | {"dendro-tenant": "there"}))
        stream = await create(**asked, stream=True, extra_headers=named | {"Idempotency-Key": "two"})
        await anext(aiter(stream))
        await until(lambda: requests.stats()["running"] == 3)
        abort = {"request_id": "one"}
        assert (await post(server, "/abort", abort))[2] == {"aborted": 0}, "another tenant's"
        assert (await post(server, "/abort", abort, **{"dendro-tenant": "here"}))[2] == {"aborted": 1}
        with pytest.raises(openai.APIStatusError) as ended:
            await blocked
        assert ended.value.status_code == 499 and ended.value.code == "Aborted"
        by_answer = {"request_id": "chatcmpl-two"}
        assert (await post(server, "/abort", by_answer, **{"dendro-tenant": "here"}))[2] == {"aborted": 1}
        with pytest.raises(openai.APIError, match="was aborted by its client"):
            async for _part in stream:
                pass
        assert requests.stats()["running"] == 1
        other.cancel()


def with_little_buffer(*given, bind=bind):
    listening = bind(*given)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listening


@asynccontextmanager
async def unread(server, body):
    """A connection with a small window that has sent a request and never reads."""
    host, _, port = server.address.rpartition(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (host, int(port)))
        await loop.sock_sendall(connection, request_of(COMPLETIONS, json.dumps(body).encode()))
        yield


async def test_a_client_that_does_not_read_is_bounded_and_loses_its_connection_at_the_requests_limit(monkeypatch):
    monkeypatch.setattr(serving, "READ_GRACE_S", 0.2)
    monkeypatch.setattr(serving, "ABORT_S", 0.2)
    monkeypatch.setattr(http_server, "bind", with_little_buffer)
    drafter, verifier = FakeDrafter(), FakeVerifier()
    async with (
        edge(drafter, verifier, router={"request_timeout_s": 3.0}) as (made, _),  # buffers are full long before
        http_at(served_ingress=made) as (server, requests),
        unread(
            server,
            {"prompt": [5, 6, 7], "max_tokens": 1900, "stream": True, "dendro": {"speculation": "off", "trees": True}},
        ),
    ):
        await until(lambda: verifier.held)
        await until(lambda: not verifier.held and not drafter.held)
        assert verifier.calls < 1900, "the work stopped with the client"
        await until(lambda: requests.stats()["running"] == 0, timeout_s=5.0)
        await until(lambda: not server.connections)


async def test_a_stream_without_an_event_sends_comments_and_errors_after_them_as_events(monkeypatch):
    monkeypatch.setattr(serving, "KEEP_ALIVE_S", 0.05)
    waiting = asyncio.Event()

    class Waiting(Failing):
        async def generate(self, request, tenant="", allowance=None, traceparent=""):
            await waiting.wait()
            async for event in super().generate(request, tenant):
                yield event

    async with http_at(served_ingress=Waiting(PeerLost("verifier: gone"))) as (server, _):
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        writer.write(request_of(CHAT, body))
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b": keep-alive\n\n")
            waiting.set()
            event = await reader.readuntil(b"}}\n\n")
        assert b'data: {"error":{"message":"verifier: gone"' in event
        writer.close()


async def test_a_stopped_server_ends_streams_with_an_error_at_which_clients_try_another():
    peers = EdgePeers(0.05)
    async with http_at(peers) as (server, _), client_of(server) as client:
        stream = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=400, stream=True)
        await anext(aiter(stream))
        stopping = asyncio.create_task(server.stop(drain_s=0.1))
        with pytest.raises(openai.APIError, match="router: is stopped"):
            async for _part in stream:
                pass
        async with asyncio.timeout(10):
            await stopping
        with pytest.raises(openai.APIConnectionError):
            await client.models.list()


async def test_a_draining_server_lets_its_answers_end():
    async with http_at(EdgePeers(0.01)) as (server, requests), client_of(server) as client:
        asked = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=40, temperature=0)
        answer = asyncio.create_task(asked)
        await until(lambda: requests.stats()["running"] == 1)
        await server.stop(drain_s=30.0)
        assert (await answer).usage.completion_tokens == 40


async def test_health_follows_the_routers():
    healthy, made = False, ingress(EdgePeers())
    server = await http_server.serve_http(made, RunningRequests(4), Callers(made.config), lambda: healthy)
    try:
        request = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        assert (await raw(server, request, more=True))[0] == 503
        healthy = True
        assert (await raw(server, request, more=True))[0] == 200
    finally:
        await server.stop()


async def test_a_key_decides_the_tenant_and_its_limits_hold(tmp_path):
    text, key = new_key("mine", "acme", KeyLimits(requests_per_minute=3))
    write_keys(tmp_path / "keys.json", ApiKeys(keys=(key,)))
    seen = []

    class Noting(Failing):
        async def generate(self, request, tenant="", allowance=None, traceparent=""):
            seen.append(tenant)
            async for event in super().generate(request, tenant):
                yield event

    made = Noting(PeerLost("verifier: gone"))
    made.config = Config.of({**made.config.model_dump(), "auth": {"keys": "keys.json"}}, tmp_path)
    async with http_at(served_ingress=made) as (server, _):
        for headers in ({}, {"authorization": "Bearer none"}, {"authorization": text}, {"dendro-tenant": "acme"}):
            for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/abort"):
                status, found, answer = await post(server, path, {"messages": HELLO}, **headers)
                assert (status, answer["error"]["code"]) == (401, "Unauthenticated") and found["www-authenticate"]
        status, _, _ = await raw(server, b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", more=True)
        assert status == 401 and not seen
        assert (await raw(server, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", more=True))[0] == 200
        named = {"authorization": f"Bearer {text}"}
        for status in (503, 503, 503, 429):
            found, headers, _ = await post(server, CHAT, {"messages": HELLO}, **named)
            assert found == status
        assert seen == ["acme"] * 3 and int(headers["retry-after"]) >= 1


@asynccontextmanager
async def one_server():
    async with http_at() as (server, _):
        yield server


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort"])
async def test_a_call_without_a_key_is_refused_before_its_body_comes(tmp_path, path):
    write_keys(tmp_path / "keys.json", ApiKeys())
    async with http_at(auth={"keys": tmp_path / "keys.json"}) as (server, _):
        head, _, _ = request_of(path, b"{" + b" " * 1000).partition(b"{")
        status, _, _ = await raw(server, head, more=True)
        assert status == 401


async def test_a_large_body_is_refused_before_it_is_read():
    async with one_server() as server:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        status, headers, _ = await raw(server, f"{head}content-length: {9 << 20}\r\n\r\n".encode(), more=True)
        assert status == 413 and headers["connection"] == "close"
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        chunked = f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunk * 9
        assert (await raw(server, chunked, more=True))[0] == 413


async def test_a_body_that_does_not_come_ends_with_a_status(monkeypatch):
    monkeypatch.setattr(bodies, "BODY_S", 0.1)
    async with one_server() as server:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
        status, headers, _ = await raw(server, head.encode() + b"{", more=True)
        assert status == 408 and headers["connection"] == "close"


async def test_the_bytes_of_all_bodies_that_are_not_complete_are_bounded_and_keep_no_other_tenant_out(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(bodies, "MOST_HELD_BYTES", 64 << 10)
    (greedy, one), (modest, other) = new_key("one", "greedy", KeyLimits()), new_key("two", "modest", KeyLimits())
    write_keys(tmp_path / "keys.json", ApiKeys(keys=(one, other)))

    async def tokens(key: str) -> tuple[int, dict[str, str], Any]:
        return await post(server, "/tokenize", {"prompt": "a" * 5000}, authorization=f"Bearer {key}")

    async with http_at(auth={"keys": tmp_path / "keys.json"}) as (server, _):
        host, _, port = server.address.rpartition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        unfinished = request_of(CHAT, b"{" + b" " * 13_500, authorization=f"Bearer {greedy}")[:-1]
        for _, writer in opened:
            writer.write(unfinished)
            await writer.drain()
        # with the fifth body the tenant would hold 67,500 bytes; four of them leave another what it asks for
        refused = {asyncio.create_task(each.readline()): each for each, _ in opened}
        done, _ = await asyncio.wait(refused, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1 and b" 429 " in done.pop().result()
        status, headers, answer = await tokens(greedy)
        assert (
            status == 429
            and headers["retry-after"]
            and "bytes of requests are being read" in answer["error"]["message"]
        )
        assert (await tokens(modest))[0] == 200
        for task, (_, writer) in zip(refused, opened, strict=True):
            task.cancel()
            writer.close()
        for _ in range(2000):  # until the server has seen that the connections are gone
            if (status := (await tokens(greedy))[0]) == 200:
                break
            await asyncio.sleep(0.01)
        assert status == 200


@pytest.mark.parametrize(
    "body, headers, status",
    [
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-type": "application/x-www-form-urlencoded"}, 415),
        (b"{}", {"content-encoding": "gzip"}, 415),
        (b"{}", {"content-encoding": "Identity"}, 400),
        (b"", {}, 400),
        (b"[]", {}, 400),
        (b"\xff", {}, 400),
        (b'{"temperature": NaN, "prompt": "a"}', {}, 400),
        (b'{"prompt": "a", "temperature": 1e999}', {}, 400),
        (b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}", {}, 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", {}, 400),
        (b'{"a":' + b"[" * 100_000, {}, 400),
        (b'{"prompt": [' + b"[]," * 200_000 + b"1]}", {}, 400),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else None,
)
async def test_a_body_that_is_no_json_object_is_refused(body, headers, status):
    async with one_server() as server:
        found, _, answer = await post(server, COMPLETIONS, body, **headers)
        assert found == status and answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "a", "max_tokens": 2, "max_tokens": 3}', "the key 'max_tokens' occurs twice in an object"),
        (
            b'{"prompt": "a", "dendro": {"speculation": "off", "speculation": "auto"}}',
            "the key 'speculation' occurs twice",
        ),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nests objects and arrays too deeply"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is no number of JSON"),
    ],
    ids=["repeated key", "repeated key inside", "digits", "deep", "NaN"],
)
async def test_json_that_readers_understand_differently_is_refused_without_internals(body, reason):
    async with http_at() as (server, _):
        status, _, answer = await post(server, COMPLETIONS, body)
        assert status == 400 and reason in answer["error"]["message"]
        assert not any(word in answer["error"]["message"] for word in ("sys.", "recursion"))


async def test_headers_are_bounded_also_where_they_come_at_once():
    """A kernel gives up to 256 KiB at a time; h11 bounds only headers that are not whole yet."""
    body = b'{"prompt": "a", "max_tokens": 2}'
    many = {f"x{number}": "" for number in range(4000)}
    async with http_at() as (server, _):
        for headers in ({"x": "a" * (http_server.HEADER_BYTES + http_server.PART_BYTES)}, many):
            status, _, _ = await raw(server, request_of(COMPLETIONS, body, **headers), more=True)
            assert status == 400
        status, _, _ = await post(server, COMPLETIONS, body, x="a" * (http_server.HEADER_BYTES - 1000))
        assert status == 200
        long = json.dumps({"prompt": "a", "max_tokens": 2, "user": "b" * 1_000_000}).encode()
        assert (await post(server, COMPLETIONS, long))[0] == 200


async def test_a_body_whose_end_two_headers_name_is_refused():
    """A proxy before the server may go by the other one, and take the rest for another request."""
    head = request_of(COMPLETIONS, b"", **{"content-length": "5", "transfer-encoding": "chunked"})
    async with http_at() as (server, requests):
        status, _, answer = await raw(
            server, head + b"1d\r\n" + b'{"prompt":"a","max_tokens":2}' + b"\r\n0\r\n\r\n", more=True
        )
        assert status == 400 and json.loads(answer)["error"]["param"] == "content-length"
        assert requests.stats()["requests"] == 0


async def answers_to(server, data: bytes, then: bytes = b"") -> bytes:
    """All that comes until the server ends the connection, which this client does not. then: sent after an answer"""
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    found = b""
    with contextlib.suppress(ConnectionError):  # the server does not read what follows
        async with asyncio.timeout(20):
            writer.write(data)
            while part := await reader.read(65536):
                found += part
                writer.write(then)
                then = b""
    writer.close()
    return found


@pytest.mark.parametrize("line", [b"GET /health", b"POST /none", b"POST /v1/completions"])
async def test_what_follows_a_body_with_two_ends_is_no_request(line):
    """Also where the body is not read, as the answer does not depend on it."""
    ends = b"host: 127.0.0.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    async with one_server() as server:
        found = await answers_to(
            server, line + b" HTTP/1.1\r\n" + ends + b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
        )
    assert found.count(b"HTTP/1.1 ") == 1


CHUNKED = b" HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_the_chunks_of_a_body_are_bounded_also_where_it_is_not_read(caplog):
    """A megabyte of chunks of one byte takes seconds, in which no other request is answered."""
    most = http_server.MOST_CHUNKS
    body = b'{"prompt": "a", "max_tokens": 2}'.ljust(most)
    allowed = b"".join(b"1\r\n%c\r\n" % each for each in body)
    async with one_server() as server:
        status, _, _ = await raw(server, b"POST /v1/completions" + CHUNKED + allowed + b"0\r\n\r\n", more=True)
        assert status == 200
        found = await answers_to(server, b"POST /v1/completions" + CHUNKED + allowed + b"1\r\n \r\n")
        assert not found or found.startswith(b"HTTP/1.1 400")
        found = await answers_to(server, b"HEAD /none" + CHUNKED + b"no chunk\r\n")
        assert not found or (found.startswith(b"HTTP/1.1 400") and found.endswith(b"\r\n\r\n")), "it has no body"
        found = await answers_to(server, b"POST /none" + CHUNKED, allowed + b"1\r\n \r\n")
        assert found.startswith(b"HTTP/1.1 404") and found.count(b"HTTP/1.1 ") == 1
        await until(lambda: not server.connections)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_a_body_does_not_wait_until_its_client_has_acknowledged_the_headers(monkeypatch):
    """Nagle's algorithm would hold it back, for 40 ms where a kept connection's client acknowledges late."""
    accepted = accepted_by_loop(monkeypatch)
    async with http_at() as (server, _), client_of(server) as client:
        await client.models.list()
        (connection,) = accepted
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_five_requests_at_once_on_a_connection_are_answered_in_their_order():
    async with http_at() as (server, _):
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        names = [f"mine-{number}" for number in range(5)]
        for name in names:
            body = b'{"prompt": "a", "max_tokens": 2}'
            writer.write(request_of(COMPLETIONS, body, **{"idempotency-key": name}))
        found = b""
        async with asyncio.timeout(20):
            while found.count(b'"usage"') < 5:
                found += await reader.read(65536)
        writer.close()
        places = [found.index(f"x-request-id: {name}".encode()) for name in names]
        assert found.count(b"HTTP/1.1 200") == 5 and places == sorted(places)


async def test_a_proposal_of_another_protocol_is_declined_without_a_warning(caplog):
    """HTTP clients of Java, and curl with --http2, propose HTTP/2 in each request."""
    asked = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
    async with http_at() as (server, _):
        status, _, answer = await post(server, COMPLETIONS, {"prompt": "a", "max_tokens": 2}, **asked)
    assert status == 200 and answer["usage"]["completion_tokens"] == 2
    assert not caplog.records


async def test_the_values_of_a_long_body_are_counted_before_it_is_parsed():
    async with one_server() as server:
        status, _, body = await raw(
            server, request_of(COMPLETIONS, b'{"prompt": [' + b"[]," * 200_000 + b"1]}"), more=True
        )
        assert status == 400 and b"the body has 400002 values; at most" in body


async def test_the_search_for_strings_in_a_long_body_passes_once_over_one_that_does_not_end():
    """Else the search would begin again at each quote, for a time in proportion to the square of the body's bytes, and
    the commas behind the quotes would count as values."""
    async with one_server() as server:
        status, _, answer = await post(server, COMPLETIONS, b'{"prompt": "' + b'\\"' * 100 + b"," * 500_000)
        assert status == 400 and "Unterminated string" in answer["error"]["message"]


async def test_a_long_conversation_is_read_beside_the_event_loop_also_to_be_tokenized(monkeypatch):
    """Its messages are made one by one: on the loop, no other request would go on meanwhile."""
    threads = []
    monkeypatch.setattr(app, "chat_of", lambda fields: threads.append(threading.current_thread()) or chat_of(fields))
    async with one_server() as server:
        status, _, answer = await post(server, "/tokenize", {"messages": HELLO * 5000})
        assert status == 400 and answer["error"]["param"] == "messages"
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


async def test_a_prompt_of_as_many_commas_as_bytes_is_no_large_structure():
    async with one_server() as server:
        found, _, answer = await post(server, "/tokenize", {"prompt": ",[{" * 100_000})
        assert (found, answer["count"]) == (200, 300_000)


@pytest.mark.parametrize(
    "request_, status",
    [
        (b"GET /none", 404),
        (b"GET /v1/completions", 405),
        (b"POST /health", 405),
        (b"GET /metrics", 404),
        (b"GET /health/", 404),
        (b"POST /v1/chat/completions/", 404),
    ],
)
async def test_another_path_or_method_is_refused_in_openais_shape(request_, status):
    async with one_server() as server:
        found, _, body = await raw(server, request_ + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", more=True)
        assert found == status and json.loads(body)["error"]["type"] == "invalid_request_error"


NAMES = (
    "messages",
    "prompt",
    "model",
    "n",
    "stop",
    "seed",
    "stream",
    "stream_options",
    "dendro",
    "logit_bias",
    "tools",
)
MORE = ("response_format", "structure", "temperature", "max_tokens", "logprobs", "top_logprobs", "bad_words", "echo")
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["user", "text", "a"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "session", "speculation", "regex", "include_usage"])
            | st.text(max_size=8),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from([*NAMES, *MORE]) | st.text(max_size=8), VALUES, max_size=6)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=9)}), max_size=2)


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(BODIES, MESSAGES), min_size=20, max_size=20))
def test_any_json_gets_a_status_that_is_no_fault_of_the_servers(cases):
    async def ask():
        async with one_server() as server:
            for body, messages in cases:
                for data in (body, {"max_tokens": 2, **body, "messages": messages}):
                    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/abort"):
                        status, _, _ = await post(server, path, json.dumps(data).encode())
                        assert status in (200, 400, 404), (path, data)

    asyncio.run(ask())


HEADS = [
    b"",
    b"POST /v1/completions HTTP/1.1\r\n",
    b"GET /health HTTP/1.1\r\n",
    b"POST /abort HTTP/1.1\r\nhost: 127.0.0.1\r\n",
]


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(HEADS), st.binary(max_size=200)), min_size=20, max_size=20))
def test_any_bytes_end_with_a_status_or_the_end_of_the_connection(cases):
    async def ask():
        async with one_server() as server:
            host, _, port = server.address.rpartition(":")
            for head, data in cases:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head + data)
                writer.write_eof()
                async with asyncio.timeout(10):
                    answer = await reader.read()
                writer.close()
                assert not answer or (answer.startswith(b"HTTP/1.1 ") and not answer.startswith(b"HTTP/1.1 5"))
            assert (await raw(server, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", more=True))[0] == 200

    asyncio.run(ask())
