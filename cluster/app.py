"""The cluster on Ray Serve: Router, and one deployment for each target and each drafter.

client -> Serve's gRPC proxy -> Router -> (lease) -> drafter and verifier replicas, each with a gRPC address of its own

The builder is the only place that wires; with bench, certify and demo, the only one that knows the services. The
deployments are thin shells around plain objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil
from dendro.client import REASON_MARK
from dendro.errors import BadRequest, one_line
from dendro.serving import Leases, Replica
from dendro.state import StateStore
from dendro.v1 import generation_pb2 as pb

from cluster.config import Config, Drafter, Model, Resources, Target
from cluster.hub import fetched_model, pinned
from cluster.ingress import MAX_REQUEST_ID, Ingress, status_of, tenant_of
from cluster.placement import DrafterEngine, ServePlaces, VerifierEngine, start_engine, stop_engine
from cluster.serve_config import APPLICATION, ENVIRONMENT, ROUTE, SERVICER
from cluster.sessions import RedisSessions
from cluster.state_store import RedisPriors, RedisStates

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle

    from verifier_service.shards import Summons

log = logging.getLogger("dendro.app")

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 3.0
DRAIN_MARGIN_S = 30.0
"""A replica that is taken away may finish the longest request, and this much more."""
CONCURRENT_REQUESTS = 1024
"""Requests of one router at once. What the engines can hold bounds them sooner."""
OBJECT_STORE_BYTES = 100 << 20
"""Nothing of ours travels through Ray's object store; this is near the least that it takes."""
STOP_S = 20.0
LOOK_BACK_S, METRICS_INTERVAL_S = 5.0, 1.0
"""Autoscaling goes by the mean of the leases over so long, told by every replica and router so often."""
LAST_WORDS_S = 0.2
"""What a replica that has to end leaves its streams for telling so."""
_ray_processes: list[psutil.Process] = []  # what Ray started below this process; one cluster at a time

AUTHENTICATION = {"RAY_AUTH_MODE": "token"}
"""As Ray does by itself where nothing is said, and then tells every user of it."""


def engine_environment(threads: int) -> dict[str, str]:
    """What must stand in an engine's environment before torch is imported: its threads, and arithmetic whose rows do
    not depend on their neighbours."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "MKL_CBWR": "AUTO,STRICT",
        "TOKENIZERS_PARALLELISM": "false",
    }


def load_drafter(name: str, drafter: Drafter, states: StateStore) -> DrafterEngine:
    """A drafter's engine, not started yet. Raises BadRequest for a checkpoint that cannot be used."""
    from drafter_service.engine import DrafterEngine

    drafter = fetched_model(f"drafters.{name}", drafter)
    return DrafterEngine.load(
        drafter.checkpoint,
        tokenizer=drafter.tokenizer,
        name=name,
        states=states,
        dtype=drafter.dtype,
        device=device_of(drafter),
        threads=drafter.threads,
        max_sessions=drafter.max_sessions,
        longest_step_s=drafter.longest_step_s,
    )


def load_verifier(name: str, target: Target, states: StateStore, **workers: Any) -> VerifierEngine:
    """A verifier's engine, not started yet. Raises BadRequest for a checkpoint that cannot be used.

    workers: where those of a sharded target are started, if not as processes below this one.
    """
    import torch

    from verifier_service.engine import VerifierEngine

    target = fetched_model(f"targets.{name}", target)
    return VerifierEngine.load(
        target.checkpoint,
        tokenizer=target.tokenizer,
        name=name,
        states=states,
        dtype=getattr(torch, target.dtype),
        device=device_of(target),
        threads=target.threads,
        max_length=target.max_length,
        max_sessions=target.max_sessions,
        max_waiting=target.max_waiting,
        memory_fraction=target.memory_fraction,
        share_prefixes=target.share_prefixes,
        max_rows=target.max_rows,
        max_depth=target.max_depth,
        tensor_parallel=target.tensor_parallel,
        longest_step_s=target.longest_step_s,
        **workers,
    )


