"""A process's status port, over HTTP: `/metrics` for Prometheus and `/healthz` for probes. No two share one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiohttp import web
from dendro.errors import EngineFailed
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from cluster.api.health import HealthReport
from cluster.api.listening import bind


def registry_of(collectors: Iterable[Collector]) -> CollectorRegistry:
    """A process's registry: what is collected, and processor time, memory and open files of the process."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    ProcessCollector(registry=registry)
    return registry


async def serve_status(
    collectors: Iterable[Collector], health: Callable[[], HealthReport], host: str, ports: Iterable[int], field: str
) -> tuple[web.AppRunner, int]:
    """Serve both pages on the first of `ports` that is free. Returns the server, whose `cleanup` ends it, and its port.

    collectors: called for each scrape
    health: what `/healthz` answers as JSON, with 200 while the process serves, else with 503
    field: of the configuration, which has the ports
    Raises EngineFailed where no port is free.
    """
    registry = registry_of(collectors)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def healthz(_: web.Request) -> web.Response:
        report = health()
        return web.Response(text=f"{report}\n", status=200 if report.serving else 503, content_type="application/json")

    pages = web.Application()
    pages.router.add_get("/metrics", metrics)
    pages.router.add_get("/healthz", healthz)
    runner = web.AppRunner(pages, access_log=None)
    await runner.setup()
    try:
        listening = bind(host, tuple(ports), field)
    except EngineFailed:
        await runner.cleanup()
        raise
    await web.SockSite(runner, listening).start()
    return runner, int(runner.addresses[0][1])
