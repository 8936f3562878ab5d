"""A router's process without Serve: what it does at its start and at its end."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from dendro.client import AsyncClient

from cluster import app
from cluster.app import RouterShell
from cluster.config import Config
from tests.support.redis_groups import free_ports
from tests.support.serve_handles import FakeHandle, no_replica
from tests.support.sockets import until
from tests.support.toy_cluster import toy_config, toy_ingress


class Shell(RouterShell):
    """A router whose end is awaited by the test, not by Serve."""

    def __del__(self) -> None:
        return

    def runs(self) -> bool:
        """Whether a request runs here."""
        return self._server.stats()["running"] > 0

    async def end(self) -> None:
        await RouterShell.__del__(self)


async def started(config: Config) -> Shell:
    shell, targets = Shell.__new__(Shell), {"toy": FakeHandle(no_replica)}
    await shell.__init__(config, "redis://127.0.0.1:1", targets, {"helper": FakeHandle(no_replica)}, toy_ingress)
    return shell


async def healthz_of(shell: Shell) -> tuple[int, dict[str, str]]:
    address = (await shell.addresses())["status"]
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/healthz") as answer:
        return answer.status, (await answer.json())["faults"]


@pytest.fixture
def _in_this_process(monkeypatch):
    """No change to what all tests of this process share: its log's level and its garbage collector."""
    monkeypatch.setattr(app, "log_to_serve_file", lambda: None)
    monkeypatch.setattr(app, "freeze_loaded", lambda: None)


@pytest.mark.usefixtures("_in_this_process")
async def test_a_router_starts_while_one_of_the_same_configuration_drains_and_says_so():
    grpc, http, status = free_ports(3)
    config = toy_config(
        grpc={"port": grpc, "status_port": status},
        http={"port": http},
        router={"resources": {"cpu": 0.1}, "drain_s": 60.0},
    )
    old = await started(config)
    async with AsyncClient((await old.addresses())["clients"], timeout_s=60) as client:
        asked = asyncio.ensure_future(client.generate_text([5, 6, 7], max_new_tokens=5))
        await until(old.runs)
        ending = asyncio.create_task(old.end())
        async with asyncio.timeout(20):
            while "new requests" not in (await healthz_of(old))[1]:  # noqa: ASYNC110  # it sets no event
                await asyncio.sleep(0.01)
        new = await started(config)
        found = [await shell.addresses() for shell in (old, new)]
        assert not ending.done() and old.runs()
        (drains, its), (starts, faults) = [await healthz_of(shell) for shell in (old, new)]
        assert drains == starts == 503 and its != faults, "each has a status port of its own"
        assert "drains" in its["new requests"]
        assert found[0]["clients"] == found[1]["clients"] and found[0]["status"] != found[1]["status"]
        asked.cancel()
        await asyncio.wait({asked})
    await asyncio.gather(ending, new.end())
