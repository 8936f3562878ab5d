"""What a key past its limit costs the others: a cluster with keys and TLS, and a process that sends far too much.

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.rate_limit_bars

Prints a Markdown table. One key may send 300 requests a minute, and a niced process sends 250 a second with it, half of
them over connections that are kept, half each over a TLS connection of its own. A client with another key asks one
request after another, first of the idle cluster, then beside the flood.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import ssl
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc
from dendro.client import AsyncClient, Round

from cluster import deploy
from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.config import demo_config
from cluster.router.allowance import KeyLimits
from cluster.running import running_cluster
from tests.support.certificates import Authority

ALLOWED = 300
"""Requests a minute of the flooding key."""
RATE = 250
"""Requests a second that it sends."""
FLOOD_S = 75
"""Longer than a minute, so that the limit is given twice at most."""
KEPT = 25
"""Connections that are kept, over each of which go RATE / 2 / KEPT requests a second."""
IDLE_REQUESTS = 100
PAUSE_S = 0.2
MOST = 1.5
"""The bar of the median first token beside the flood over that of the idle cluster."""
PROMPT = "def area(radius):\n    return"
BODY = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()


def head_of(key: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    return "\r\n".join([*lines, f"authorization: Bearer {key}", f"content-length: {len(BODY)}", "", ""]).encode()


class Flood:
    """The process that sends too much."""

    def __init__(self, address: str, authority: str, key: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port, self._tls = int(port), ssl.create_default_context(cafile=authority)
        self._request = head_of(key) + BODY
        self.statuses: Counter[str] = Counter()

    async def _ask(self, stream: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        reader, writer = stream
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(each[15:]) for each in head.lower().split(b"\r\n") if each.startswith(b"content-length:"))
        await reader.readexactly(length)
        self.statuses[head.split()[1].decode()] += 1

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls)

    async def _keep(self, end_s: float, number: int) -> None:
        stream, every_s = await self._open(), KEPT / (RATE / 2)
        due_s = time.monotonic() + every_s * number / KEPT
        while due_s < end_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self._ask(stream)
            due_s += every_s
        stream[1].close()

    async def _anew(self) -> None:
        try:
            stream = await self._open()
            await self._ask(stream)
            stream[1].close()
        except OSError:
            self.statuses["no connection"] += 1

    async def run(self) -> None:
        began_s = time.monotonic()
        kept = [asyncio.create_task(self._keep(began_s + FLOOD_S, number)) for number in range(KEPT)]
        others: set[asyncio.Task[None]] = set()
        sent = 0
        while (elapsed_s := time.monotonic() - began_s) < FLOOD_S:
            while sent < elapsed_s * RATE / 2:
                sent += 1
                others.add(task := asyncio.create_task(self._anew()))
                task.add_done_callback(others.discard)
            await asyncio.sleep(0.004)
        await asyncio.gather(*kept, *others)
        total = self.statuses.total()
        print(json.dumps({"statuses": self.statuses, "seconds": time.monotonic() - began_s, "requests": total}))


async def first_token_s(client: AsyncClient) -> float:
    began_s = time.monotonic()
    async for event in client.generate(PROMPT, max_new_tokens=8):
        if isinstance(event, Round):
            return time.monotonic() - began_s
    raise AssertionError("an answer without a round")


async def asked(client: AsyncClient, count: int | None, until: asyncio.Task[object] | None = None) -> list[float]:
    times: list[float] = []
    while len(times) < count if count is not None else not (until and until.done()):
        times.append(await first_token_s(client))
        await asyncio.sleep(PAUSE_S)
    return times


async def measured(folder: Path) -> None:
    authority = Authority(folder)
    (within, first), (flooding, second) = (
        new_key(name, name, limits)
        for name, limits in (("within", KeyLimits()), ("flood", KeyLimits(requests_per_minute=ALLOWED)))
    )
    write_keys(folder / "keys.json", ApiKeys(keys=(first, second)))
    tls = {"clients": authority.issue("front", "127.0.0.1")}
    fields = demo_config().model_dump(mode="json", exclude_unset=True)
    config = type(demo_config()).model_validate(fields | {"auth": {"keys": folder / "keys.json"}, "tls": tls})
    credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
    async with running_cluster(config) as address, AsyncClient(address, key=within, credentials=credentials) as client:
        (router,) = await asyncio.to_thread(deploy.router_addresses)
        await asked(client, 30)
        idle = await asked(client, IDLE_REQUESTS)
        words = ["-m", "tests.rate_limit_bars", router["http"], str(authority.path), flooding]
        child = await asyncio.create_subprocess_exec("nice", "-n", "19", sys.executable, *words, stdout=-1)
        ended = asyncio.create_task(child.communicate())
        beside = await asked(client, None, ended)
        flood = json.loads((await ended)[0])
    report(idle, beside, flood)


def report(idle: list[float], beside: list[float], flood: dict) -> None:
    first, second = (1e3 * statistics.median(times) for times in (idle, beside))
    given, rest = flood["statuses"].get("200", 0), flood["statuses"].get("429", 0)
    most = ALLOWED * (1 + FLOOD_S // 60)
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    print(f"{time.strftime('%Y-%m-%d', time.gmtime())}, {model.partition(': ')[2]}, {os.cpu_count()} cores, ", end="")
    print(f"Python {platform.python_version()}\n\n| figure | value | bar |\n|---|---|---|")
    print(f"| requests a second that were sent | {flood['requests'] / flood['seconds']:.0f} | |")
    print(f"| answered with 200, in {flood['seconds']:.0f} s | {given} | at most {most} |")
    print(f"| answered with 429 | {rest} | |")
    print(f"| other ends | {flood['requests'] - given - rest} | 0 |")
    print(f"| first token of the other key, median of {len(idle)}, idle cluster | {first:.1f} ms | |")
    print(f"| first token of the other key, median of {len(beside)}, beside the flood | {second:.1f} ms | |")
    print(f"| ratio | {second / first:.2f} | at most {MOST} |")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        asyncio.run(Flood(*sys.argv[1:]).run())
    else:
        with tempfile.TemporaryDirectory() as name:
            asyncio.run(measured(Path(name)))
