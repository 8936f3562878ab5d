"""The cluster on Ray Serve: Router, and one deployment for each target and each drafter.

client -> Router -> (lease) -> drafter and verifier replicas; each of the three has a gRPC address of its own

`build` connects the deployments, which are thin shells around plain objects.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dendro.certificates import CertificateFiles
from dendro.destinations import address_of
from dendro.engine import Engine, LocalDrafter, LocalVerifier
from dendro.errors import PeerLost
from dendro.servicer import DRAFTER_REPLICA, VERIFIER_REPLICA, serve_engine
from dendro.serving import Leases, ReplicaKind
from dendro.state import StateStore

from cluster.api import metrics
from cluster.api.callers import Callers
from cluster.api.collectors import RedisMetrics, ReplicaMetrics, RouterMetrics
from cluster.api.grpc import port_of, serve_router
from cluster.api.health import HealthReport, HealthWatch
from cluster.api.openai.server import serve_http
from cluster.api.status import serve_status
from cluster.config import Config, DrafterConfig, ModelConfig, Redis, Router, TargetConfig
from cluster.engines import (
    actor_options,
    engine_environment,
    load_drafter,
    load_replica,
    node_address,
)
from cluster.garbage import freeze_loaded
from cluster.hub import pinned
from cluster.peers.links import StreamLinks
from cluster.peers.pools import ServePeers
from cluster.router.ingress import Ingress
from cluster.router.traces import LAST_SPANS_S, close_within, tracer_of
from cluster.scaling import LOAD, by_load
from cluster.sections import PeerTls, Scaling, TraceExport
from cluster.serve_config import check_redis
from cluster.sessions import RedisSessions
from cluster.state_store import CircuitBreaker, RedisPriors, RedisStates

if TYPE_CHECKING:
    from ray.serve import Application, Deployment
    from ray.serve.handle import DeploymentHandle


log = logging.getLogger("dendro.app")

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 3.0
DRAIN_MARGIN_S = 30.0
"""A replica that is removed has the time limit of a request, and this much more, to finish its requests."""
LOOK_BACK_S, METRICS_INTERVAL_S = 5.0, 1.0
"""Autoscaling uses the mean load over LOOK_BACK_S: leases, or a router's requests; it is reported each
METRICS_INTERVAL_S."""
LAST_WORDS_S = 0.2
"""How long a replica with a lost worker waits before it exits, so that its streams can send the error."""
ABORT_EVERYWHERE_S = 3.0
"""Seconds that all routers together may take to end a request; less than a client waits for one of them."""
EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::"})
"""Hosts that mean all addresses of a machine."""


class _Shell:
    """Base of the deployments of engines. Serve calls `lease`; routers call the replica's own gRPC server."""

    _kind: ReplicaKind
    _role: str
    _numbers: tuple[metrics.MetricFamily, ...]
    _steps: tuple[metrics.MetricFamily, metrics.MetricFamily]

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        name: str,
        model: Any,
        longest_s: float,
        states: Callable[[], StateStore],
        status_ports: Iterable[int],
        tls: PeerTls | None,
        trace: TraceExport | None,
        load: Callable[..., Engine],
    ) -> None:
        log_to_serve_file()
        store = states()
        self._tracer = tracer_of(trace, self._role)
        self._engine = load(name, model, store)
        certificates = tls.files(self._role) if tls is not None else None
        self._link(self._engine, certificates)
        await self._engine.start()
        leases, self._host = Leases(cap_s=longest_s), node_address()
        self._replica = await serve_engine(
            self._kind,
            self._engine,
            leases,
            self._host,
            fault=self._engine.fault,
            certificates=certificates,
            begin_span=partial(self._tracer.begin_opening, model=name) if self._tracer is not None else None,
        )
        collectors = (
            ReplicaMetrics(name, self._numbers, self._steps, self._engine, self._replica.stats),
            RedisMetrics(_breakers_of(states=store)),
        )
        self._status, self._status_port = await serve_status(
            collectors, self._report, self._host, status_ports, "grpc.replica_status_port"
        )
        freeze_loaded()

    def _link(self, engine: Any, certificates: CertificateFiles | None) -> None:
        """Give the engine its ways to other replicas; drafters have none."""

    def _report(self) -> HealthReport:
        fault = self._engine.fault()
        return HealthReport(not fault, {"engine": fault} if fault else {})

    async def addresses(self) -> dict[str, str]:
        """`calls`: the address that routers call; `status`: that of this replica's metrics and health."""
        return {"calls": self._replica.address, "status": address_of(self._host, self._status_port)}

    async def lease(self) -> AsyncIterator[dict[str, str]]:
        """Yields address and lease token once, then waits until the lease ends on the replica's own stream."""
        async with aclosing(self._replica.lease()) as items:
            async for item in items:
                yield item

    async def stats(self) -> dict[str, int]:
        """The replica's counters, and its engine's."""
        return self._engine.stats() | self._replica.stats()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve scales the pool by: the texts that are open here, of which a lease may have several."""
        return {LOAD: float(self._replica.stats()["open_openings"])}

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica whose check raises three times in a row."""
        if fault := self._engine.fault():
            raise RuntimeError(fault)

    async def __del__(self) -> None:  # Serve awaits it once the replica is drained
        await self._status.cleanup()
        await self._replica.stop()
        await self._engine.stop()
        if self._tracer is not None:
            await close_within(self._tracer, LAST_SPANS_S)


