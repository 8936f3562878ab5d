"""A client that does not read holds no peer past the request's time limit. Over a real socket."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from dendro.errors import Overloaded
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc

from cluster.api.grpc import serve_router
from cluster.router.ingress import AHEAD
from tests.support.edge import EdgePeers, ingress
from tests.support.fakes import FakeDrafter, FakeVerifier
from tests.support.sockets import until
from tests.support.toy_edge import asking, edge
from tests.support.virtual_time import virtual_time

SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 256), ("grpc.http2.bdp_probe", 0))
"""Bytes that a client's connection buffers unread: less than one answer."""


@asynccontextmanager
async def serving(server_ingress):
    server = await serve_router(server_ingress)
    try:
        async with grpc.aio.insecure_channel(server.address, options=SMALL_WINDOW) as channel:
            yield generation_pb2_grpc.GenerationServiceStub(channel)
    finally:
        await server.stop()


@pytest.mark.parametrize("grace_s", [60.0, 0.2], ids=["no peer while its call is open", "no call after the grace"])
async def test_a_client_that_stops_reading_holds_no_peer_and_no_call_past_the_requests_limit(monkeypatch, grace_s):
    monkeypatch.setattr("cluster.api.grpc.READ_GRACE_S", grace_s)
    drafter, verifier = FakeDrafter(), FakeVerifier()
    async with edge(drafter, verifier, router={"request_timeout_s": 1.0}) as (server, _), serving(server) as stub:
        request = asking("(1,1,1)")
        request.max_new_tokens = 1900
        call = stub.Generate(request)
        assert (await call.read()).WhichOneof("event") == "started"
        await until(lambda: verifier.held)
        await until(lambda: not verifier.held and not drafter.held)
        assert verifier.calls < 1900, "the work stopped with the client"
        running = server.experience["toy"].concurrency
        if grace_s < 1.0:
            await until(lambda: running.requests == 0, timeout_s=5.0)  # a dead connection takes longer
        call.cancel()


async def test_a_request_whose_verifier_never_answers_ends_at_its_limit():
    verifier = FakeVerifier(pause_s=1000.0)
    async with edge(FakeDrafter(), verifier, router={"request_timeout_s": 0.3}) as (server, _):
        async with asyncio.timeout(20):  # a round waits 30 s for its verdict
            with pytest.raises(Overloaded, match="not done within"):
                async for _event in server.generate(asking("(1,1,1)")):
                    pass
        await until(lambda: not verifier.held)


@virtual_time
async def test_a_slow_reader_gets_all_finished_chunks_and_then_the_error():
    places = EdgePeers()
    events = ingress(places, router={"request_timeout_s": 0.2}).generate(
        pb.GenerateRequest(text="walk", max_new_tokens=400, speculation=pb.Speculation(mode=pb.Speculation.MODE_OFF))
    )
    assert (await anext(events)).WhichOneof("event") == "started"
    first = await anext(events)
    await until(lambda: len(places.closed) == 2)
    tokens = len(first.chunk.token_ids)
    with pytest.raises(Overloaded):
        async for event in events:
            tokens += len(event.chunk.token_ids)
    assert 1 < tokens <= 2 + AHEAD
