"""Health of a router: it names what it has lost, and says whether it still serves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from dendro.client import AsyncClient
from dendro.errors import DendroError

from cluster import deploy, redis_server
from cluster.api.health import HealthReport, HealthWatch
from cluster.redis_server import RedisServer
from cluster.sessions import RedisSessions
from tests.cluster.test_routers import each_of, each_router, page_at
from tests.support.fakes import FakeVerifier, plain
from tests.support.scraped import total
from tests.support.toy_cluster import LOADERS, toy_config


class LostParts:
    """Probes, whose reasons a test sets."""

    def __init__(self) -> None:
        self.reasons = dict.fromkeys(("a", "b", "store"), "")
        self.reports: list[HealthReport] = []

    def probe(self, name):
        async def found() -> str:
            return self.reasons[name]

        return found

    async def changed(self, report: HealthReport) -> None:
        self.reports.append(report)

    def watch(self) -> HealthWatch:
        return HealthWatch({name: self.probe(name) for name in ("a", "b")}, self.probe("store"), self.changed)


@pytest.mark.parametrize(
    ("lost", "serving", "parts"),
    [
        ((), True, set()),
        (("a",), True, {"target a"}),
        (("a", "b"), False, {"target a", "target b"}),
        (("store",), True, {"redis"}),
        (("b", "store"), True, {"target b", "redis"}),
    ],
)
async def test_a_router_serves_while_one_of_its_targets_does_and_names_each_part_that_is_lost(lost, serving, parts):
    found = LostParts()
    found.reasons.update(dict.fromkeys(lost, "does not answer"))
    watch = found.watch()
    assert not watch.report.serving, "before the first check"
    await watch.check()
    assert (watch.report.serving, set(watch.report.faults)) == (serving, parts)
    assert all("does not answer" in why for why in watch.report.faults.values())


async def test_health_is_reported_when_it_changes():
    found = LostParts()
    watch = found.watch()
    for reason in ("", "", "no replica answers", "no replica answers", ""):
        found.reasons.update(a=reason, b=reason)
        await watch.check()
    assert [report.serving for report in found.reports] == [True, False, True]


async def test_the_loss_of_redis_is_noticed_and_what_it_means_is_reported(monkeypatch):
    monkeypatch.setattr(redis_server, "RESTART_S", 60.0)
    with RedisServer(memory_mb=16) as server:
        sessions = RedisSessions(server.url, 60, budget_s=5.0)
        assert await sessions.fault() == ""
        os.kill(server.pid, signal.SIGKILL)
        assert (await sessions.fault()).startswith("the store fails")
    watch = HealthWatch({"a": LostParts().probe("a")}, sessions.fault, LostParts().changed)
    await watch.check()
    assert watch.report.serving and watch.report.faults["redis"].endswith(
        "requests with a session fail; others are served"
    )
    await sessions.close()


def verifier_unless_held(name, model, states) -> FakeVerifier:
    """Waits while the file exists whose path is in the environment, as one that loads a large model does."""
    while Path(os.environ["TOY_HOLD"]).exists():
        time.sleep(0.05)
    return FakeVerifier(pause_s=0.002)


async def health_once(wanted) -> tuple[int, dict]:
    """The health of the only router, once it is as wanted."""
    async with asyncio.timeout(60):
        while True:
            (router,) = await asyncio.to_thread(each_router, "addresses")
            status, text = await page_at(router["status"], "/healthz")
            report = json.loads(text)
            if wanted(status, report):
                return status, report
            await asyncio.sleep(0.2)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(300)  # starting Ray alone may take more than 100 s beside another test's Ray
def test_a_router_without_its_verifier_or_without_redis_says_so_and_serves_what_it_can(monkeypatch, tmp_path):
    hold = tmp_path / "hold"
    monkeypatch.setenv("TOY_HOLD", str(hold))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    async def use(addresses: str, redis: RedisServer) -> None:
        _, report = await health_once(lambda status, report: status == 200)
        assert report == {"serving": True, "faults": {}}
        (verifier,) = await asyncio.to_thread(each_of, "verifier-toy", "stats")
        hold.touch()
        os.kill(verifier["pid"], signal.SIGKILL)
        status, report = await health_once(lambda status, report: status == 503)
        assert "no replica answers" in report["faults"]["target toy"] and not report["serving"]
        hold.unlink()
        await health_once(lambda status, report: report == {"serving": True, "faults": {}})
        redis.stop()
        status, report = await health_once(lambda status, report: report["faults"])
        assert status == 200 and report["serving"] and set(report["faults"]) == {"redis"}
        async with AsyncClient(addresses, timeout_s=5.0) as client:
            done = await client.generate_text([5, 6, 7], max_new_tokens=9)
            assert list(done.token_ids) == plain([5, 6, 7], 9)
            with pytest.raises(DendroError):
                await client.generate_text([5, 6, 7], max_new_tokens=9, keep_session=True)
        (router,) = await asyncio.to_thread(each_router, "addresses")
        _, page = await page_at(router["status"], "/metrics")
        assert total(page, "dendro_router_fault", part="redis") == total(page, "dendro_router_serving") == 1
        assert total(page, "dendro_redis_calls_total", store="sessions", outcome="failed") >= 1

    with RedisServer() as server:
        addresses = deploy.start(toy_config(), server.url, **LOADERS | {"verifier": verifier_unless_held})
        try:
            asyncio.run(use(addresses, server))
        finally:
            deploy.stop()