class DrafterShell(_Shell):
    """A drafter replica."""

    _kind, _role = DRAFTER_REPLICA, "drafter"
    _numbers, _steps = metrics.DRAFTER_NUMBERS, metrics.DRAFTER_STEPS


class VerifierShell(_Shell):
    """A verifier replica."""

    _kind, _role = VERIFIER_REPLICA, "verifier"
    _numbers, _steps = metrics.VERIFIER_NUMBERS, metrics.VERIFIER_STEPS

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        name: str,
        model: TargetConfig,
        longest_s: float,
        states: Callable[[], StateStore],
        status_ports: Iterable[int],
        tls: PeerTls | None,
        trace: TraceExport | None,
        load: Callable[[str, TargetConfig, StateStore], LocalVerifier],
    ) -> None:
        await super().__init__(name, model, longest_s, states, status_ports, tls, trace, load)
        if model.tensor_parallel > 1:
            self._watch = asyncio.create_task(self._end_with_engine())

    def _link(self, engine: LocalVerifier, certificates: CertificateFiles | None) -> None:
        self._links = StreamLinks(certificates)
        engine.link(self._links)

    async def __del__(self) -> None:
        await super().__del__()
        await self._links.close()

    async def _end_with_engine(self) -> None:
        """Exit when a worker is lost: Serve replaces an exited replica at once, an unhealthy one after three checks."""
        reason = await self._engine.lost()
        await asyncio.sleep(LAST_WORDS_S)
        log.error("this replica ends: %s", reason)
        os._exit(1)


class LoadIngress(Protocol):
    """Makes a router's ingress."""

    def __call__(
        self, config: Config, peers: ServePeers, sessions: RedisSessions, *, priors: RedisPriors
    ) -> Ingress: ...