def load_replica(name: str, target: Target, states: StateStore) -> VerifierEngine:
    """The same in a replica of Serve: the workers of a sharded target are actors in the replica's placement group."""
    if target.tensor_parallel == 1:
        return load_verifier(name, target, states)
    start_workers = partial(_start_actors, name, target)
    return load_verifier(name, target, states, start_workers=start_workers, host=_node_address())


class Worker:
    """The actor of a shard."""

    def fetch(self, name: str, target: Target) -> tuple[Path, Path]:
        """The folders of the target and of its tokenizer on this node; names on a hub are fetched."""
        here = fetched_model(f"targets.{name}", target)
        return here.checkpoint, here.tokenizer_folder

    def work(self, summons: Summons) -> None:
        from verifier_service.worker import work

        work(summons)


_workers: list[Any] = []  # handles of this replica's actors, which live as long as these


def _start_actors(name: str, target: Target, summons: Sequence[Summons]) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()
    assert group is not None
    workers: list[Any] = []
    for each in summons:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=each.rank)
        options = _actor_options(target.resources, engine_environment(target.threads))
        workers.append(ray.remote(Worker).options(scheduling_strategy=place, max_restarts=0, **options).remote())
    _workers.extend(workers)
    if target.on_hub:  # fetched before they join: a download may take longer than joining may
        here = Worker().fetch(name, target)
        for there in ray.get([worker.fetch.remote(name, target) for worker in workers]):
            if there != here:
                raise BadRequest(
                    f"targets.{name}.tensor_parallel",
                    f"checkpoint and tokenizer are at {', '.join(map(str, here))} on one node and at "
                    f"{', '.join(map(str, there))} on another: HF_HOME must be the same on all of them",
                )
    for worker, each in zip(workers, summons, strict=True):
        worker.work.remote(each)


def device_of(model: Model) -> str:
    """Ray shows a replica the accelerators that it asked for, and no other."""
    return "cuda" if model.resources.gpu else "cpu"


class _Shell:
    """What the deployments of engines share: Serve calls `lease`, and the rest is the replica's."""

    _engine: Any
    _replica: Replica

    async def lease(self) -> AsyncIterator[dict[str, str]]:
        """Address and lease, once; then nothing until the lease ends on the replica's own stream."""
        async with aclosing(self._replica.lease()) as said:
            async for item in said:
                yield item

    async def stats(self) -> dict[str, int]:
        """The replica's counters, and its engine's."""
        return self._engine.stats() | self._replica.stats()

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica whose check raises three times in a row."""
        if fault := self._engine.fault():
            raise RuntimeError(fault)

    async def __del__(self) -> None:  # Serve awaits it when the replica was drained
        await self._replica.stop()
        await stop_engine(self._engine)


class DrafterShell(_Shell):
    """A drafter replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        name: str,
        drafter: Drafter,
        longest_s: float,
        states: Callable[[], StateStore],
        load: Callable[[str, Drafter, StateStore], DrafterEngine] = load_drafter,
    ) -> None:
        from drafter_service.servicer import serve_drafter

        _log_beside_serve()
        self._engine = load(name, drafter, states())
        await start_engine(self._engine)
        self._replica = await serve_drafter(
            self._engine, Leases(cap_s=longest_s), _node_address(), fault=self._engine.fault
        )


class VerifierShell(_Shell):
    """A verifier replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        name: str,
        target: Target,
        longest_s: float,
        states: Callable[[], StateStore],
        load: Callable[[str, Target, StateStore], VerifierEngine] = load_replica,
    ) -> None:
        from verifier_service.servicer import serve_verifier

        _log_beside_serve()
        self._engine = load(name, target, states())
        await start_engine(self._engine)
        self._replica = await serve_verifier(
            self._engine, Leases(cap_s=longest_s), _node_address(), fault=self._engine.fault
        )
        if target.tensor_parallel > 1:
            self._watch = asyncio.create_task(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        """A replica that lost a worker ends, and Serve makes another at once; of health checks it would want three."""
        reason = await self._engine.lost()
        await asyncio.sleep(LAST_WORDS_S)
        log.error("this replica ends: %s", reason)
        os._exit(1)


class LoadIngress(Protocol):
    """Makes a router's ingress from what it needs of the cluster."""

    def __call__(
        self, config: Config, places: ServePlaces, sessions: RedisSessions, *, priors: RedisPriors
    ) -> Ingress: ...


