"""Nothing of a request, a client's shape or a gone replica stays in a router's memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import aclosing
from types import SimpleNamespace

from dendro.calls import DraftCall
from dendro.errors import DendroError, Overloaded, PeerLost
from dendro.shapes import NodeShape, TreeShape, child_counts
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb

from cluster.arms import Arm
from cluster.peers.links import StreamLinks
from cluster.peers.opening import Leased, Opening
from cluster.peers.pools import Peers
from cluster.peers.stream import DRAFTER, PeerStream, Streams
from cluster.policies.experience import STOPPED_ARMS, Experience
from cluster.sessions import MemorySessions
from tests.support.fakes import FakeDrafter, FakeVerifier, new_text
from tests.support.sockets import drafter_at, until
from tests.support.toy_cluster import toy_config, toy_ingress


class OneReplica:
    """A pool of one replica in this process."""

    def __init__(self, engine):
        self.engine = engine

    async def lease(self):
        return Leased(self.engine, await self.engine.hello(), "", "replica")


class NeverOpens(FakeVerifier):
    def __init__(self):
        super().__init__()
        self.asked = asyncio.Queue()

    async def before_opened(self):
        self.asked.put_nowait(None)
        await asyncio.sleep(600)


async def texts_after(verifier, leaves=False):
    """The texts of requests that have ended at this verifier, and their errors. leaves: the clients leave."""
    config = toy_config()
    peers = Peers(config, {"toy": OneReplica(verifier)}, {"helper": OneReplica(FakeDrafter())})
    ingress, texts, errors = toy_ingress(config, peers, MemorySessions(), priors=None), [], []
    make = peers.verifier

    def noted(target, text, *more, **named):
        texts.append(weakref.ref(text))
        return make(target, text, *more, **named)

    peers.verifier = noted

    async def consume():
        try:
            async with aclosing(ingress.generate(pb.GenerateRequest(text="walk", max_new_tokens=4), "")) as events:
                async for _ in events:
                    pass
        except DendroError as error:
            errors.append(type(error))

    for _ in range(3):
        task = asyncio.create_task(consume())
        if leaves:
            await verifier.asked.get()
            task.cancel()
        await asyncio.wait({task})
        del task
    await until(lambda: len(asyncio.all_tasks()) == 1)  # handles close in the background
    gc.collect()
    return [text() for text in texts], errors


async def test_a_text_whose_verifier_was_full_is_freed():
    verifier = FakeVerifier()
    verifier.max_sessions = 0
    texts, errors = await texts_after(verifier)
    assert texts == [None] * 3 and errors == [Overloaded] * 3


async def test_a_text_whose_client_left_while_it_was_opened_is_freed():
    texts, _ = await texts_after(NeverOpens(), leaves=True)
    assert texts == [None] * 3


async def test_an_answered_text_is_freed():
    texts, errors = await texts_after(FakeVerifier())
    assert texts == [None] * 3 and not errors


def test_a_routers_tables_of_shapes_do_not_grow_with_what_clients_name():
    child_counts.cache_clear()
    for width in range(1, 32):
        for more in range(1, 32):
            child_counts(NodeShape((width, more)))
            child_counts(NodeShape((width, *([0] * (width - 1)), more)))
    assert child_counts.cache_info().currsize <= 1024
    experience, tree = Experience(), DraftTree.of([1, 2], [-1, 0], [0.0, -0.1])
    verdict = SimpleNamespace(length=1, trimmed=0)
    for depth in range(2, 9):
        for total in range(8, 60):
            experience.learn_stop(Arm.parse(f"helper:until(auto,8,{depth},{total})"), tree, verdict)
    assert len(experience.costs.stopped) <= STOPPED_ARMS


async def test_streams_to_replicas_that_are_gone_are_dropped():
    streams, kept = Streams(DRAFTER), 0
    try:
        for _ in range(3):
            async with drafter_at(FakeDrafter()) as (replica, _):
                await streams.to(replica.address)
                kept = len(streams._streams)
            await until(lambda address=replica.address: not streams.alive(address))
    finally:
        await streams.close()
    assert kept == 1


async def test_a_stream_that_is_asked_for_while_others_are_closed_is_closed_too(monkeypatch):
    streams, closed = Streams(DRAFTER), []

    class Closing:
        lost = ""

        def __init__(self, address):
            self.address = address

        async def close(self):
            closed.append(self.address)
            if len(closed) == 1:
                await streams.to("late")

    async def connect(address, *_):
        return Closing(address)

    monkeypatch.setattr(PeerStream, "connect", connect)
    for address in ("first", "second"):
        await streams.to(address)
    await streams.close()
    assert sorted(closed) == ["first", "late", "second"] and not streams._streams


async def test_calls_that_a_replica_does_not_answer_are_forgotten_once_their_callers_have_left():
    drafter = FakeDrafter(pause_s=600)
    async with drafter_at(drafter) as (_, pool):
        leased, text = await pool.lease(), new_text()
        opening, stream = Opening(leased, text), leased.peer.stream
        await opening.open(text)
        for _ in range(1000):
            leased.peer.draft(DraftCall(opening.update(text), TreeShape.parse("(1,1)"))).cancel()
        await until(lambda: drafter.calls == 1000)
        assert len(stream._waiting) < 200


async def test_a_text_may_wait_to_be_opened_for_longer_than_a_round_for_its_answer(monkeypatch):
    """It waits for a place at a full verifier for as long as its request may take."""
    monkeypatch.setattr("cluster.peers.stream.UNANSWERED_S", 0.0)
    drafter = FakeDrafter()
    drafter.open_pause_s = 0.5
    async with drafter_at(drafter) as (_, pool):
        leased, text = await pool.lease(), new_text()
        texts = [text, *(new_text() for _ in range(100))]
        await asyncio.gather(*(Opening(leased, each).open(each) for each in texts))


async def test_a_verifiers_text_is_freed_though_its_drafter_never_answers(monkeypatch):
    """The answer to an ordered tree's call refers to the text that the tree is for."""
    monkeypatch.setattr("cluster.peers.stream.UNANSWERED_S", 0.0)
    drafter, outcomes, texts = FakeDrafter(pause_s=600), [], []
    async with drafter_at(drafter) as (replica, pool):
        leased, text = await pool.lease(), new_text()
        opening = Opening(leased, text)
        await opening.open(text)
        links = StreamLinks()
        await links._streams.to(replica.address)
        for _ in range(1000):
            asked = new_text()
            texts.append(weakref.ref(asked))
            call = DraftCall(opening.update(text), TreeShape.parse("(1,1)"))
            links.draft(replica.address, call, lambda outcome, asked=asked: outcomes.append(type(outcome)))
        await until(lambda: drafter.calls == 1000)
        del asked, call
        gc.collect()
        assert sum(each() is not None for each in texts) < 200
        assert set(outcomes) == {PeerLost}
        await links.close()