class RouterShell:
    """A router: clients call its own servers, of gRPC and HTTP. Serve places it, checks its health, awaits its end."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Config,
        redis_url: str,
        targets: dict[str, DeploymentHandle[object]],
        drafters: dict[str, DeploymentHandle[object]],
        ingress: LoadIngress = Ingress,
    ) -> None:
        log_to_serve_file()
        peers = ServePeers(config, targets, drafters)
        priors = RedisPriors(redis_url, config.redis.prior_ttl_s)
        sessions = RedisSessions(redis_url, config.redis.record_ttl_s)
        served = ingress(config, peers, sessions, priors=priors)
        self._served, self._drain_s = served, config.router.drain_s
        grpc, http, routers = config.grpc, config.http, config.router.most_replicas
        self._health = HealthWatch(
            peers.faults, sessions.fault, lambda report: self._server.set_healthy(report.serving)
        )
        callers = Callers(config)
        self._server = await serve_router(
            served, grpc.host, grpc.client_ports(routers), grpc.share_port, healthy=False, callers=callers
        )
        self._http = await serve_http(
            served,
            self._server.requests,
            callers,
            lambda: self._server.healthy,
            http.host,
            http.client_ports(routers),
            http.share_port,
        )
        if routers > 1:
            self._server.requests.at_all_routers = abort_at_all_routers
        collectors = (
            RouterMetrics(served, self._server.stats, lambda: self._health.report),
            RedisMetrics(_breakers_of(sessions=sessions, priors=priors.blobs)),
        )
        self._status, self._status_port = await serve_status(
            collectors, lambda: self._health.report, grpc.host, grpc.status_ports, "grpc.status_port"
        )
        self._hosts = [node_address() if host in EVERY_ADDRESS else host for host in (grpc.host, http.host)]
        self._watching = asyncio.create_task(self._watch_health(peers, sessions))
        freeze_loaded()

    async def _watch_health(self, peers: ServePeers, sessions: RedisSessions) -> None:
        """Report SERVING once every target has a replica, so that no probe sends clients here before, and from then on
        while one of them has."""
        if warning := await sessions.warning():
            log.warning("%s", warning)
        await peers.wait_for_targets()
        await self._health.run()

    async def addresses(self) -> dict[str, str]:
        """`clients`: the address that clients of gRPC call; `http`: that of clients of HTTP; `status`: that of this
        router's metrics and health."""
        grpc, http = self._hosts
        return {
            "clients": address_of(grpc, port_of(self._server.address)),
            "http": address_of(http, port_of(self._http.address)),
            "status": address_of(grpc, self._status_port),
        }

    async def stats(self) -> dict[str, int]:
        """The router's counters."""
        return self._server.stats()

    async def abort(self, tenant: str, ids: tuple[str, ...]) -> int:
        """End a tenant's requests that run at this router. Called by the routers, for a client of any of them."""
        return self._server.requests.abort(tenant, ids)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve scales routers by: the requests that run here."""
        return {LOAD: float(self._server.stats()["running"])}

    async def __del__(self) -> None:
        """Drain. Serve awaits it before it ends the process, and sees no calls of a router's clients."""
        self._watching.cancel()
        self._health.drain()
        await asyncio.gather(self._server.stop(self._drain_s), self._http.stop(self._drain_s))
        await self._served.close()
        await self._status.cleanup()


async def abort_at_all_routers(tenant: str, ids: tuple[str, ...]) -> int:
    """End requests at whichever routers run them: an `EndAtAll`. Serve knows all routers, a router no other."""
    from ray import serve

    handle = serve.get_deployment_handle("router", serve.get_replica_context().app_name)
    try:
        answers = await handle.broadcast("abort", tenant, ids).results_async(
            timeout_s=ABORT_EVERYWHERE_S, return_exceptions=True
        )
    except TimeoutError:
        raise PeerLost(f"abort: not all routers answer within {ABORT_EVERYWHERE_S:g} s") from None
    ended, lost = 0, 0
    for each in answers:
        if isinstance(each, BaseException):
            lost += 1
        else:
            ended += each
    if lost and not ended:
        raise PeerLost(f"abort: {lost} of {len(answers)} routers did not answer")
    return ended


class _RedisStatesAt:
    """Makes a replica's store in the replica's process, as connections cannot be sent to one."""

    def __init__(self, url: str, redis: Redis) -> None:
        self._url = url
        self._redis = redis

    def __call__(self) -> StateStore:
        return RedisStates(self._url, self._redis.state_ttl_s, max_bytes=self._redis.max_state_mb << 20)


