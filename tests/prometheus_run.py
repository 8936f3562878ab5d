"""Debian's Prometheus scrapes a running cluster, with the chart's alerts, and is asked every query of docs/metrics.md
and of the dashboard.

python -m tests.prometheus_run > docs/prometheus-run.md    starts a cluster of the bundled pair; takes about a minute
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from dendro.client import AsyncClient

from cluster.config import Config, demo_config
from cluster.engines import node_address
from cluster.running import running_cluster
from tests import metrics_page
from tests.support.chart import CHART

MONITORING = CHART / "monitoring"
PROMETHEUS = shutil.which("prometheus")
SCRAPED = 3
"""Scrapes after the last request."""
LIMIT_S = 90.0
"""Seconds in which Prometheus must have started, or have seen the requests."""
PROMPTS, TOKENS = ("def area(radius):", "The sky is", "import numpy as", "x = [1, 2"), 48


@dataclass(frozen=True)
class AskedQuery:
    """A query, where it is written, and how many series it gave."""

    place: str
    query: str
    series: int


@dataclass(frozen=True)
class PrometheusRun:
    """What Prometheus answered about a cluster, and what the cluster's clients got."""

    version: str
    targets: dict[str, str]  # health by address
    alerts: dict[str, tuple[str, str]]  # health and state of each rule
    queries: tuple[AskedQuery, ...]
    counted: float  # tokens of answers by the routers' metric
    received: int  # tokens that clients got


def every_query() -> list[tuple[str, str]]:
    """Each query with its place: of the page's tables, and of the dashboard's panels."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    shown = [(f"panel {panel['title']}", each["expr"]) for panel in panels for each in panel.get("targets", ())]
    written = [(each.name, each.query) for families in metrics_page.SECTIONS.values() for each in families]
    filled = {"$__rate_interval": "5m", "$target": ".*"}  # the dashboard's variables
    return [
        (place, functools.reduce(lambda query, each: query.replace(*each), filled.items(), query))
        for place, query in (*shown, *written)
    ]


def free_ports(count: int) -> int:
    """The first of some free ports in a row."""
    for first in range(21_000, 30_000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    raise OSError("no free ports")


@contextlib.contextmanager
def prometheus(targets: Sequence[str], folder: Path) -> Iterator[str]:
    """Yields the address of a Prometheus that scrapes these status ports each second, on the loopback alone."""
    shutil.copy(MONITORING / "alerts.yaml", folder / "alerts.yaml")
    given = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": "dendro", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(given))
    address = f"127.0.0.1:{free_ports(1)}"
    command = [
        str(PROMETHEUS),
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        until(lambda: answers(f"http://{address}/-/ready"), "Prometheus is ready")
        yield f"http://{address}"
    finally:
        running.terminate()
        running.wait(30)


def until(holds: Any, what: str) -> None:
    """Wait, LIMIT_S at most."""
    ends = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > ends:
            raise TimeoutError(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def asked(address: str, path: str, **fields: str) -> Any:
    """The data of an answer of Prometheus' API. Raises HTTPError for a query that it refuses."""
    url = f"{address}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)["data"]


def total_of(address: str, query: str) -> float:
    """The value of a query that gives one, or 0 where it gives none."""
    found = asked(address, "query", query=query)["result"]
    return float(found[0]["value"][1]) if found else 0.0


async def requested(address: str) -> int:
    """Ask for some answers. Returns the number of their tokens."""
    async with AsyncClient(address, proxy=False) as client:
        done = [
            await client.generate_text(each, max_new_tokens=TOKENS, temperature=t) for each in PROMPTS for t in (0, 1)
        ]
    return sum(len(each.token_ids) for each in done)


@contextlib.asynccontextmanager
async def watched_cluster(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Yields the addresses of a cluster and of a Prometheus that scrapes it."""
    first = free_ports(8)
    ports = {"port": first, "status_port": first + 1, "replica_status_port": first + 2}
    base = demo_config().model_dump()
    config = Config.model_validate({**base, "grpc": {**base["grpc"], **ports}})
    replicas = sum(each.replicas for each in (*config.targets.values(), *config.drafters.values()))
    async with running_cluster(config) as address:
        status = [f"127.0.0.1:{first + 1}", *(f"{node_address()}:{first + 2 + at}" for at in range(replicas))]
        with prometheus(status, folder) as scraper:
            yield address, scraper


async def run(folder: Path) -> PrometheusRun:
    """Watch a cluster of the bundled pair that answers requests."""
    async with watched_cluster(folder) as (address, scraper):
        up = "count(up == 1)"
        targets = asked(scraper, "targets")["activeTargets"]
        await asyncio.to_thread(until, lambda: total_of(scraper, up) == len(targets), "all are scraped")
        received = await requested(address)
        received += await requested(address)  # a rate needs a value before
        tokens = "sum(dendro_router_tokens_total)"
        await asyncio.to_thread(until, lambda: total_of(scraper, tokens) >= received, "the tokens are counted")
        await asyncio.sleep(SCRAPED)
        rules = [each for group in asked(scraper, "rules")["groups"] for each in group["rules"]]
        return PrometheusRun(
            asked(scraper, "status/buildinfo")["version"],
            {each["scrapeUrl"]: each["health"] for each in asked(scraper, "targets")["activeTargets"]},
            {each["name"]: (each["health"], each["state"]) for each in rules},
            tuple(
                AskedQuery(place, query, len(asked(scraper, "query", query=query)["result"]))
                for place, query in every_query()
            ),
            total_of(scraper, tokens),
            received,
        )


def page(found: PrometheusRun) -> str:
    """The run as a page."""
    none = [each for each in found.queries if not each.series]
    health = ", ".join(found.targets.values())
    lines = [
        "# A Prometheus that scrapes a cluster",
        "",
        "A cluster of the bundled pair answers requests. Debian's Prometheus scrapes its status ports each second,",
        "evaluates the chart's alerts, and is asked every query of [metrics](metrics.md) and of the dashboard.",
        "",
        "- Command: `python -m tests.prometheus_run > docs/prometheus-run.md`",
        f"- Date: {datetime.now(UTC):%Y-%m-%d}; Prometheus {found.version}",
        f"- Targets, of a router and two replicas: {health}",
        f"- Tokens by `sum(dendro_router_tokens_total)`: {found.counted:.0f}; that clients got: {found.received}",
        f"- Queries: {len(found.queries)} asked, all answered; {len(found.queries) - len(none)} gave series",
        "",
        "| alert | rule | state |",
        "|---|---|---|",
        *(f"| {name} | {health} | {state} |" for name, (health, state) in found.alerts.items()),
        "",
        "Queries without series, as nothing of the kind happened in the run:",
        "",
        "| of | query |",
        "|---|---|",
        *(f"| {each.place} | `{each.query}` |".replace("\n", " ") for each in none),
        "",
        "| of | series |",
        "|---|---|",
        *(f"| {each.place} | {each.series} |" for each in found.queries if each.series),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(page(asyncio.run(run(Path(folder)))), end="")
