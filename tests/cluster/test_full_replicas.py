"""Verifiers without a place to wait: a new text is sent to each once and refused, one that has begun goes on trying."""

from __future__ import annotations

import asyncio

import pytest
from dendro.errors import Overloaded, PeerLost
from dendro.text import Limits, Sampling, Text
from dendro.tree import DraftTree

from cluster.peers.opening import Leased, Pace
from cluster.peers.verifier import PATIENCE_S, VerifierHandle
from tests.support.fakes import FakeVerifier, new_text, plain
from tests.support.virtual_time import virtual_time


class CountedVerifier(FakeVerifier):
    """Counts the openings that are sent to it, those that it refuses too."""

    sent = 0

    async def open(self, call):
        self.sent += 1
        return await super().open(call)


class ReplicasInTurn:
    """A pool that leases its replicas in turn."""

    def __init__(self, *engines: CountedVerifier) -> None:
        self.engines = engines
        self.leases = 0

    async def lease(self) -> Leased:
        at = self.leases % len(self.engines)
        self.leases += 1
        return Leased(self.engines[at], await self.engines[at].hello(), "", f"replica {at}")


def full() -> CountedVerifier:
    engine = CountedVerifier()
    engine.max_sessions = 0
    return engine


def handle_of(text: Text, pool: ReplicasInTurn) -> VerifierHandle:
    return VerifierHandle(text, pool, Pace(), clock=asyncio.get_running_loop().time)


async def refused(text: Text, *engines: CountedVerifier) -> float:
    """Seconds until a text was refused."""
    began_s = asyncio.get_running_loop().time()
    handle = handle_of(text, ReplicasInTurn(*engines))
    with pytest.raises(Overloaded, match="all are taken"):
        await handle.verify(text, DraftTree.root_only(text.root))
    await handle.close(text)
    return asyncio.get_running_loop().time() - began_s


@pytest.mark.parametrize("replicas", [1, 2, 3])
@virtual_time
async def test_a_new_text_is_sent_to_each_full_replica_once_and_refused_without_a_pause(replicas: int):
    engines = [full() for _ in range(replicas)]
    assert await refused(new_text(), *engines) == 0
    assert [engine.sent for engine in engines] == [1] * replicas


@virtual_time
async def test_a_new_text_is_opened_where_there_is_room():
    text, engines = new_text(), (full(), CountedVerifier())
    handle = handle_of(text, ReplicasInTurn(*engines))
    verdict = await handle.verify(text, DraftTree.root_only(text.root))
    assert list(verdict.tokens) == plain(text.ids, 1)
    assert [engine.sent for engine in engines] == [1, 1]
    await handle.close(text)


@virtual_time
async def test_a_text_that_has_begun_waits_until_there_is_room():
    engine = full()
    text = Text([5, 6, 7, 8], Sampling(), Limits(40), held=1)
    asyncio.get_running_loop().call_later(0.7 * PATIENCE_S, setattr, engine, "max_sessions", 10)
    handle = handle_of(text, ReplicasInTurn(engine))
    verdict = await handle.verify(text, DraftTree.root_only(text.root))
    assert list(verdict.tokens) == plain([5, 6, 7, 8], 1) and engine.sent > 3
    await handle.close(text)


class DyingVerifier(CountedVerifier):
    """Ends its first opening, which took long, as a replica that dies."""

    async def open(self, call):
        opened = await super().open(call)
        if self.sent == 1:
            raise PeerLost("replica: died")
        return opened


@virtual_time
async def test_a_text_whose_verifier_dies_after_a_long_wait_is_opened_again():
    engine, text = DyingVerifier(), new_text()
    engine.open_pause_s = 2 * PATIENCE_S
    handle = handle_of(text, ReplicasInTurn(engine))
    verdict = await handle.verify(text, DraftTree.root_only(text.root))
    assert list(verdict.tokens) == plain(text.ids, 1) and engine.sent == 2
    await handle.close(text)


@virtual_time
async def test_a_text_waits_for_a_place_as_long_as_its_request_may_take():
    engine = CountedVerifier()
    engine.open_pause_s = 500.0
    text = new_text()
    handle = handle_of(text, ReplicasInTurn(engine))
    verdict = await handle.verify(text, DraftTree.root_only(text.root))
    assert list(verdict.tokens) == plain(text.ids, 1) and engine.sent == 1
    await handle.close(text)