def build(
    config: Config,
    redis_url: str,
    *,
    drafter: Callable[[str, DrafterConfig, StateStore], LocalDrafter] | None = None,
    verifier: Callable[[str, TargetConfig, StateStore], LocalVerifier] | None = None,
    ingress: LoadIngress = Ingress,
) -> Application:
    """The application of a configuration. The loaders are parameters, so that tests can deploy their own engines."""
    longest_s = config.router.request_timeout_s + DRAIN_MARGIN_S
    states, status_ports = _RedisStatesAt(redis_url, config.redis), config.grpc.replica_status_ports
    limits = config.structures.limits
    draft = partial(load_drafter, targets=config.targets, limits=limits) if drafter is None else drafter
    verify = partial(load_replica, limits=limits) if verifier is None else verifier
    common: dict[str, Any] = {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": longest_s,
        "graceful_shutdown_wait_loop_s": 0.1,
    }

    def replicas(name: str, model: ModelConfig, waiting: int = 0) -> dict[str, Any]:
        return {
            "name": name,
            **_replicas_of(model),
            # Leases, of which there are more than places: a full verifier itself decides whose texts wait.
            "max_ongoing_requests": (model.max_sessions + waiting) * (2 if waiting else 1),
            "ray_actor_options": actor_options(model.resources, engine_environment(model.threads)),
            **common,
        }

    targets = {
        name: _deployment(
            VerifierShell, **replicas(f"verifier-{name}", target, target.max_waiting), **_group_of(target)
        ).bind(name, target, longest_s, states, status_ports, config.tls.peers, config.trace, verify)
        for name, target in config.targets.items()
    }
    drafters = {
        name: _deployment(DrafterShell, **replicas(f"drafter-{name}", model)).bind(
            name, model, longest_s, states, status_ports, config.tls.peers, config.trace, draft
        )
        for name, model in config.drafters.items()
    }
    router = _deployment(
        RouterShell,
        name="router",
        **_routers_of(config.router),
        ray_actor_options=actor_options(config.router.resources, engine_environment(1)),
        **common,
    )
    return router.bind(config, redis_url, targets, drafters, ingress)


def application(fields: dict[str, Any]) -> Application:
    """The import path of a Serve configuration file, whose application arguments are our whole configuration.

    Raises BadRequest where it is invalid, and as `check_redis`.
    """
    config = pinned(Config.of(fields, Path.cwd()))
    check_redis(config)
    return build(config, config.redis.address(os.environ))


def _deployment(shell: type, **options: Any) -> Deployment:
    from ray import serve

    return serve.deployment(**options)(shell)


def _replicas_of(model: ModelConfig) -> dict[str, Any]:
    """A fixed replica count, or Serve's autoscaling options, by what replicas report and by leases."""
    scaling = model.autoscaling
    if scaling is None:
        return {"num_replicas": model.replicas}
    return {"autoscaling_config": _scaling_options(scaling, scaling.leases, "by_answers")}


def _routers_of(router: Router) -> dict[str, Any]:
    """Options of a router deployment's replicas. Routers scale by what they report: Serve sees no calls of clients."""
    scaling = router.autoscaling
    if scaling is None:
        return {"num_replicas": router.replicas}
    return {"autoscaling_config": _scaling_options(scaling, scaling.requests, "by_load")}


def _scaling_options(scaling: Scaling, target: float, policy: str) -> dict[str, Any]:
    return {
        "policy": {"policy_function": f"{by_load.__module__}:{policy}"},
        "min_replicas": scaling.min_replicas,
        "max_replicas": scaling.max_replicas,
        "target_ongoing_requests": target,
        "upscale_delay_s": scaling.up_after_s,
        "downscale_delay_s": scaling.down_after_s,
        "look_back_period_s": LOOK_BACK_S,
        "metrics_interval_s": METRICS_INTERVAL_S,
    }


def _group_of(target: TargetConfig) -> dict[str, Any]:
    """A placement group for a sharded target: the replica has the first bundle, each of its workers another."""
    if target.tensor_parallel == 1:
        return {}
    bundles = [target.resources.bundle] * target.tensor_parallel
    return {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}


def _breakers_of(**stores: object) -> dict[str, CircuitBreaker]:
    """The circuit breakers of the stores that are in Redis, by what is stored."""
    return {name: store.breaker for name, store in stores.items() if isinstance(store, RedisSessions | RedisStates)}


def log_to_serve_file() -> None:
    """Log to the replica's own file, as Serve does, and only there: Serve's handler of stderr is removed. Ray would
    write its lines to a second file, which grows without a limit."""
    ours, serve = logging.getLogger("dendro"), logging.getLogger("ray.serve")
    ours.setLevel(logging.INFO)
    for handler in [*serve.handlers]:
        if type(handler) is logging.StreamHandler:
            serve.removeHandler(handler)
        elif handler not in ours.handlers:
            ours.addHandler(handler)
