"""What the surface costs: HTTP with TLS, keys, metrics and traces beside bare gRPC, in clusters of the same models.

Each way has a cluster of its own, in a process of its own, and blocks of the two take turns. Clients of both are in the
bench's process. A collector that counts what it gets takes the traces, and the metrics are read every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp
from aiohttp import web
from dendro.answer import collect_stream
from dendro.client import AsyncClient
from dendro.errors import BadRequest, EngineFailed

from cluster import deploy
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.config import Auth, Config
from cluster.measure.load import LoadBlock, Prompt, closed_load, percentiles, ratio
from cluster.measure.measurement import Step
from cluster.measure.processes import Call, ContenderProcess, Reply, serve_calls
from cluster.measure.report import Row
from cluster.measure.speed import Identity
from cluster.measure.turns import estimate
from cluster.router.allowance import KeyLimits
from cluster.running import running_cluster
from cluster.sections import ClientTls, Tls, TraceExport

BARE, WHOLE = "gRPC", "HTTP, TLS, keys, metrics, traces"
SURFACE = "surface"
"""These blocks, among what is judged."""
SCRAPE_S = 5.0
"""Seconds between two readings of the metrics."""


@dataclass(frozen=True, slots=True)
class DoorAnswer:
    """An answer as a client saw it."""

    text: str
    tokens: int
    times_s: tuple[float, ...]  # the call, then each part with text


class MeasuredDoor(Protocol):
    """A way into a cluster."""

    async def answer(self, prompt: Prompt, tokens: int, speculation: str, seed: int) -> DoorAnswer:
        """The greedy answer of so many tokens."""
        ...

    async def stats(self) -> Mapping[str, int]:
        """Counters of the router."""
        ...

    def watched(self) -> contextlib.AbstractAsyncContextManager[None]:
        """What else is asked of the cluster while it is measured."""
        ...


class _ClusterDoor:
    """The process of a cluster, of which one way in is used."""

    def __init__(self, process: ContenderProcess) -> None:
        self._process = process

    async def stats(self) -> Mapping[str, int]:
        return await self._process.call(SURFACE)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        yield


class GrpcDoor(_ClusterDoor):
    """The client library."""

    def __init__(self, process: ContenderProcess, client: AsyncClient) -> None:
        super().__init__(process)
        self._client = client

    async def answer(self, prompt: Prompt, tokens: int, speculation: str, seed: int) -> DoorAnswer:
        times = [time.perf_counter()]
        events = self._client.generate(
            prompt, max_new_tokens=tokens, ignore_end=True, speculation=speculation, temperature=0.0, seed=seed
        )
        done = await collect_stream(events, lambda part: times.append(time.perf_counter()))
        return DoorAnswer(done.text, len(done.token_ids), tuple(times))


class HttpDoor(_ClusterDoor):
    """A client of OpenAI's HTTP API that keeps its connections."""

    def __init__(self, process: ContenderProcess, session: aiohttp.ClientSession, address: str, status: str) -> None:
        super().__init__(process)
        self._session = session
        self._address = address
        self._status = status

    async def answer(self, prompt: Prompt, tokens: int, speculation: str, seed: int) -> DoorAnswer:
        fields = {
            "prompt": list(prompt),
            "max_tokens": tokens,
            "ignore_end": True,
            "temperature": 0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "dendro": {"speculation": speculation},
        }
        times, texts, used = [time.perf_counter()], [], 0
        async with self._session.post(f"{self._address}/v1/completions", json=fields) as response:
            if response.status != 200:
                raise EngineFailed(f"{WHOLE}: {response.status} {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                part = json.loads(line[6:])
                if "error" in part:
                    raise EngineFailed(f"{WHOLE}: {part['error']}")
                if part["choices"] and (text := part["choices"][0]["text"]):
                    times.append(time.perf_counter())
                    texts.append(text)
                used = (part.get("usage") or {}).get("completion_tokens", used)
        return DoorAnswer("".join(texts), used, tuple(times))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        scraping = asyncio.create_task(self._scrape())
        try:
            yield
        finally:
            scraping.cancel()
            await asyncio.wait({scraping})

    async def _scrape(self) -> None:
        while True:
            async with self._session.get(f"http://{self._status}/metrics") as response:
                await response.read()
            await asyncio.sleep(SCRAPE_S)


@dataclass(frozen=True, slots=True)
class SurfacePlan:
    """What is measured."""

    prompts: tuple[Prompt, ...]
    tokens: int
    clients: tuple[int, ...]
    ways: tuple[str, ...]  # `speculation` of requests
    answers: int  # answers of every client of a block
    pairs: int  # pairs of blocks of each load

    @property
    def blocks(self) -> int:
        return 2 * self.pairs * len(self.clients) * len(self.ways)


async def measure_surface(
    plan: SurfacePlan, doors: Mapping[str, MeasuredDoor], identity: Identity, step: Step
) -> list[LoadBlock]:
    """All blocks. Of a pair, the way that comes first changes. identity: compares the texts of answers"""
    blocks: list[LoadBlock] = []
    texts: dict[int, str] = {}  # the first answer's by its prompt

    async def closed(block: LoadBlock, clients: int, answers: int, speculation: str) -> LoadBlock:
        door = doors[block.way]

        async def one(index: int) -> None:
            for turn in range(answers):
                number = (index + turn * clients) % len(plan.prompts)
                done = await door.answer(plan.prompts[number], plan.tokens, speculation, number)
                if done.tokens != plan.tokens:
                    raise EngineFailed(f"{block.way}: {done.tokens} tokens instead of {plan.tokens}")
                block.tokens += done.tokens
                block.first_s.append(done.times_s[1] - done.times_s[0])
                block.between_s += [now - then for then, now in zip(done.times_s[1:], done.times_s[2:], strict=False)]
                name = f"{block.load}, {block.way}, prompt {number + 1}"
                identity.compare(name, done.text.encode(), texts.setdefault(number, done.text).encode())

        before = await door.stats()
        async with door.watched():
            used_us, began = time.process_time_ns() // 1000, time.perf_counter()
            await asyncio.gather(*map(one, range(clients)))
            block.seconds = time.perf_counter() - began
            block.client_us = time.process_time_ns() // 1000 - used_us
        after = await door.stats()
        block.router_us = after["cpu_us"] - before["cpu_us"]
        block.rounds = after["rounds"] - before["rounds"]
        return block

    for speculation in plan.ways:
        for clients in plan.clients:
            load = f"{closed_load(clients)}, {speculation}"
            for way in doors:
                await closed(LoadBlock(way, load, -1), clients, 1, speculation)
            for pair in range(plan.pairs):
                for way in list(doors) if pair % 2 else list(doors)[::-1]:
                    blocks.append(await closed(LoadBlock(way, load, pair), clients, plan.answers, speculation))
                    step()
    return blocks


def surface_rows(blocks: Sequence[LoadBlock]) -> list[Row]:
    """A row for each load and way."""
    rows = []
    for load in dict.fromkeys(block.load for block in blocks):
        for way in (BARE, WHOLE):
            mine = [block for block in blocks if (block.load, block.way) == (load, way)]
            row: Row = {
                "load": load,
                "judged": SURFACE,
                "clients": None,
                "share": None,
                "name": way,
                "tokens_per_second": estimate([block.rate for block in mine]),
                "first_token_ms": percentiles([each for block in mine for each in block.first_s]),
                "between_parts_ms": percentiles([each for block in mine for each in block.between_s]),
                "router_ms": estimate([block.router_ms for block in mine]),
                "client_ms": estimate([block.client_us / 1e3 / block.rounds for block in mine]),
            }
            if way == WHOLE:
                row["over_bare"] = ratio(blocks, load, WHOLE, BARE).as_json()
            rows.append(row)
    return rows


@asynccontextmanager
async def both_doors(config: Config) -> AsyncIterator[tuple[dict[str, MeasuredDoor], Callable[[], int]]]:
    """Yields both ways, each into a cluster of its own, and the number of times that traces were sent. Raises
    BadRequest where openssl is missing, which makes the certificate."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dendro-surface-")))
        text, key = new_key("bench", "bench", KeyLimits())
        write_keys(folder / "keys.json", ApiKeys(keys=(key,)))
        tls, (endpoint, sent) = self_signed(folder), await stack.enter_async_context(_collector())
        bare = config.private()
        sections = {
            "auth": Auth(keys=folder / "keys.json"),
            "tls": Tls(clients=tls),
            "trace": TraceExport(endpoint=endpoint),
        }
        whole = bare.model_copy(update=sections)
        plain = await stack.enter_async_context(_process(bare, BARE))
        full = await stack.enter_async_context(_process(whole, WHOLE))
        client = await stack.enter_async_context(AsyncClient(plain.facts["clients"], proxy=False))
        session = aiohttp.ClientSession(
            headers={"authorization": f"Bearer {text}"},
            connector=aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context(cafile=tls.certificate)),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        await stack.enter_async_context(session)
        doors: dict[str, MeasuredDoor] = {
            BARE: GrpcDoor(plain, client),
            WHOLE: HttpDoor(full, session, f"https://{full.facts['http']}", full.facts["status"]),
        }
        yield doors, sent


def self_signed(folder: Path) -> ClientTls:
    """A certificate for this machine, and its key, made in a folder."""
    made = ClientTls(certificate=folder / "bench.crt", key=folder / "bench.key")
    openssl = shutil.which("openssl")
    if openssl is None:
        raise BadRequest("surface", "needs the command openssl, which makes a certificate")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(made.key), "-out", str(made.certificate))
    subprocess.run([openssl, "req", "-x509", *curve, *names, *files], check=True, capture_output=True)
    return made


@asynccontextmanager
async def _collector() -> AsyncIterator[tuple[str, Callable[[], int]]]:
    """Yields the endpoint of a collector of traces, and the number of requests that it got."""
    requests = 0

    async def take(request: web.Request) -> web.Response:
        nonlocal requests
        await request.read()
        requests += 1
        return web.Response()

    pages = web.Application()
    pages.router.add_post("/v1/traces", take)
    runner = web.AppRunner(pages, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces", lambda: requests
    finally:
        await runner.cleanup()


def _process(config: Config, way: str) -> ContenderProcess:
    fields = json.dumps(config.model_dump(mode="json", exclude_unset=True))
    return ContenderProcess(f"the cluster of {way}", __name__, [fields], os.environ, keep_log=True)


def _serve(config: Config) -> None:
    """Run a cluster until the end of standard input; its calls are answered by the router's counters."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends after it has stopped the cluster
    with asyncio.Runner() as runner:
        cluster = running_cluster(config)

        def load() -> tuple[Reply, Callable[[Call], Reply]]:
            runner.run(cluster.__aenter__())
            (addresses,) = deploy.router_addresses()
            return dict(addresses), lambda _: dict(deploy.deployment_stats("router"))

        serve_calls(load)
        runner.run(cluster.__aexit__(None, None, None))


if __name__ == "__main__":
    _serve(Config.model_validate_json(sys.argv[1]))
