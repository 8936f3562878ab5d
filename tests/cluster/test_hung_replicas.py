"""A replica whose engine hangs in a step is detected: its texts continue at another, and its leases end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import SimpleNamespace

import grpc.aio
import psutil
import pytest
import torch
from dendro import serving
from dendro.answer import Round
from dendro.client import AsyncClient
from dendro.errors import PeerLost
from dendro.options import Options
from dendro.servicer import DRAFTER_REPLICA, VERIFIER_REPLICA, serve_engine
from dendro.serving import Leases
from dendro.state import NoStates
from dendro.text import Limits, Sampling, Text
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster import deploy
from cluster.app import VerifierShell
from cluster.arms import OFF_ARM
from cluster.config import Config
from cluster.peers.opening import Opening, Pace
from cluster.peers.verifier import VerifierHandle
from cluster.policies import Static
from cluster.redis_server import RedisServer
from cluster.router.rounds import rounds
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.support.fakes import FakeVerifier, NoDrafter, RemotePool, new_text, plain
from tests.support.sockets import until, verifier_at
from tests.support.tiny_drafters import make_drafter
from tests.support.tiny_models import make_checkpoint
from tests.support.toy_cluster import load_until_hung
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

PROMPT = [(7 * at * at + 3 * at) % 256 for at in range(20)]
COUNT = 12
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
DEADLINE_S = 20.0
"""Timeout of these tests; below that of a round's verdict (30 s). An opening has none."""


class Blocked:
    """Replaces the `run` of an engine's runner; while `hanging`, a call of it waits for `resume`."""

    def __init__(self, hanging: bool = False) -> None:
        self.hanging, self.hung, self._released = hanging, threading.Event(), threading.Event()

    def replace(self, runner) -> None:
        self._run, runner.run = runner.run, self

    def __call__(self, *arguments):
        if self.hanging:
            self.hung.set()
            self._released.wait()
        return self._run(*arguments)

    def clock(self) -> float:
        """The engine's clock: a call that waits has taken 1000 s at once."""
        return 1000.0 * self.hung.is_set()

    def resume(self) -> None:
        self.hanging = False
        self._released.set()


