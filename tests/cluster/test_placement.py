"""Leases end with their openings, streams or caps; Serve sees one call per lease."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from dendro.errors import NotFound
from dendro.options import Options
from dendro.serving import Leases

from cluster.peers.opening import Leased, Opening
from tests.support.fakes import FakeVerifier, new_text, plain
from tests.support.sockets import end, process, until, verifier_at


class Held:
    """A lease as Serve holds it: a generator, read until it ends."""

    def __init__(self, replica) -> None:
        self._answers = replica.lease()
        self.ended = False

    async def begin(self) -> str:
        first = await anext(self._answers)
        self._task = asyncio.create_task(self._read())
        return first["lease"]

    async def _read(self) -> None:
        async for _ in self._answers:
            pass
        self.ended = True

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


async def test_a_lease_lasts_as_long_as_its_openings():
    engine = FakeVerifier()
    async with verifier_at(engine, Leases()) as (replica, pool):
        held = Held(replica)
        pool.lease_at = lambda _: held.begin()
        leased, text = await pool.lease(), new_text()
        one, two = Opening(leased, text), Opening(leased, text)
        await one.open(text)
        await two.open(text)
        await one.close(text)
        assert replica.stats()["open_leases"] == 1 and not held.ended
        await two.close(text)
        await until(lambda: held.ended)
        assert (replica.stats()["open_leases"], replica.stats()["open_openings"]) == (0, 0)
        with pytest.raises(NotFound):
            await Opening(leased, text).open(text)


async def test_a_lease_without_an_opening_ends():
    async with verifier_at(FakeVerifier(), Leases(attach_s=0.1)) as (replica, _):
        held = Held(replica)
        await held.begin()
        await until(lambda: held.ended)
        assert replica.stats()["open_leases"] == 0


async def test_a_lease_ends_at_its_cap_and_frees_its_openings():
    engine = FakeVerifier()
    async with verifier_at(engine, Leases(attach_s=0.1, cap_s=0.3)) as (replica, pool):
        held = Held(replica)
        pool.lease_at = lambda _: held.begin()
        text = new_text()
        opening = Opening(await pool.lease(), text)
        await opening.open(text)
        await until(lambda: held.ended)
        assert engine.held == {} and replica.stats()["open_leases"] == 0


async def test_cancelling_the_call_of_a_lease_in_use_does_not_end_it():
    engine = FakeVerifier()
    async with verifier_at(engine, Leases()) as (replica, pool):
        held = Held(replica)
        pool.lease_at = lambda _: held.begin()
        text = new_text()
        opening = Opening(await pool.lease(), text)
        await opening.open(text)
        await held.cancel()
        assert engine.held and replica.stats()["open_leases"] == 1
        await opening.close(text)
        assert replica.stats()["open_leases"] == 0


async def test_an_opening_without_a_lease_is_refused():
    async with verifier_at(FakeVerifier(), Leases()) as (_, pool):
        leased = await pool.lease()
        with pytest.raises(NotFound):
            await Opening(Leased(leased.peer, leased.hello, ""), new_text()).open(new_text())


async def test_a_killed_router_leaves_no_lease_behind():
    engine = FakeVerifier()
    async with verifier_at(engine, Leases()) as (replica, _):
        held = Held(replica)
        router, printed = await process("router", replica.address, await held.begin())
        assert printed == "open" and len(engine.held) == 1
        os.kill(router.pid, signal.SIGKILL)
        await until(lambda: held.ended, timeout_s=20.0)
        await end(router)
        assert engine.held == {} and replica.stats()["open_leases"] == 0
        assert engine.closed_with == [3], "its state is saved"


@pytest.mark.cluster
@pytest.mark.timeout(300)  # starting Ray alone may take more than 100 s beside another test's Ray
def test_on_serve_a_request_is_one_call_per_replica_and_a_killed_replica_changes_no_token(monkeypatch):
    """One test for all that needs Ray, whose start takes 15 s on two cores."""
    import ray  # noqa: F401 - before the cluster starts, as a program may have done
    from dendro.answer import Round
    from dendro.client import AsyncClient

    from cluster import deploy
    from tests.support.deployed import no_process_left, use_deployed
    from tests.support.toy_cluster import LOADERS, toy_config

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    async def use(address: str) -> None:
        async with AsyncClient(address) as client:
            asked: Options = dict(max_new_tokens=120, speculation="(1,1,1)")
            done = await asyncio.gather(*(client.generate_text([token, 6, 7], **asked) for token in range(4)))
            for token, answer in enumerate(done):
                assert list(answer.token_ids) == plain([token, 6, 7], 120)
                assert answer.complete.speculation.rounds > 10
            for name in ("drafter-helper", "verifier-toy"):
                stats = await asyncio.to_thread(deploy.deployment_stats, name)
                assert stats["leases"] == stats["openings"] == 4, "a Serve call per request and replica, none per round"
                assert stats["calls"] > 40 and stats["streams"] == 1 and stats["open_leases"] == 0

            async def stream(victim: str) -> list[int]:
                ids: list[int] = []
                pid = (await asyncio.to_thread(deploy.deployment_stats, victim))["pid"]
                async for event in client.generate([9, 9, 9], max_new_tokens=500, speculation="(1,1,1)"):
                    if isinstance(event, Round):
                        ids += event.token_ids
                        if pid and len(ids) > 30:
                            os.kill(pid, signal.SIGKILL)
                            pid = 0
                return ids

            for victim in ("drafter-helper", "verifier-toy"):
                assert await stream(victim) == plain([9, 9, 9], 500), victim
            with pytest.raises(NotFound):
                await client.generate_text([5, 6, 7], session="unknown")

    with no_process_left():
        use_deployed(toy_config(), use, **LOADERS)


def test_replicas_start_with_the_environment_that_row_independence_needs():
    from cluster.app import build
    from tests.support.toy_cluster import LOADERS, toy_config

    targets = build(toy_config(), "redis://nowhere", **LOADERS)._bound_deployment.init_args[2]
    variables = targets["toy"]._bound_deployment.ray_actor_options["runtime_env"]["env_vars"]
    assert (
        variables["MKL_CBWR"] == "AUTO,STRICT"
        and variables["OMP_WAIT_POLICY"] == "passive"
        and variables["OMP_NUM_THREADS"] == "1"
    )
