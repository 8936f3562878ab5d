"""Faults amid ordered and prepared trees, with each router, drafter and verifier in a process of its own: the tokens
are those of `off`, and no process that lives keeps anything of the answer, nor a connection to one that is gone."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil
import pytest
from dendro.answer import Round, SpeculationStats
from dendro.client import AsyncClient

from tests.support.real_peers import SLOW_S, PeerProcess, PeerProcesses, make_models, real_peers

PROMPT = [10, 20, 30, 40, 7, 8, 9, 200, 150, 151]
COUNT = 300
ASKED = {"max_new_tokens": COUNT, "temperature": 1.0, "seed": 5, "ignore_end": True}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    with real_peers(make_models(tmp_path_factory.mktemp("models"))) as found:
        yield found


class Cluster:
    """Two routers, two verifiers and two replicas of each drafter. Answers of two drafters have trees of both."""

    def __init__(self, parts: PeerProcesses, drafters: Sequence[str] = ("own",), **options: float) -> None:
        """options: of the routers"""
        self.verifiers = [parts.start("verifier") for _ in range(2)]
        pools = {name: [parts.start("drafter", name=name) for _ in range(2)] for name in drafters}
        self.routers = [parts.router(self.verifiers, pools, **options) for _ in range(2)]
        self.drafters = [part for pool in pools.values() for part in pool]
        self._speculation = f"{drafters[0]}:(1,1)" if len(drafters) == 1 else "auto"
        self._early = "prepared" if "other" in drafters else "sent"  # what an answer had before a fault
        self._expected: list[int] = []

    async def trees(self) -> Counter[str]:
        """Trees of orders with which rounds began; those of them that were sent before their verdict; and answers of
        drafters that were prepared before their call. A drafter behind a bridge sends none before its call."""
        verifiers = [await part.ask("stats") for part in self.verifiers]
        drafters = [await part.ask("stats") for part in self.drafters]
        ordered = sum(each["ordered"] - each["ordered_missed"] - each["ordered_dropped"] for each in verifiers)
        sent, prepared = (sum(each["prepared_used"] for each in stats) for stats in (verifiers, drafters))
        return Counter(ordered=ordered, sent=sent, prepared=prepared)

    async def strike(self, fault: Callable[[], Awaitable[bool]]) -> SpeculationStats:
        """Ask until the fault struck amid ordered rounds of which some had prepared trees, in the first half of an
        answer: one may end before it had such a tree. Returns that answer's statistics.

        fault: returns False if it did not strike"""
        async with AsyncClient(",".join(part.address for part in self.routers)) as client:
            if not self._expected:
                self._expected = list((await client.generate_text(PROMPT, speculation="off", **ASKED)).token_ids)
            for _ in range(20):
                before, struck, ids = await self.trees(), False, []
                async for event in client.generate(PROMPT, speculation=self._speculation, **ASKED):
                    if isinstance(event, Round):
                        ids += event.token_ids
                        if not struck and len(ids) < COUNT / 2:
                            new = await self.trees() - before
                            # The router may be far ahead of its client. There are more rounds than COUNT / 3.
                            early = 3 < new["ordered"] < COUNT / 6
                            struck = early and new[self._early] > 0 and await fault()
                    else:
                        complete = event
                assert ids == self._expected
                if struck:
                    return complete.speculation
        raise AssertionError("no tree was ordered, or none was prepared")

    async def keeps_nothing(self, *parts: PeerProcess) -> None:
        """Wait until the parts, by default all, hold nothing of any text, and have at most a connection to each part of
        another kind."""
        gc.collect()  # ends the connections of a client that was closed
        kinds = self.verifiers, self.drafters, self.routers
        for kind in kinds:
            most = sum(map(len, kinds)) - len(kind)
            for part in [each for each in kind if not parts or each in parts]:
                await reports(part, lambda stats: not held(stats), 30)
                async with asyncio.timeout(30):
                    while connections(part) > most:  # noqa: ASYNC110  # another process makes it true
                        await asyncio.sleep(0.02)

    async def goes_on(self) -> None:
        """The replicas hold nothing, and later answers have ordered trees."""
        await self.keeps_nothing()
        await self.strike(nothing)
        await self.keeps_nothing()


async def reports(part: PeerProcess, holds: Callable[[dict[str, Any]], bool], timeout_s: float) -> None:
    """Wait until a part's statistics are as wanted. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not holds(await part.ask("stats")):  # noqa: ASYNC110  # another process makes it true
            await asyncio.sleep(0.02)


def held(stats: dict[str, Any]) -> dict[str, int]:
    """What a replica holds of texts."""
    kept = ("sessions", "open_openings", "open_leases", "awaited", "pages_held", "bridged", "running")
    used = {
        free: stats[all_] - stats[free]
        for free, all_ in (("free_slots", "slots"), ("free_nodes", "nodes"))
        if free in stats
    }
    return {name: count for name, count in ({name: stats.get(name, 0) for name in kept} | used).items() if count}


def connections(part: PeerProcess) -> int:
    """Number of a process's connections, without those to its control port."""
    control, found = int(part.control.rpartition(":")[2]), psutil.Process(part.pid).net_connections("tcp")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port != control for each in found)


