"""What the surface costs: HTTP with TLS, keys, metrics and traces beside bare gRPC, in clusters of the same models.

Each way has a cluster of its own, in a process of its own, and blocks of the two take turns. Clients of both are in the
bench's process. A collector that counts what it gets takes the traces, and the metrics are read every few seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import aiohttp
from aiohttp import web
from dendro.answer import Completion
from dendro.client import AsyncClient
from dendro.errors import BadRequest, EngineFailed

from cluster import deploy
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.config import Config
from cluster.measure.load import GrpcDoor, LoadAnswer, LoadBlock, LoadedDoor, Stats, percentiles, ratio, times_row
from cluster.measure.ours import TenantClients
from cluster.measure.processes import Call, ContenderProcess, Reply, contender_process, serve_calls
from cluster.measure.report import Row
from cluster.measure.statistics import estimate
from cluster.router.allowance import KeyLimits
from cluster.running import running_cluster
from cluster.sections import Auth, ClientTls, Tls, TraceExport

BARE, WHOLE = "gRPC", "HTTP, TLS, keys, metrics, traces"
SURFACE = "surface"
"""These blocks, among what is judged."""
SCRAPE_S = 5.0
"""Seconds between two readings of the metrics."""


@dataclass(frozen=True, slots=True)
class HttpDoor:
    """A client of OpenAI's HTTP API that keeps its connections."""

    session: aiohttp.ClientSession
    stats: Stats
    address: str
    status: str  # address of the metrics

    async def answer(self, prompt: Sequence[int], tokens: int, speculation: str, seed: int) -> LoadAnswer:
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
        async with self.session.post(f"{self.address}/v1/completions", json=fields) as response:
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
        return by_part("".join(texts), used, times)

    async def watch(self) -> None:
        """Reads the metrics."""
        while True:
            async with self.session.get(f"http://{self.status}/metrics") as response:
                await response.read()
            await asyncio.sleep(SCRAPE_S)


def by_part(text: str, tokens: int, times: Sequence[float]) -> LoadAnswer:
    """The answer as its text. times: of the call, then of each part with text"""
    return LoadAnswer(text.encode(), tokens, times[1] - times[0], [now - then for then, now in pairwise(times[1:])])


def bare_door(client: AsyncClient, stats: Stats) -> GrpcDoor:
    """The client library. Times between parts are those between rounds."""

    def read(done: Completion, times: Sequence[float]) -> LoadAnswer:
        return by_part(done.text, len(done.token_ids), times)

    return GrpcDoor(TenantClients(client, None), stats, read=read)


def surface_rows(blocks: Sequence[LoadBlock]) -> list[Row]:
    """A row for each load and way."""
    rows = []
    for load in dict.fromkeys(block.load for block in blocks):
        bare, whole = ([each for each in blocks if (each.load, each.way) == (load, way)] for way in (BARE, WHOLE))
        for mine in (bare, whole):
            client_ms = [block.client_us / 1e3 / block.counters["router_rounds"] for block in mine]
            row = times_row(mine, SURFACE) | {
                "clients": None,
                "share": None,
                "between_parts_ms": percentiles([each for block in mine for each in block.between_s]),
                "router_ms": estimate([block.router_ms for block in mine]),
                "client_ms": estimate(client_ms),
            }
            rows.append(row)
        rows[-1]["over_bare"] = ratio(whole, bare)
    return rows


@asynccontextmanager
async def both_doors(config: Config) -> AsyncIterator[tuple[dict[str, LoadedDoor], Callable[[], int]]]:
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
        bare_stats, whole_stats = (partial(process.call, SURFACE) for process in (plain, full))
        doors: dict[str, LoadedDoor] = {
            BARE: bare_door(client, bare_stats),
            WHOLE: HttpDoor(session, whole_stats, f"https://{full.facts['http']}", full.facts["status"]),
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


def _process(config: Config, way: str) -> AbstractAsyncContextManager[ContenderProcess]:
    arguments = [config.model_dump_json(exclude_unset=True)]
    return contender_process(f"the cluster of {way}", __name__, arguments, os.environ, keep_log=True)


def router_stats() -> dict[str, int]:
    """Counters of this machine's router, as doors name them."""
    return {f"router_{name}": value for name, value in deploy.deployment_stats("router").items()}


def _serve() -> None:
    """Run a cluster until the end of standard input; its calls are answered by the router's counters."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends after it has stopped the cluster
    with asyncio.Runner() as runner:
        running = AsyncExitStack()

        def load(text: str) -> tuple[Reply, Callable[[Call], Reply]]:
            runner.run(running.enter_async_context(running_cluster(Config.model_validate_json(text))))
            (addresses,) = deploy.router_addresses()
            return dict(addresses), lambda _: router_stats()

        serve_calls(load)
        runner.run(running.aclose())


if __name__ == "__main__":
    _serve()
