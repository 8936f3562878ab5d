"""Peers that put any number into any field of their answers, over real sockets behind the whole edge.

A lying drafter costs no token; a lying verifier ends a request in an error of ours. Nothing is left open, and what is
learned of them stays finite.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import fields, is_dataclass

import grpc
import numpy as np
import pytest
from dendro import wire
from dendro.errors import DendroError, EngineFailed, PeerLost
from dendro.internal.v1 import verifier_pb2
from fakes import VOCABULARY, FakeDrafter, FakeVerifier, FarPool, new_text, plain
from liars import lying, lying_hello
from sockets import until
from toy_edge import COUNT, PROMPT, RecordedPriors, answer, asking, edge

import drafter_service.servicer
import verifier_service.servicer
from cluster.peers.opening import Opening
from cluster.policies.prior import unpack_prior
from cluster.router.ingress import Ingress


def all_finite(value: object) -> bool:
    """Whether every number in a value and all that it holds is finite, and none a cost below zero."""
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


def about_said(message):
    """The part of an answer message that holds its value or its error."""
    return getattr(message, message.WhichOneof("said"))


def lie_of(monkeypatch, who: str, chance: random.Random, often: float) -> None:
    module = {"drafter": drafter_service.servicer, "verifier": verifier_service.servicer}[who]
    monkeypatch.setattr(module, "DIALECT", lying(module.DIALECT, chance, often, about_said))


@pytest.mark.parametrize("seed", range(12))
async def test_a_drafter_that_lies_about_any_number_costs_no_token_and_teaches_nothing_infinite(monkeypatch, seed):
    monkeypatch.setattr("cluster.peers.drafter.FROZEN_S", 0.05)
    lie_of(monkeypatch, "drafter", random.Random(seed), often=0.7)
    drafter, verifier = FakeDrafter(), FakeVerifier()
    async with edge(drafter, verifier) as (ingress, priors):
        for speculation in ("(2,1,1)", "(1,1,1)", "auto"):
            assert await answer(ingress, speculation) == plain(PROMPT, COUNT)
        assert await learned_is_sound(ingress, priors)
        await until(lambda: not drafter.held and not verifier.held)


@pytest.mark.parametrize("seed", range(12))
async def test_a_verifier_that_lies_about_any_number_ends_a_request_in_an_error_of_ours(monkeypatch, seed):
    lie_of(monkeypatch, "verifier", random.Random(seed), often=0.15)
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
async def test_a_drafter_whose_hello_lies_costs_no_token(monkeypatch, seed):
    dialect = lying_hello(drafter_service.servicer.DIALECT, random.Random(seed))
    monkeypatch.setattr(drafter_service.servicer, "DIALECT", dialect)
    async with edge(FakeDrafter(), FakeVerifier()) as (ingress, _):
        assert await answer(ingress, "(2,1,1)") == plain(PROMPT, COUNT)


@pytest.mark.parametrize("seed", range(10))
async def test_a_verifier_whose_hello_lies_answers_or_ends_a_request_in_an_error_of_ours(monkeypatch, seed):
    dialect = lying_hello(verifier_service.servicer.DIALECT, random.Random(seed))
    monkeypatch.setattr(verifier_service.servicer, "DIALECT", dialect)
    async with edge(FakeDrafter(), FakeVerifier()) as (ingress, _):
        try:
            assert await answer(ingress, "(2,1,1)") == plain(PROMPT, COUNT)
        except (PeerLost, EngineFailed):
            return


@pytest.mark.parametrize("who", ["drafter", "verifier"])
async def test_a_peer_that_says_it_took_584_thousand_years_is_accounted_what_its_calls_took(monkeypatch, who):
    module, field = {
        "drafter": (drafter_service.servicer, "draft_us"),
        "verifier": (verifier_service.servicer, "verify_us"),
    }[who]
    honest = module.DIALECT

    def boast(number, outcome):
        message = honest.answer(number, outcome)
        said = message.WhichOneof("said")
        if said in ("tree", "verdict"):
            setattr(getattr(message, said), field, 2**64 - 1)
        return message

    monkeypatch.setattr(module, "DIALECT", type(honest)(honest.calls, honest.call_from, boast, honest.frame))
    async with edge(FakeDrafter(), FakeVerifier()) as (ingress, _):
        events = [event async for event in ingress.generate(asking("(2,1,1)"))]
    account = events[-1].complete.speculation
    assert account.drafted_tokens > 0
    assert getattr(account, field) <= account.rounds_us < 100e6


async def test_bytes_that_are_no_frame_end_the_stream_and_its_callers_get_peer_lost():
    """gRPC gives None for a message that it cannot read; a call whose answer it was would wait for ever."""
    hello = wire.hello_message(await FakeVerifier().hello())

    async def noise(frames, context):
        async for _ in frames:
            yield verifier_pb2.VerdictFrame(hello=hello).SerializeToString()
            break
        async for _ in frames:
            yield b"\xff" * 20

    server = grpc.aio.server()
    method = {"Rounds": grpc.stream_stream_rpc_method_handler(noise)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("dendro.internal.v1.VerifierService", method),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    pool = FarPool("verifier", [address])
    try:
        leased, text = await pool.lease(), new_text()
        async with asyncio.timeout(20):  # an opening waits 120 s for its peer
            with pytest.raises(PeerLost, match="no frame"):
                await Opening(leased, text).open(text)
    finally:
        await pool.streams.close()
        await server.stop(0)
