"""A router's other port, over HTTP: `/metrics` for Prometheus and `/healthz` for probes. No two routers share one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from aiohttp import web
from dendro.errors import EngineFailed
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

COUNTERS = {
    "requests": "Requests that were admitted to run.",
    "refused": "Requests that were refused because as many as the limit ran.",
    "rounds": "Chunks that were sent, one for each round.",
}
GAUGES = {"running": "Requests that run now."}


class _Figures:
    """A collector of the figures in `stats()`, under their names there."""

    def __init__(self, stats: Callable[[], Mapping[str, int]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        found = self._stats()
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"dendro_router_{name}", text, found[name])
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"dendro_router_{name}", text, found[name])


async def serve_status(
    stats: Callable[[], Mapping[str, int]], healthy: Callable[[], bool], host: str, ports: Iterable[int]
) -> tuple[web.AppRunner, int]:
    """Serve both pages on the first of `ports` that is free. Returns the server, whose `cleanup` ends it, and its port.

    stats: called for each scrape
    healthy: whether `/healthz` answers 200; else it answers 503
    Raises EngineFailed where no port is free.
    """
    registry = CollectorRegistry()
    registry.register(_Figures(stats))
    ProcessCollector(registry=registry)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="SERVING\n") if healthy() else web.Response(text="NOT_SERVING\n", status=503)

    pages = web.Application()
    pages.router.add_get("/metrics", metrics)
    pages.router.add_get("/healthz", healthz)
    runner = web.AppRunner(pages, access_log=None)
    await runner.setup()
    tried = tuple(ports)
    for port in tried:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError:  # the port is taken
            continue
        return runner, int(runner.addresses[0][1])
    await runner.cleanup()
    raise EngineFailed(f"grpc.status_port: the router cannot listen at {host} on {', '.join(map(str, tried))}")
