"""Two routers on Ray Serve: clients call their own ports, and one of them may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import aiohttp
import grpc.aio
import psutil
import pytest
from dendro.client import AsyncClient
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.serve_config import APPLICATION
from tests.support.deployed import no_process_left, use_deployed
from tests.support.fakes import plain, slow_verifier
from tests.support.scraped import total
from tests.support.toy_cluster import LOADERS, toy_config

SERVING = health_pb2.HealthCheckResponse.SERVING


def each_of(deployment, method):
    """What the method answers at every running replica of a deployment."""
    from ray import serve

    return serve.get_deployment_handle(deployment, APPLICATION).broadcast(method).results(timeout_s=30.0)


def each_router(method):
    """What the method answers at every running router."""
    return each_of("router", method)


async def page_at(address: str, path: str) -> tuple[int, str]:
    """Status and text of a page of a status port."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as page:
        return page.status, await page.text()


async def opened_at(deployment: str, counter: str) -> float:
    """Texts that were opened at a deployment's replica, by its own status port."""
    (replica,) = await asyncio.to_thread(each_of, deployment, "addresses")
    assert await page_at(replica["status"], "/healthz") == (200, '{"serving": true, "faults": {}}\n')
    status, page = await page_at(replica["status"], "/metrics")
    assert status == 200 and "process_cpu_seconds_total" in page and "dendro_redis_breaker_open" in page
    return total(page, counter)


async def healthy(router) -> bool:
    """Whether both ports of a router report that it serves."""
    async with grpc.aio.insecure_channel(router["clients"], options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        served = (await check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=10)).status == SERVING
    return served and (await page_at(router["status"], "/healthz"))[0] == 200


async def all_healthy(count: int) -> list[dict[str, str]]:
    """The addresses of the routers, once `count` of them are healthy."""
    async with asyncio.timeout(120):
        while True:
            found = await asyncio.to_thread(each_router, "addresses")
            if len(found) == count and all([await healthy(each) for each in found]):
                return found
            await asyncio.sleep(0.5)


@pytest.mark.cluster
@pytest.mark.timeout(300)  # starting Ray alone may take more than 100 s beside another test's Ray
def test_on_serve_clients_call_routers_at_their_own_ports_and_the_death_of_one_fails_no_request(monkeypatch):
    """With a proxy in the environment, which refuses all connections: none of them is to be used within a cluster."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for name in ("http_proxy", "https_proxy"):
        for each in (name, name.upper()):
            monkeypatch.setenv(each, "http://127.0.0.1:1")
    config = toy_config(router={"resources": {"cpu": 0.1}, "replicas": 2}, grpc={"share_port": False})

    async def use(addresses: str) -> None:
        routers = await all_healthy(2)
        assert sorted(each["clients"] for each in routers) == addresses.split(",")
        assert len({each["status"] for each in routers}) == 2, "a port of its own"
        names = []
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # some of Ray's processes are short
                names.append(" ".join(each.cmdline()))
        assert any("ServeReplica" in name for name in names) and not any("ProxyActor" in name for name in names)

        async with AsyncClient(addresses) as client:

            async def ask(first: int) -> None:
                done = await client.generate_text([first, 6, 7], max_new_tokens=500, speculation="off")
                assert list(done.token_ids) == plain([first, 6, 7], 500)

            asked = asyncio.gather(*(ask(first) for first in range(8)))
            while True:
                stats = await asyncio.to_thread(each_router, "stats")
                if [each["running"] for each in stats] == [4, 4]:
                    break
            os.kill(stats[0]["pid"], signal.SIGKILL)
            await asked
        assert await opened_at("verifier-toy", "dendro_verifier_openings_total") >= 8
        assert await opened_at("drafter-helper", "dendro_drafter_openings_total") == 0
        assert stats[0]["pid"] not in {each["pid"] for each in await asyncio.to_thread(each_router, "stats")}
        await all_healthy(2)

    with no_process_left():
        use_deployed(config, use, **LOADERS | {"verifier": slow_verifier})


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_abort_behind_one_address_of_two_routers_ends_a_request_at_either(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    config = toy_config(router={"resources": {"cpu": 0.1}, "replicas": 2})

    async def use(address: str) -> None:
        routers = await all_healthy(2)
        assert {each["clients"] for each in routers} == {address}, "the kernel chooses the router of a connection"
        names, url = [f"request-{number}" for number in range(8)], f"http://{routers[0]['http']}"

        async def ask(name: str) -> int:
            body = {"prompt": [5, 6, 7], "max_tokens": 2000}
            async with (
                aiohttp.ClientSession(headers={"idempotency-key": name}) as session,  # with a connection of its own
                session.post(f"{url}/v1/completions", json=body) as answer,
            ):
                return answer.status

        while True:  # until both routers have some; once is enough but for 1 in 128 times
            asked = [asyncio.create_task(ask(name)) for name in names]
            stats = []
            while sum(stats) < len(names):
                await asyncio.sleep(0.1)
                stats = [each["running"] for each in await asyncio.to_thread(each_router, "stats")]
            if min(stats):
                break
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        async with AsyncClient(address) as client, aiohttp.ClientSession() as session:
            assert await client.abort("another") == 0
            assert [await client.abort(name) for name in names[:4]] == [1] * 4
            for name in names[4:]:
                body = {"request_id": f"cmpl-{name}"}
                async with session.post(f"{url}/abort", json=body) as answer:
                    assert await answer.json() == {"aborted": 1}
            assert await asyncio.gather(*asked) == [499] * 8
            assert await client.abort(names[0]) == 0
        assert not any(each["running"] for each in await asyncio.to_thread(each_router, "stats"))

    use_deployed(config, use, **LOADERS | {"verifier": slow_verifier})