async def slowed(part: PeerProcess) -> None:
    """Let a process stand still three times, for less time than others wait for it."""
    for _ in range(3):
        part.send(signal.SIGSTOP)
        await asyncio.sleep(SLOW_S)
        part.send(signal.SIGCONT)
        await asyncio.sleep(SLOW_S / 4)


async def nothing() -> bool:
    return True


async def busy(parts: list[PeerProcess]) -> PeerProcess | None:
    """The replica or router that works for the answer."""
    found = [(await part.ask("stats"), part) for part in parts]
    return next((part for stats, part in found if stats.get("open_openings") or stats.get("running")), None)


@pytest.mark.parametrize(
    "drafters, fault",
    [
        ("own", "killed"),
        ("own", "stopped"),
        ("own", "slow"),
        ("other", "killed"),
        pytest.param("own", "drained", marks=pytest.mark.long),
        pytest.param("other", "stopped", marks=pytest.mark.long),
        pytest.param("own other", "killed", marks=pytest.mark.long),
    ],
)
async def test_a_fault_of_a_drafter_amid_ordered_trees_changes_no_token_and_leaves_nothing(parts, drafters, fault):
    """`other` has other tokens, and stands behind a bridge."""
    cluster, struck = Cluster(parts, drafters.split()), []

    async def strike() -> bool:
        if (part := await busy(cluster.drafters)) is None:
            return False
        struck.append(part)
        if fault == "killed":
            cluster.drafters.remove(part)
            part.send(signal.SIGKILL)
        elif fault == "stopped":
            part.send(signal.SIGSTOP)
        else:
            await part.ask({"slow": "slow", "drained": "stop"}[fault])
        return True

    stats = await cluster.strike(strike)
    assert stats.late_drafts > 0 and stats.verifier_moves == 0
    if fault == "stopped":
        struck[0].send(signal.SIGCONT)
    await (cluster.keeps_nothing() if fault == "slow" else cluster.goes_on())


@pytest.mark.parametrize(
    "fault",
    [
        "killed",
        "stopped",
        "slow",
        "lie",
        pytest.param("drained", marks=pytest.mark.long),
        pytest.param("lie to the drafter", marks=pytest.mark.long),
    ],
)
async def test_a_fault_of_a_verifier_amid_ordered_trees_changes_no_token_and_leaves_nothing(parts, fault):
    cluster, later = Cluster(parts, step_s=2.0), []

    async def resumed(part: PeerProcess) -> None:
        """A verifier that was stopped goes on with its order once another has the text."""
        (other,) = [each for each in cluster.verifiers if each is not part]
        begun = (await other.ask("stats"))["ordered"]
        with suppress(TimeoutError):
            await reports(other, lambda stats: stats["ordered"] >= begun + 3, 10)
        part.send(signal.SIGCONT)

    async def strike() -> bool:
        if (part := await busy(cluster.verifiers)) is None:
            return False
        if fault == "killed":
            cluster.verifiers.remove(part)
            part.send(signal.SIGKILL)
        elif fault == "stopped":
            part.send(signal.SIGSTOP)
            later.append(asyncio.create_task(resumed(part)))
        elif fault == "slow":
            await slowed(part)
        elif fault == "drained":
            later.append(asyncio.create_task(part.ask("stop")))
        else:
            await part.ask(fault)
        return True

    stats = await cluster.strike(strike)
    if fault == "lie to the drafter":
        assert stats.late_drafts > 0
    elif fault != "drained":
        assert (stats.verifier_moves > 0) is (fault != "slow")
    await asyncio.gather(*later)
    await cluster.goes_on()


async def test_a_router_that_is_slow_amid_ordered_trees_changes_no_token_and_leaves_nothing(parts):
    cluster = Cluster(parts)

    async def strike() -> bool:
        if (part := await busy(cluster.routers)) is None:
            return False
        await slowed(part)
        return True

    stats = await cluster.strike(strike)
    assert stats.verifier_moves == 0
    await cluster.goes_on()


@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=pytest.mark.long)])
async def test_nothing_of_a_lost_router_stays_while_its_order_is_held_and_another_goes_on_with_its_text(parts, fault):
    """Replicas detect a router that hangs by its missing answers to pings."""
    cluster, lost = Cluster(parts, draft_timeout_ms=60_000), []

    async def strike() -> bool:
        drafter, verifier, router = [
            await busy(each) for each in (cluster.drafters, cluster.verifiers, cluster.routers)
        ]
        if drafter is None or verifier is None or router is None:
            return False
        drafter.send(signal.SIGSTOP)
        try:
            await reports(verifier, lambda stats: stats["awaited"] > 0, 5)
        except TimeoutError:
            return False
        else:
            router.send(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
            lost.append(router)
            cluster.routers.remove(router)
            await cluster.keeps_nothing(*cluster.verifiers)
        finally:
            drafter.send(signal.SIGCONT)
        await cluster.keeps_nothing()
        return True

    await cluster.strike(strike)
    if fault == "stopped":
        lost[0].send(signal.SIGKILL)
    await cluster.goes_on()