class RouterShell:
    """The ingress: Serve's gRPC proxy calls the methods by their names in the proto."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Config,
        redis_url: str,
        targets: dict[str, DeploymentHandle],
        drafters: dict[str, DeploymentHandle],
        ingress: LoadIngress = Ingress,
    ) -> None:
        _log_beside_serve()
        places = ServePlaces(config, targets, drafters)
        priors = RedisPriors(redis_url, config.redis.prior_ttl_s)
        self._ingress = ingress(config, places, RedisSessions(redis_url, config.redis.record_ttl_s), priors=priors)

    async def Generate(self, request: pb.GenerateRequest, grpc_context: Any) -> AsyncIterator[pb.GenerateResponse]:
        tenant = tenant_of(dict(grpc_context.invocation_metadata() or ()))
        try:
            async with aclosing(self._ingress.generate(request, tenant)) as events:
                async for event in events:
                    yield event
        except Exception as error:  # the border: nothing of the inside passes it
            code, details, reason = status_of(error)
            if code is code.INTERNAL:
                log.exception("request %s failed", one_line(request.request_id, MAX_REQUEST_ID))
            grpc_context.set_code(code)
            grpc_context.set_details(f"{details}{REASON_MARK}{reason}]")
            raise RuntimeError(details) from None

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, grpc_context: Any) -> pb.GetServerInfoResponse:
        return self._ingress.info()


class _RedisStatesAt:
    """Makes a replica's store where it runs: connections do not travel."""

    def __init__(self, url: str, ttl_s: int) -> None:
        self._url = url
        self._ttl_s = ttl_s

    def __call__(self) -> StateStore:
        return RedisStates(self._url, self._ttl_s)


def build(
    config: Config,
    redis_url: str,
    *,
    drafter: Callable[[str, Drafter, StateStore], DrafterEngine] = load_drafter,
    verifier: Callable[[str, Target, StateStore], VerifierEngine] = load_replica,
    ingress: LoadIngress = Ingress,
) -> Application:
    """The application of a configuration. The loaders are parameters, so that tests deploy engines of their own."""
    longest_s = config.router.request_timeout_s + DRAIN_MARGIN_S
    states = _RedisStatesAt(redis_url, config.redis.state_ttl_s)
    common: dict[str, Any] = {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": longest_s,
        "graceful_shutdown_wait_loop_s": 0.1,
    }

    def replicas(name: str, model: Model, waiting: int = 0) -> dict[str, Any]:
        return {
            "name": name,
            **_replicas_of(model),
            "max_ongoing_requests": model.max_sessions + waiting,  # leases
            "ray_actor_options": _actor_options(model.resources, engine_environment(model.threads)),
            **common,
        }

    targets = {
        name: _deployment(
            VerifierShell, **replicas(f"verifier-{name}", target, target.max_waiting), **_group_of(target)
        ).bind(name, target, longest_s, states, verifier)
        for name, target in config.targets.items()
    }
    drafters = {
        name: _deployment(DrafterShell, **replicas(f"drafter-{name}", model)).bind(
            name, model, longest_s, states, drafter
        )
        for name, model in config.drafters.items()
    }
    router = _deployment(
        RouterShell,
        name="router",
        num_replicas=config.router.replicas,
        max_ongoing_requests=CONCURRENT_REQUESTS,
        ray_actor_options=_actor_options(config.router.resources, engine_environment(1)),
        **common,
    )
    return router.bind(config, redis_url, targets, drafters, ingress)


def application(said: dict[str, Any]) -> Application:
    """What a Serve configuration file names as its import path: our whole configuration as the application's arguments.

    Raises BadRequest where it does not fit, or names no Redis: nobody starts one here.
    """
    config = pinned(Config.of(said, Path.cwd()))
    if not config.redis.url:
        raise BadRequest("redis.url", "is empty; a cluster that Serve deploys needs a Redis that is there")
    return build(config, config.redis.address(os.environ))


def _deployment(shell: type, **options: Any) -> Any:
    from ray import serve

    return serve.deployment(**options)(shell)


