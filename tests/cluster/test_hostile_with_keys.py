"""Both public APIs of a router that needs keys, with drawn keys and drawn requests: always a status, without a valid
key that of a missing key alone, with one never a fault of the server's; and the router serves on."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from dendro.client import AsyncClient
from dendro.v1 import generation_pb2 as pb
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cluster.api.callers import Callers
from cluster.api.grpc import serve_router
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.api.openai.server import serve_http
from cluster.router.allowance import KeyLimits
from tests.cluster.test_hostile_requests import requests
from tests.cluster.test_http_edges import BODIES, MESSAGES
from tests.support.edge import EdgePeers, config, ingress
from tests.support.http_api import post, raw
from tests.support.sockets import until

SERVICE = "/dendro.v1.GenerationService/"
METHODS = ("Generate", "GetServerInfo", "Tokenize", "Detokenize", "Abort", "Explain")
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/abort")
CASES, MOST_BYTES = 6, 1000
FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK)
VALID, CUT = "VALID", "CUT"
"""Stand for the key that the file has, and for that key without its last character."""
KEYS = st.sampled_from(
    ["", "Bearer", "Bearer ", f"Basic {VALID}", VALID, f"Bearer {VALID}x", f"Bearer {CUT}", "Bearer dendro-"]
) | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=80).map(lambda text: f"Bearer {text}")
"""Values of `authorization` that are no valid key's."""
BYTES = st.binary(max_size=120) | requests.map(lambda request: request.SerializeToString()[:MOST_BYTES])
MESSAGES_OF = st.sampled_from(
    [
        pb.TokenizeRequest(text="walk"),
        pb.DetokenizeRequest(token_ids=[1, 2**32 - 1]),
        pb.AbortRequest(request_id="\0"),
        pb.ExplainRequest(request_id="a" * 500),
    ]
).map(lambda message: message.SerializeToString())


@asynccontextmanager
async def both(folder):
    """Yields the servers of gRPC and HTTP of one router, its peers and a valid value of `authorization`."""
    text, key = new_key("alice", "alice", KeyLimits())
    write_keys(folder / "keys.json", ApiKeys(keys=(key,)))
    auth, peers = {"keys": folder / "keys.json"}, EdgePeers()
    made, callers = ingress(peers, auth=auth), Callers(config(auth=auth))
    server = await serve_router(made, callers=callers)
    http = await serve_http(made, server.requests, callers)
    try:
        yield server, http, text
    finally:
        await http.stop()
        await server.stop()


@pytest.fixture
def faults(caplog):
    """Gives what was logged as a fault of the router's or of its event loop.

    gRPC has one poller for all event loops of a process. It raises when an event of an example's loop, which is closed
    by now, reaches the loop of the next example; that is a fault of the test's many loops, and a router has one.
    """
    caplog.set_level(logging.ERROR, "dendro")
    poller = "PollerCompletionQueue._handle_events"

    def logged():
        return [each for each in caplog.records if each.name != "asyncio" or poller not in each.getMessage()]

    return logged


def invalid(drawn: str, key: str) -> dict[str, str]:
    """The drawn value of `authorization`, where there is one."""
    return {"authorization": drawn.replace(VALID, key).replace(CUT, key[:-1])} if drawn else {}


async def ended(channel: Any, method: str, metadata: Any, message: bytes | None) -> grpc.StatusCode:
    """The status of a call of raw bytes. message: None: the client sends none"""

    async def nothing():
        return
        yield

    if message is None:
        call = channel.stream_stream(SERVICE + method)(nothing(), metadata=metadata)
    else:
        call = channel.unary_stream(SERVICE + method)(message, metadata=metadata)
    async with asyncio.timeout(30):
        async for _ in call:
            pass
        return await call.code()


async def status_of_call(*given: Any) -> grpc.StatusCode:
    try:
        return await ended(*given)
    except grpc.aio.AioRpcError as error:
        return error.code()


def few(**drawn):
    """A few examples of many cases each, since each example starts a router."""
    strategy = st.lists(st.fixed_dictionaries(drawn), min_size=CASES, max_size=CASES)
    quiet = settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),  # a failure need not become small
    )
    return lambda test: quiet(given(cases=strategy)(test))


