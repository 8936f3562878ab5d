"""Peers with arbitrary numbers in any field of their answers, over real sockets behind the whole ingress.

A lying drafter changes no token; a lying verifier ends a request with a DendroError. No opening remains, and what is
learned stays finite.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from dendro import wire
from dendro.calls import MOST_PREPARED, PROTOCOL_VERSION, DraftCall, TextUpdate, new_opening
from dendro.errors import BadAnswer, DendroError, EngineFailed, PeerLost
from dendro.internal.v1.calls_pb2 import Greeting
from dendro.internal.v1.drafter_pb2 import DrafterAnswer, DrafterCall, DraftFrame, TreeFrame
from dendro.servicer import DRAFTER_REPLICA, VERIFIER_REPLICA
from dendro.serving import StreamServer
from dendro.shapes import TreeShape

from cluster.peers.opening import Opening
from cluster.policies.prior import unpack_prior
from cluster.router.ingress import Ingress
from tests.support import sockets
from tests.support.fakes import VOCABULARY, FakeDrafter, FakeVerifier, RemotePool, new_text, plain
from tests.support.liars import lying, lying_hello
from tests.support.sockets import until
from tests.support.toy_edge import COUNT, PROMPT, RecordedPriors, answer, asking, edge


def all_finite(value: object) -> bool:
    """Whether every float in a value, its fields and elements is finite."""
    match value:
        case float() | np.floating():
            return math.isfinite(value)
        case np.ndarray():
            return bool(np.isfinite(value).all())
        case dict():
            return all(all_finite(each) for each in value.values())
        case list() | tuple():
            return all(map(all_finite, value))
        case _ if is_dataclass(value) and not isinstance(value, type):
            return all(all_finite(getattr(value, each.name)) for each in fields(value))
    return True


async def learned_is_sound(ingress: Ingress, priors: RecordedPriors) -> bool:
    await ingress._priors.settled()
    return all(map(all_finite, ingress.experience.values())) and all(
        unpack_prior(blob) is not None for blob in priors.blobs.values()
    )


def answer_part(message):
    """The part of an answer message with its value or its error."""
    return getattr(message, message.WhichOneof("answer"))


def make_liar(monkeypatch, service: str, chance: random.Random, often: float) -> None:
    name = f"{service.upper()}_REPLICA"
    monkeypatch.setattr(sockets, name, lying(getattr(sockets, name), chance, often, answer_part))


@pytest.mark.parametrize("seed", range(12))
async def test_a_drafter_with_wrong_numbers_changes_no_token_and_all_that_is_learned_is_finite(monkeypatch, seed):
    monkeypatch.setattr("cluster.peers.drafter.FROZEN_S", 0.05)
    make_liar(monkeypatch, "drafter", random.Random(seed), often=0.7)
    drafter, verifier = FakeDrafter(), FakeVerifier()
    async with edge(drafter, verifier) as (ingress, priors):
        for speculation in ("(2,1,1)", "(1,1,1)", "auto"):
            assert await answer(ingress, speculation) == plain(PROMPT, COUNT)
        assert await learned_is_sound(ingress, priors)
        await until(lambda: not drafter.held and not verifier.held)


@pytest.mark.parametrize("seed", range(12))
async def test_a_verifier_with_wrong_numbers_answers_or_ends_the_request_with_a_dendro_error(monkeypatch, seed):
    make_liar(monkeypatch, "verifier", random.Random(seed), often=0.15)
    drafter, verifier = FakeDrafter(), FakeVerifier()
    async with edge(drafter, verifier) as (ingress, priors):
        for speculation in ("(2,1,1)", "auto", "(1,1,1)"):
            try:
                ids = await answer(ingress, speculation)
            except DendroError as error:
                assert error.code is not grpc.StatusCode.INVALID_ARGUMENT, f"the request is not to blame: {error}"
            else:
                assert 1 <= len(ids) <= COUNT and max(ids) < VOCABULARY
        assert await learned_is_sound(ingress, priors)
        await until(lambda: not drafter.held and not verifier.held)


@pytest.mark.parametrize("seed", range(10))
async def test_a_drafter_with_a_wrong_hello_changes_no_token(monkeypatch, seed):
    monkeypatch.setattr(sockets, "DRAFTER_REPLICA", lying_hello(DRAFTER_REPLICA, random.Random(seed)))
    async with edge(FakeDrafter(), FakeVerifier()) as (ingress, _):
        assert await answer(ingress, "(2,1,1)") == plain(PROMPT, COUNT)


@pytest.mark.parametrize("seed", range(10))
async def test_a_verifier_with_a_wrong_hello_answers_or_ends_the_request_with_a_dendro_error(monkeypatch, seed):
    monkeypatch.setattr(sockets, "VERIFIER_REPLICA", lying_hello(VERIFIER_REPLICA, random.Random(seed)))
    async with edge(FakeDrafter(), FakeVerifier()) as (ingress, _):
        try:
            assert await answer(ingress, "(2,1,1)") == plain(PROMPT, COUNT)
        except (PeerLost, EngineFailed):
            return


@pytest.mark.parametrize("service", ["drafter", "verifier"])
async def test_a_peer_that_reports_584_thousand_years_is_accounted_the_time_of_its_calls(monkeypatch, service):
    name, field = f"{service.upper()}_REPLICA", {"drafter": "draft_us", "verifier": "verify_us"}[service]
    honest = getattr(sockets, name)

    def exaggerated(number, outcome):
        message = honest.answer(number, outcome)
        part = message.WhichOneof("answer")
        if part in ("tree", "verdict"):
            setattr(getattr(message, part), field, 2**64 - 1)
        return message

    monkeypatch.setattr(sockets, name, replace(honest, answer=exaggerated))
    async with edge(FakeDrafter(), FakeVerifier()) as (ingress, _):
        events = [event async for event in ingress.generate(asking("(2,1,1)"))]
    account = events[-1].complete.speculation
    assert account.drafted_tokens > 0
    assert getattr(account, field) <= account.rounds_us < 100e6


@asynccontextmanager
async def speaking(role: str, speak: Callable[[AsyncIterator[bytes]], AsyncIterator[bytes]]):
    """A pool of a peer that greets as a replica does, and then sends what `speak` yields. It gets the frames of
    calls."""
    engine, kind = {"drafter": (FakeDrafter(), DRAFTER_REPLICA), "verifier": (FakeVerifier(), VERIFIER_REPLICA)}[role]
    hello = wire.hello_message(await engine.hello())

    async def rounds(frames, context):
        await anext(aiter(frames))
        yield kind.answers(hello=hello).SerializeToString()
        async for each in speak(frames):
            yield each

    server = grpc.aio.server()
    method = {"Rounds": grpc.stream_stream_rpc_method_handler(rounds)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(kind.service, method),))
    pool = RemotePool(role, [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"])
    await server.start()
    try:
        yield pool
    finally:
        await pool.streams.close()
        await server.stop(0)


async def test_bytes_that_are_not_a_frame_end_the_stream_and_its_callers_get_peer_lost():
    """gRPC returns None for a message that it cannot parse; the call that it answers would wait without end."""

    async def noise(frames):
        async for _ in frames:
            yield b"\xff" * 20

    async with speaking("verifier", noise) as pool:
        leased, text = await pool.lease(), new_text()
        async with asyncio.timeout(20):  # an opening waits for its peer as long as its request may take
            with pytest.raises(PeerLost, match="no frame"):
                await Opening(leased, text).open(text)


async def test_of_trees_that_no_call_asked_for_no_more_are_read_than_a_call_allows(monkeypatch):
    """Malformed ones, and answers of another kind, count as well."""
    read, answer_from = [], wire.answer_from
    monkeypatch.setattr(wire, "answer_from", lambda message: read.append(message) or answer_from(message))

    async def flood(frames):
        async for _ in frames:
            cycle = DrafterAnswer(prepared={"opening": bytes(16), "tree": {"tokens": [1, 2, 3], "parents": [-1, 2, 1]}})
            for each in (cycle, DrafterAnswer(closed={}), DrafterAnswer(call=1, closed={})):
                yield TreeFrame(answers=500 * [each]).SerializeToString()

    async with speaking("drafter", flood) as pool:
        leased = await pool.lease()
        call = DraftCall(TextUpdate.of(new_opening(), new_text(), 0), TreeShape.parse("(1,1)"), 0.5, lambda sent: None)
        with pytest.raises(BadAnswer):
            await leased.peer.draft(call)
        assert len(read) <= MOST_PREPARED + 1


async def test_a_flood_of_answers_that_no_call_asked_for_ends_the_stream():
    async def flood(frames):
        yield TreeFrame(answers=50_000 * [DrafterAnswer(call=9)]).SerializeToString()
        async for _ in frames:
            return

    async with speaking("drafter", flood) as pool:
        stream = (await pool.lease()).peer.stream
        await until(lambda: stream.lost)


async def test_a_peer_that_reads_no_calls_is_lost_and_none_are_kept_for_it(monkeypatch):
    """Such a peer may answer pings, as gRPC does for a process whose event loop hangs."""
    monkeypatch.setattr("cluster.peers.stream.WRITE_S", 0.2)
    monkeypatch.setattr("cluster.peers.stream.WRITTEN_S", 0.1)

    async def deaf(frames):
        await asyncio.sleep(600)
        yield b""

    async with speaking("drafter", deaf) as pool:
        leased, text = await pool.lease(), new_text(range(300_000))
        opened = []
        async with asyncio.timeout(20):
            while not leased.peer.stream.lost:
                opened.append(asyncio.create_task(Opening(leased, text).open(text)))
                await asyncio.sleep(0.05)
        for each in opened:
            with pytest.raises(PeerLost, match="reads no calls"):
                await each
        assert not leased.peer.stream._outbox


async def calling(frames: AsyncIterator[DraftFrame], write, kind=DRAFTER_REPLICA) -> None:
    """Serve a stream of these frames of calls to a drafter."""
    drafter = FakeDrafter()

    async def greeted():
        yield DraftFrame(greeting=Greeting(protocol=PROTOCOL_VERSION))
        async for each in frames:
            yield each

    await StreamServer(drafter, kind, await drafter.hello()).run(greeted(), SimpleNamespace(write=write))


async def test_a_frame_of_many_calls_lets_others_go_on_between_them():
    turn, answered, done = 0, [], asyncio.Event()

    def answer(number, outcome):
        answered.append(turn)
        if len(answered) == 5000:
            done.set()
        return DRAFTER_REPLICA.answer(number, outcome)

    async def frames():
        yield DraftFrame(calls=5000 * [DrafterCall(call=1)])
        await done.wait()

    async def write(frame):
        return

    async with asyncio.TaskGroup() as group:
        serving = group.create_task(calling(frames(), write, replace(DRAFTER_REPLICA, answer=answer)))
        while not serving.done():
            turn += 1
            await asyncio.sleep(0)
    assert len(set(answered)) > 10


async def test_calls_of_a_peer_that_reads_no_answers_are_not_read():
    read, stuck = 0, asyncio.Event()

    async def frames():
        nonlocal read
        for _ in range(1000):
            read += 1
            yield DraftFrame(calls=100 * [DrafterCall(call=1)])
            await asyncio.sleep(0)

    async def write(frame):
        if frame.answers:
            await stuck.wait()

    serving = asyncio.create_task(calling(frames(), write))
    for _ in range(5000):
        await asyncio.sleep(0)
    assert read < 100 and not serving.done()
    serving.cancel()
    await asyncio.wait({serving})
