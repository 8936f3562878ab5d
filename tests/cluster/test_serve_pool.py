"""Leases of Serve's replicas: what a request gets where none has room, none runs, or one cannot be reached."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from dendro.errors import Overloaded, PeerLost
from dendro.tree import DraftTree

from cluster.peers import pools
from cluster.peers.pools import Peers, ServePeers, ServePool
from cluster.peers.stream import VERIFIER, PeerStream, RemoteVerifier, Streams
from cluster.peers.verifier import PATIENCE_S
from tests.support.fakes import FakePool, FakeVerifier, new_text, plain
from tests.support.serve_handles import FakeHandle, no_replica
from tests.support.toy_cluster import toy_config
from tests.support.virtual_time import virtual_time


class FakeStream:
    """A stream that is never lost."""

    lost, hello = "", None


@pytest.fixture
def _reachable(monkeypatch):
    """Streams to all addresses but `dead`, which takes as long as a connection may take."""

    async def connect(address: str, *_: object) -> FakeStream:
        if address == "dead":
            await asyncio.sleep(5.0)
            raise PeerLost("dead: does not answer")
        return FakeStream()

    monkeypatch.setattr(PeerStream, "connect", connect)


class VirtualPeers(ServePeers):
    """Peers whose clock is that of the loop."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._clock = asyncio.get_running_loop().time


def pool_of(handle: FakeHandle, may_be_empty: bool = False) -> ServePool:
    return ServePool(handle, Streams(VERIFIER), RemoteVerifier, may_be_empty)


@virtual_time
async def test_a_lease_where_every_replica_is_full_is_overloaded():
    with pytest.raises(Overloaded, match="no replica has room within 10 s"):
        await pool_of(FakeHandle(no_replica, running=("full",))).lease()


@virtual_time
async def test_a_lease_where_no_replica_runs_is_lost_not_overloaded():
    with pytest.raises(PeerLost, match="no replica runs; one may be loading"):
        await pool_of(FakeHandle(no_replica)).lease()


@pytest.mark.usefixtures("_reachable")
@virtual_time
async def test_a_lease_in_a_pool_that_may_be_empty_waits_for_the_load():
    began_s, handle = asyncio.get_running_loop().time(), FakeHandle(no_replica)
    leasing = asyncio.ensure_future(pool_of(handle, may_be_empty=True).lease())
    await asyncio.sleep(300)
    handle.grant = lambda _: "loaded"
    handle.changed.set()
    assert (await leasing).address == "loaded"
    assert asyncio.get_running_loop().time() - began_s == 300


def least_busy(handle: FakeHandle) -> str:
    """The running replica with the fewest leases, as Serve grants them."""
    return min(handle.running, key=handle.ongoing.count)


@pytest.mark.usefixtures("_reachable")
@virtual_time
async def test_a_replica_that_cannot_be_reached_delays_one_lease_and_is_then_avoided():
    """Serve goes on to prefer it, as no lease of it is ever held for long."""
    loop, handle = asyncio.get_running_loop(), FakeHandle(least_busy, running=("near",))
    pool = pool_of(handle)
    for _ in range(20):
        await pool.lease()
    handle.running = ("near", "dead")
    waited = []
    for _ in range(10):
        began_s = loop.time()
        assert (await pool.lease()).address == "near"
        waited.append(loop.time() - began_s)
    assert waited == [5.0] + [0.0] * 9
    assert "dead" not in handle.ongoing, "what was leased there is free again"


@pytest.mark.usefixtures("_reachable")
@virtual_time
async def test_a_request_takes_few_places_of_a_replica_that_it_cannot_reach():
    """Other routers may reach it."""
    handle = FakeHandle(least_busy, running=("near",))
    pool = pool_of(handle)
    await pool.lease()
    handle.running, handle.grant, handle.calls = ("near", "dead"), lambda _: "dead", 0
    with pytest.raises(PeerLost, match="dead cannot be reached, and no other replica has room"):
        await pool.lease()
    assert handle.calls == pools.MOST_HELD and "dead" not in handle.ongoing