def _replicas_of(model: Model) -> dict[str, Any]:
    """A number, or how Serve finds one. A lease is a call in progress to Serve: what its autoscaling counts."""
    scaling = model.autoscaling
    if scaling is None:
        return {"num_replicas": model.replicas}
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.max_replicas,
            "target_ongoing_requests": scaling.leases,
            "upscale_delay_s": scaling.up_after_s,
            "downscale_delay_s": scaling.down_after_s,
            "look_back_period_s": LOOK_BACK_S,
            "metrics_interval_s": METRICS_INTERVAL_S,
        }
    }


def _group_of(target: Target) -> dict[str, Any]:
    """A placement group for a sharded target: the replica has the first bundle, each of its workers another."""
    if target.tensor_parallel == 1:
        return {}
    bundles = [target.resources.bundle] * target.tensor_parallel
    return {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}


def _actor_options(resources: Resources, environment: dict[str, str]) -> dict[str, Any]:
    return {
        "num_cpus": resources.cpu,
        "num_gpus": resources.gpu,
        "resources": resources.custom,
        "runtime_env": {"env_vars": environment},
    }


def start(config: Config, redis_url: str, ray_address: str = "", **loaders: Any) -> str:
    """Start Ray and Serve in processes below this one and deploy; the address clients call. `stop` ends all of it.

    ray_address: of a Ray that is running and stays, whose processes were started with ENVIRONMENT; only Serve is ours.
    """
    # Ray reads its mode when it is imported: said later, only the processes that it starts would go by it.
    for key, value in (ENVIRONMENT if "ray" in sys.modules else ENVIRONMENT | AUTHENTICATION).items():
        os.environ.setdefault(key, value)
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions

    wanted = [
        *(target.resources.cpu * target.tensor_parallel * target.most_replicas for target in config.targets.values()),
        *(drafter.resources.cpu * drafter.most_replicas for drafter in config.drafters.values()),
        config.router.resources.cpu * config.router.replicas,
    ]
    others = psutil.Process().children()
    own: dict[str, Any] = {
        "num_cpus": max(os.cpu_count() or 1, int(sum(wanted)) + 1),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    ray.init(
        address=ray_address or "local",
        log_to_driver=False,
        logging_level=logging.ERROR,
        **({} if ray_address else own),
    )
    _ray_processes[:] = [child for child in psutil.Process().children() if child not in others]
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        port = config.grpc.port or _free_port(config.grpc.host)
        serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options=HTTPOptions(host="127.0.0.1", port=_free_port("127.0.0.1")),
            grpc_options=gRPCOptions(port=port, grpc_servicer_functions=[SERVICER], enable_reflection=False),
        )
        serve.run(build(config, redis_url, **loaders), name=APPLICATION, route_prefix=ROUTE)
    except BaseException:
        stop()
        raise
    return f"{config.grpc.host}:{port}"


def stop() -> None:
    """End what `start` began, and see that no process of it is left. May be called again."""
    import ray
    from ray import serve

    ours = [*_ray_processes]
    for process in _ray_processes:
        with contextlib.suppress(psutil.Error):
            ours += process.children(recursive=True)
    _ray_processes.clear()
    try:
        # Ray prints to our output that calls to Serve's controller failed, when it is we who end the controller.
        with contextlib.redirect_stdout(io.StringIO()):
            if ray.is_initialized():
                serve.shutdown()
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            ray.shutdown()
        _, left = psutil.wait_procs(ours, timeout=STOP_S)
        for process in left:
            log.warning("process %d of Ray did not end by itself", process.pid)
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=STOP_S)


def deployment_stats(deployment: str) -> dict[str, int]:
    """The counters of a deployment's replica, by a Serve call of its own; of one of them, where there are several."""
    from ray import serve

    return serve.get_deployment_handle(deployment, APPLICATION).stats.remote().result()


def _log_beside_serve() -> None:
    """Our lines go where Serve's go: into the replica's own log."""
    ours = logging.getLogger("dendro")
    ours.setLevel(logging.INFO)
    for handler in logging.getLogger("ray.serve").handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)


def _node_address() -> str:
    """This machine's address as its cluster knows it."""
    import ray

    return str(ray.util.get_node_ip_address())


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