@asynccontextmanager
async def in_time(run: Blocked):
    """Fail after DEADLINE_S. The function is resumed in any case: stopping an engine waits for its thread."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    finally:
        run.resume()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make_checkpoint(folder, "llama", 1)
    return folder


def load(folder, clock=time.monotonic) -> VerifierEngine:
    options = VerifierOptions(name="tiny", dtype=torch.float32, max_length=128, max_sessions=4)
    return VerifierEngine.load(folder, options, clock=clock)


@asynccontextmanager
async def replicas(*engines: VerifierEngine):
    """The engines behind sockets, each with leases; and a pool whose first lease is of the last of them."""
    async with AsyncExitStack() as stack:
        served = []
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
            replica = await serve_engine(VERIFIER_REPLICA, engine, Leases(), fault=engine.fault)
            stack.push_async_callback(replica.stop)
            served.append(replica)
        held = []

        async def lease_at(address: str) -> str:
            replica = next(each for each in served if each.address == address)
            answers = replica.lease()
            lease = await anext(answers)

            async def hold() -> None:
                async for _ in answers:
                    pass

            held.append(asyncio.create_task(hold()))
            return lease["lease"]

        pool = RemotePool("verifier", [replica.address for replica in served], lease_at)
        try:
            yield served, pool
        finally:
            await pool.streams.close()
            _, leased = await asyncio.wait(held, timeout=DEADLINE_S)
            for lease in leased:
                lease.cancel()
            assert not leased, "a lease ends when its holder's streams end"


async def answered(pool, each=None) -> tuple[list[int], VerifierHandle]:
    text = Text(PROMPT, Sampling(), Limits(len(PROMPT) + COUNT, ignore_end=True))
    handle = VerifierHandle(text, pool, Pace())
    try:
        async for _ in rounds(text, NoDrafter(), handle, Static(OFF_ARM)):
            if each is not None:
                each()
    finally:
        await handle.close(text)
    return text.answer, handle


async def test_a_text_whose_verifier_hangs_continues_at_another_and_the_hung_one_is_released(monkeypatch, target):
    monkeypatch.setattr(serving, "FAULT_POLL_S", 0.05)
    run = Blocked()
    well, hung = load(target), load(target, run.clock)
    run.replace(hung.runner)
    async with replicas(well, hung) as ((_, replica), pool), in_time(run):
        alone, _ = await answered(RemotePool("verifier", [pool.addresses[0]], pool.lease_at))
        assert hung.fault() == "" and replica.stats()["calls"] == 0

        def hang() -> None:
            run.hanging = replica.stats()["calls"] >= 4

        tokens, handle = await answered(pool, hang)
        assert run.hung.is_set() and handle.moves == 1 and tokens == alone
        assert "has not come back" in hung.fault()
        assert replica.stats()["open_leases"] == replica.stats()["open_openings"] == 0
        with pytest.raises(PeerLost):
            await anext(replica.lease())
        async with grpc.aio.insecure_channel(replica.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            assert (await check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
            run.resume()
            await until(lambda: not hung.fault() and not hung.scheduler.sessions)
            await until(lambda: not replica._streams.fault)
        assert hung.scheduler.memory.held == 0, "its openings were closed"


async def test_serves_health_check_fails_while_an_engine_hangs(target):
    run = Blocked(hanging=True)
    engine = load(target, run.clock)
    run.replace(engine.runner)
    shell = SimpleNamespace(_engine=engine)
    await engine.start()
    replica = await serve_engine(VERIFIER_REPLICA, engine)
    pool = RemotePool("verifier", [replica.address])
    text = Text(PROMPT, Sampling(), Limits(len(PROMPT) + COUNT))
    handle = VerifierHandle(text, pool, Pace())
    try:
        await VerifierShell.check_health(shell)
        await until(engine.fault)
        with pytest.raises(RuntimeError, match="has not come back"):
            await VerifierShell.check_health(shell)
    finally:
        run.resume()
        await handle.close(text)
        await pool.streams.close()
        await replica.stop()
        await engine.stop()


async def test_a_drafter_that_hangs_in_a_forward_is_unhealthy_and_its_callers_get_peer_lost(monkeypatch, tmp_path):
    monkeypatch.setattr(serving, "FAULT_POLL_S", 0.05)
    make_drafter(tmp_path, "mamba2")
    run = Blocked(hanging=True)
    engine = DrafterEngine.load(tmp_path, DrafterOptions(name="tiny"), states=NoStates(), clock=run.clock)
    run.replace(engine._runner)
    await engine.start()
    replica = await serve_engine(DRAFTER_REPLICA, engine, fault=engine.fault)
    pool = RemotePool("drafter", [replica.address])
    try:
        text = Text([token % 90 for token in PROMPT], Sampling(), Limits(len(PROMPT) + COUNT))
        async with in_time(run):
            with pytest.raises(PeerLost, match="has not come back"):
                await Opening(await pool.lease(), text).open(text)
    finally:
        await pool.streams.close()
        await replica.stop()
        await engine.stop()


async def never(call) -> None:
    await asyncio.Event().wait()


async def broken(call) -> None:
    raise RuntimeError("no such text")


@pytest.mark.parametrize("close", [never, broken])
async def test_a_second_hang_is_detected_even_if_closing_the_texts_of_the_first_hangs_or_fails(monkeypatch, close):
    monkeypatch.setattr(serving, "FAULT_POLL_S", 0.02)
    engine, faults = FakeVerifier(), [""]
    engine.close = close
    replica = await serve_engine(VERIFIER_REPLICA, engine, fault=lambda: faults[-1])
    pool = RemotePool("verifier", [replica.address])

    async def noticed(fault: str) -> None:
        faults.append(fault)
        await until(lambda: replica._streams.fault == fault)

    try:
        text = new_text()
        await Opening(await pool.lease(), text).open(text)
        await noticed("hangs")
        await noticed("")
        await noticed("hangs again")
    finally:
        await pool.streams.close()
        await replica.stop()


@asynccontextmanager
async def answered_by_two(first: FakeVerifier, second: FakeVerifier):
    """Answer a text, first leased at `first`, with a patience of 0.9 s; returns its handle and both replicas."""
    async with verifier_at(first) as (replica, pool), verifier_at(second) as (other, _):
        pool.addresses = [other.address, replica.address]  # the first lease is of the second address
        text = new_text(count=10)
        handle = VerifierHandle(text, pool, Pace(), patience_s=0.9)
        async with asyncio.timeout(DEADLINE_S):
            async for _ in rounds(text, NoDrafter(), handle, Static(OFF_ARM)):
                pass
        await handle.close(text)
        assert text.answer == plain(text.ids[: text.prompt_length], 10)
        assert handle.moves == 0 and pool.leases == 2
        yield replica, other


async def test_a_slow_opening_is_tried_at_a_second_replica_within_the_patience():
    slow, well = FakeVerifier(), FakeVerifier()
    slow.open_pause_s = 1000.0
    async with answered_by_two(slow, well) as (replica, _):
        assert well.opens == 1
        await until(lambda: not slow.held and not well.held and replica.stats()["open_openings"] == 0)


async def test_a_slow_opening_that_is_answered_first_is_used_and_the_second_one_closed():
    """The first one is answered once the second one has begun."""
    slow, slower, begun = FakeVerifier(), FakeVerifier(), asyncio.Event()

    async def never_opened() -> None:
        begun.set()
        await asyncio.Event().wait()

    slow.before_opened, slower.before_opened = begun.wait, never_opened
    async with answered_by_two(slow, slower) as (_, other):
        assert slow.opens == 1 and slower.opens == 0
        await until(lambda: other.stats()["open_openings"] == 0)


async def test_a_slow_opening_is_not_repeated_at_the_same_replica():
    """Two openings of one text at one replica would compete for its places and time."""
    slow = FakeVerifier()
    async with verifier_at(slow) as (replica, pool):
        slow.before_opened = partial(until, lambda: pool.leases > 1)
        text = new_text(count=10)
        handle = VerifierHandle(text, pool, Pace(), patience_s=0.9)
        async with asyncio.timeout(DEADLINE_S):
            async for _ in rounds(text, NoDrafter(), handle, Static(OFF_ARM)):
                pass
        await handle.close(text)
        assert pool.leases > 1 and replica.stats()["openings"] == 1


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(600)  # one start of Ray's processes and two of torch's, on two cores
def test_serve_replaces_a_replica_whose_model_hangs_and_its_text_continues_at_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    folder, share = tmp_path / "target", {"cpu": 0.1}
    asked: Options = {"max_new_tokens": 300, "ignore_end": True}
    make_checkpoint(folder, "llama", 1)
    config = Config.model_validate(
        {
            "targets": {"tiny": {"checkpoint": folder, "longest_step_s": 3.0, "resources": share}},
            "router": {"resources": share},
        }
    )

    async def use(address: str) -> None:
        async with AsyncClient(address, timeout_s=90.0) as client:
            expected, ids = (await client.generate_text(PROMPT, **asked)).token_ids, []
            async for event in client.generate(PROMPT, **asked):
                if isinstance(event, Round):
                    if len(ids) <= 10 < len(ids) + len(event.token_ids):
                        (tmp_path / "hang").touch()
                    ids += event.token_ids
            assert ids == list(expected)
            hung = int((tmp_path / "hung").read_text())
            await until(lambda: not psutil.pid_exists(hung), timeout_s=60.0)

    with RedisServer() as server:
        address = deploy.start(config, server.url, verifier=load_until_hung)
        try:
            asyncio.run(use(address))
        finally:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # else Serve waits until it ends
                os.kill(int((tmp_path / "hung").read_text()), signal.SIGKILL)
            deploy.stop()