@pytest.mark.usefixtures("_reachable")
@virtual_time
async def test_a_replica_that_can_be_reached_again_is_used_again(monkeypatch):
    handle = FakeHandle(least_busy, running=("near",))
    pool = pool_of(handle)
    await pool.lease()
    handle.running = ("near", "dead")
    await pool.lease()
    monkeypatch.setattr(PeerStream, "connect", healed)
    assert (await pool.lease()).address == "near"
    await asyncio.sleep(pools.UNREACHED_S)
    assert (await pool.lease()).address == "dead"


@pytest.mark.usefixtures("_reachable")
@virtual_time
async def test_a_lone_replica_that_cannot_be_reached_is_tried_at_each_lease(monkeypatch):
    handle = FakeHandle(least_busy, running=("dead",))
    pool = pool_of(handle)
    for number in range(1, 4):
        with pytest.raises(PeerLost, match="dead: does not answer"):
            await pool.lease()
        assert handle.calls == number and not handle.ongoing
    monkeypatch.setattr(PeerStream, "connect", healed)
    assert (await pool.lease()).address == "dead"


async def healed(*_: object) -> FakeStream:
    """A connection to any address."""
    return FakeStream()


@pytest.mark.parametrize("least, waits", [(0, True), (1, False)])
@virtual_time
async def test_only_a_target_that_may_sleep_waits_for_its_load_longer_than_the_patience(least, waits):
    target = {"checkpoint": "none", "autoscaling": {"min_replicas": least, "max_replicas": 1}}
    handles = {"toy": FakeHandle(no_replica)}, {"helper": FakeHandle(no_replica)}
    text = new_text()
    handle = VirtualPeers(toy_config(targets={"toy": target}), *handles).verifier("toy", text)
    hello = asyncio.ensure_future(handle.first_hello())
    await asyncio.wait({hello}, timeout=1.5 * PATIENCE_S)
    assert hello.done() is not waits
    if not waits:
        with pytest.raises(PeerLost, match="none opens the text in time"):
            await hello
    hello.cancel()
    await handle.close(text)


@virtual_time
async def test_a_request_of_a_short_time_limit_is_told_before_it_that_no_replica_runs():
    handles, text = ({"toy": FakeHandle(no_replica)}, {"helper": FakeHandle(no_replica)}), new_text()
    handle = VirtualPeers(toy_config(router={"request_timeout_s": PATIENCE_S}), *handles).verifier("toy", text)
    with pytest.raises(PeerLost, match="none opens the text in time"):
        async with asyncio.timeout(PATIENCE_S):
            await handle.first_hello()
    await handle.close(text)


@virtual_time
async def test_a_round_may_wait_for_a_step_and_take_another_that_are_both_as_long_as_its_targets_may_be():
    target = {"checkpoint": "none", "longest_step_s": 300}
    pool, text = FakePool(FakeVerifier(pause_s=2 * 295.0)), new_text()
    peers = Peers(toy_config(targets={"toy": target}), {"toy": pool}, {}, clock=asyncio.get_running_loop().time)
    handle = peers.verifier("toy", text)
    verdict = await handle.verify(text, DraftTree.root_only(text.root))
    assert list(verdict.tokens) == plain(text.ids, 1) and handle.moves == 0
    await handle.close(text)


@virtual_time
async def test_a_text_whose_verifier_is_lost_late_in_a_long_round_is_opened_at_another():
    text, lost = new_text(), FakeVerifier(pause_s=PATIENCE_S)

    async def break_off(call):
        await asyncio.sleep(PATIENCE_S + 1)
        raise PeerLost("the stream has ended")

    lost.verify = break_off
    pool = FakePool(lost)
    target = {"checkpoint": "none", "longest_step_s": 300}
    peers = Peers(toy_config(targets={"toy": target}), {"toy": pool}, {}, clock=asyncio.get_running_loop().time)
    handle = peers.verifier("toy", text)
    await handle.ready()
    pool.engine = FakeVerifier()
    verdict = await handle.verify(text, DraftTree.root_only(text.root))
    assert list(verdict.tokens) == plain(text.ids, 1) and handle.moves == 1
    await handle.close(text)