@few(method=st.sampled_from([*METHODS, "None", ""]), key=KEYS, data=st.none() | BYTES | MESSAGES_OF)
def test_any_call_of_grpc_has_a_status_and_without_a_valid_key_no_other_than_that(cases, tmp_path, faults):
    async def ask():
        async with both(tmp_path) as (server, _, key), grpc.aio.insecure_channel(server.address) as channel:
            for case in cases:
                metadata = tuple(invalid(case["key"], key).items())
                given = channel, case["method"], metadata, case["data"]
                wanted = grpc.StatusCode.UNAUTHENTICATED if case["method"] in METHODS else grpc.StatusCode.UNIMPLEMENTED
                assert await status_of_call(*given) is wanted, case
                with_key = await status_of_call(
                    channel, case["method"], (("authorization", f"Bearer {key}"),), given[3]
                )
                assert with_key not in FAULTS[:3], (case, with_key)
                assert with_key is not grpc.StatusCode.UNAUTHENTICATED
            await until(lambda: server.stats()["running"] == 0)
            async with AsyncClient(server.address, key=key) as client:
                assert (await client.generate_text("walk", max_new_tokens=2)).token_ids

    asyncio.run(ask())
    assert not faults()


@few(path=st.sampled_from([*PATHS, "/v1/none"]), key=KEYS, body=BODIES, messages=MESSAGES, data=st.binary(max_size=99))
def test_any_call_over_http_has_a_status_and_without_a_valid_key_no_other_than_that(cases, tmp_path, faults):
    async def ask():
        async with both(tmp_path) as (server, http, key):
            for case in cases:
                whole = json.dumps({"max_tokens": 2, **case["body"], "messages": case["messages"]}).encode()
                for body in (json.dumps(case["body"]).encode(), whole, case["data"]):
                    status, _, _ = await post(http, case["path"], body, **invalid(case["key"], key))
                    assert status == (401 if case["path"] in PATHS else 404), case
                    status, _, _ = await post(http, case["path"], body, authorization=f"Bearer {key}")
                    assert status in (200, 400, 404), (case, status)
            await until(lambda: server.stats()["running"] == 0)
            asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
            assert (await post(http, PATHS[0], asked, authorization=f"Bearer {key}"))[0] == 200

    asyncio.run(ask())
    assert not faults()


BROKEN = st.binary(max_size=60).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))
"""Lines that are headers by chance alone: a request with one is mostly refused before its key is looked at."""
NAMES = st.sampled_from(
    [b"accept", b"cookie", b"dendro-tenant", b"expect", b"idempotency-key", b"traceparent", b"x", b"x-request-id"]
)
HEADERS = st.tuples(NAMES, st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60)).map(
    lambda each: each[0] + b": " + each[1].encode()
)
LINES = st.lists(HEADERS, max_size=4) | st.lists(HEADERS | BROKEN, max_size=4)


def test_any_header_beside_a_valid_or_a_wrong_key_ends_with_a_status_and_most_reach_the_check_of_the_key(faults):
    reached: list[int] = []  # statuses that the check of the key gives
    sent = 0

    async def ask(folder, cases):
        nonlocal sent
        async with both(folder) as (_, http, key):
            for case in cases:
                for value in (key, key[:-3], ""):
                    head = [b"GET /v1/models HTTP/1.1", b"host: 127.0.0.1", f"authorization: Bearer {value}".encode()]
                    sent += 1
                    try:
                        status, _, _ = await raw(http, b"\r\n".join([*head, *case["lines"], b"", b""]) + case["data"])
                    except asyncio.IncompleteReadError:
                        continue  # the connection has ended
                    assert status < 500 and (status != 200 or value == key), (case, status)
                    reached.extend([status] if status in (200, 401) else [])
            assert (await raw(http, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"))[0] == 200

    @few(lines=LINES, data=st.binary(max_size=60))
    def drawn(cases):
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(ask(Path(folder), cases))

    drawn()
    assert not faults()
    assert reached.count(200) > sent / 8 and reached.count(401) > sent / 4, (sent, reached)
