"""Start the cluster on Ray Serve, in processes below this one, and stop it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from threading import Event
from typing import Any

import psutil
from dendro.destinations import address_of
from dendro.errors import BadRequest, EngineFailed, one_line
from dendro.failures import described

from cluster.app import build, log
from cluster.config import Config, DrafterConfig, PortSection, Router, TargetConfig
from cluster.failed_start import first_and_last_line, last_line, refusal_in
from cluster.serve_config import APPLICATION, ENVIRONMENT
from cluster.socket_paths import ray_logs

OBJECT_STORE_BYTES = 100 << 20
"""Size of Ray's object store, near the least that Ray accepts: we do not use it."""
STOP_S = 20.0
STATUS_PERIOD_S = 0.2
ANSWER_S = 30.0
"""Seconds that routers may take to report their addresses."""
RESOURCE_FIELDS = {"CPU": "cpu", "GPU": "gpu"}
"""Keys of `resources` by Ray's names; other resources are in `custom`."""
RAY_DECIMALS = 4
"""Decimals with which Ray counts resources."""
_ray_processes: list[psutil.Process] = []  # processes that Ray started below this one; one cluster at a time

OWN_PORTS, TRIED_PORTS = range(20_000, 32_768), 64
"""Ports for routers. Ray's workers have lower ones, and Linux gives connections higher ones."""

AUTHENTICATION = {"RAY_AUTH_MODE": "token"}
"""Ray's default, set explicitly to silence its warning."""


def check_ports(config: Config) -> None:
    """Raise BadRequest, naming the field, for a port of this machine's routers that a process has already. Routers
    share their port, so the kernel would divide calls between them and that process, and neither would notice."""
    grpc, http, routers = config.grpc, config.http, config.router.most_replicas
    for field, host, ports in (
        ("grpc.port", grpc.host, grpc.client_ports(routers)),
        ("http.port", http.host, http.client_ports(routers)),
        ("grpc.status_port", grpc.host, grpc.status_ports[:routers]),
    ):
        for port in filter(None, ports):
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended may block a port
                try:
                    probe.bind((host, port))
                except OSError as error:
                    where, advice = address_of(host, port), "stop what listens there, or set another port"
                    raise BadRequest(field, f"routers cannot listen at {where}: {described(error)}; {advice}") from None


def check_resources(config: Config, has: Mapping[str, float]) -> None:
    """Raise BadRequest, naming the field, where the replicas that a cluster starts with need more than there is on a
    Ray that it has alone: Serve would wait for ever. has: amounts by Ray's names of resources"""
    left = dict(has)
    pools: dict[str, TargetConfig | DrafterConfig | Router] = {
        **{f"targets.{name}": target for name, target in config.targets.items()},
        **{f"drafters.{name}": drafter for name, drafter in config.drafters.items()},
        "router": config.router,
    }
    for pool, of in pools.items():
        workers = of.least_replicas * (of.tensor_parallel if isinstance(of, TargetConfig) else 1)
        for name, amount in of.resources.bundle.items():
            free, needed = left.get(name, 0.0), round(workers * amount, RAY_DECIMALS)
            if needed > free:
                field = f"{pool}.resources.{RESOURCE_FIELDS.get(name, f'custom.{name}')}"
                what = f"{needed:g} in all, and Ray on this machine has {free:g} left of {has.get(name, 0.0):g}"
                raise BadRequest(field, f"{what}; set less, or serve on other machines' Ray by --ray")
            left[name] = round(free - needed, RAY_DECIMALS)


def start(config: Config, redis_url: str, ray_address: str = "", ending: Event | None = None, **loaders: Any) -> str:
    """Start Ray and Serve in processes below this one and deploy. Returns the addresses that clients call, separated by
    commas. `stop` ends what this started.

    ray_address: of a running Ray, whose processes were started with ENVIRONMENT; it keeps running, with applications of
        others. BadRequest is raised where it has one of our name.
    ending: set by another thread, it ends the start: EngineFailed is raised once nothing runs. Ray's own start of a few
        seconds is not interrupted, as its processes would stay.
    """
    ending = ending or Event()
    # Ray reads its mode when it is imported; set later, it would apply only to the processes that Ray starts.
    for key, value in (ENVIRONMENT if "ray" in sys.modules else ENVIRONMENT | AUTHENTICATION).items():
        os.environ.setdefault(key, value)
    import ray
    from ray import serve
    from ray.serve.config import ProxyLocation

    wanted = [
        *(target.resources.cpu * target.tensor_parallel * target.most_replicas for target in config.targets.values()),
        *(drafter.resources.cpu * drafter.most_replicas for drafter in config.drafters.values()),
        config.router.resources.cpu * config.router.most_replicas,
    ]
    others = psutil.Process().children()
    own: dict[str, Any] = {
        "num_cpus": max(os.cpu_count() or 1, int(sum(wanted)) + 1),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    try:
        ray.init(
            address=ray_address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **({} if ray_address else own),
        )
    except Exception as error:  # Ray's errors share no class
        _ray_processes[:] = [child for child in psutil.Process().children() if child not in others]
        stop()
        raise EngineFailed(
            f"ray: did not start: {one_line(str(error), 300)}. On a busy machine, try again; its logs are in "
            f"{ray_logs()}."
        ) from error
    _ray_processes[:] = [child for child in psutil.Process().children() if child not in others]
    if ray_address and APPLICATION in serve.status().applications:
        ray.shutdown()
        what = f"has an application {APPLICATION!r} already, which would be replaced"
        raise BadRequest("--ray", f"{ray_address} {what}; stop the `dendro serve` that started it, or use another Ray")
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if not ray_address:
            check_resources(config, ray.cluster_resources())
        _go_on(ending)
        serve.start(proxy_location=ProxyLocation.Disabled)
        _go_on(ending)
        _run(build(_with_ports(config), redis_url, **loaders), ending)
        return ",".join(sorted({each["clients"] for each in router_addresses()}))
    except BaseException:
        stop(drains=not ending.is_set())
        raise


def _go_on(ending: Event, after_s: float = 0.0) -> None:
    """Wait. Raises EngineFailed where the start is ended."""
    if ending.wait(after_s):
        raise EngineFailed("cluster: it was stopped while it started")


def _run(application: Any, ending: Event) -> None:
    """Run an application like `serve.run`, but end at once if a replica refuses a model: Serve would start the replica
    twice more, and report the name of the deployment alone. What Serve reports meanwhile, such as of a replica that
    finds no place, is logged once."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    serve.run_many(
        [serve.RunTarget(target=application, name=APPLICATION, route_prefix=None)], wait_for_applications_running=False
    )
    shown: set[tuple[str, str]] = set()  # deployments and what was logged of them
    while True:
        status = serve.status().applications.get(APPLICATION)
        if status is not None:
            messages = [each.message for each in status.deployments.values()]
            if refused := next(filter(None, map(refusal_in, messages)), None):
                raise refused
            for name, each in status.deployments.items():
                if each.message and (name, each.message) not in shown:
                    shown.add((name, each.message))
                    log.warning("%s: %s", name, first_and_last_line(each.message))
            if status.status == ApplicationStatus.RUNNING:
                return
            if status.status == ApplicationStatus.DEPLOY_FAILED:
                reasons = "; ".join(filter(None, map(last_line, messages)))
                raise EngineFailed(f"cluster: {status.message} {reasons}. {replica_logs()}")
        _go_on(ending, STATUS_PERIOD_S)


def replica_logs() -> str:
    """The sentence that names the folder of the replicas' logs."""
    return f"The replicas' logs are in {ray_logs() / 'serve'}."


def stop(drains: bool = True) -> None:
    """Stop what `start` started; kills processes of Ray that remain after STOP_S. May be called again.

    drains: False ends a Ray of ours without Serve's own shutdown, which waits for replicas that load
    """
    import ray
    from ray import serve

    ours = [*_ray_processes]
    for process in _ray_processes:
        with contextlib.suppress(psutil.Error):
            ours += process.children(recursive=True)
    _ray_processes.clear()
    try:
        # Ray prints to our output that calls to Serve's controller failed, as the controller is stopped here.
        with contextlib.redirect_stdout(io.StringIO()):
            if ray.is_initialized() and not ours:
                _delete_application()
            elif ray.is_initialized() and drains:
                serve.shutdown()
    finally:
        with contextlib.redirect_stdout(io.StringIO()):
            ray.shutdown()
        _, left = psutil.wait_procs(ours, timeout=STOP_S)
        for process in left:
            log.warning("process %d of Ray did not end within %g s; killing it", process.pid, STOP_S)
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=STOP_S)


def _delete_application() -> None:
    """Delete our application from a Ray of others, and Serve itself where it has neither applications nor proxies."""
    from ray import serve
    from ray.exceptions import RayError

    try:
        if APPLICATION in serve.status().applications:
            serve.delete(APPLICATION)
        status = serve.status()
        if not status.applications and not status.proxies:
            serve.shutdown()
    except TimeoutError:
        log.warning("requests of application %s still run; Serve deletes it after them", APPLICATION)
    except RayError as error:
        log.warning("application %s was not deleted: %s", APPLICATION, one_line(str(error), 300))


def deployment_stats(deployment: str) -> dict[str, int]:
    """The counters of a deployment's replica, by a Serve call; where there are several replicas, of any one of them.
    Raises TimeoutError where none answers within ANSWER_S."""
    from ray import serve

    handle = serve.get_deployment_handle(deployment, APPLICATION)
    stats: dict[str, int] = handle.stats.remote().result(timeout_s=ANSWER_S)
    return stats


def router_addresses() -> list[dict[str, str]]:
    """The `addresses` of every running router."""
    from ray import serve

    handle = serve.get_deployment_handle("router", APPLICATION)
    found: list[dict[str, str]] = handle.broadcast("addresses").results(timeout_s=ANSWER_S)
    return found


def http_address(config: Config) -> str:
    """The addresses that clients of HTTP call, separated by commas."""
    scheme = "https" if config.tls.clients is not None else "http"
    return ",".join(sorted({f"{scheme}://{each['http']}" for each in router_addresses()}))


def _with_ports(config: Config) -> Config:
    """The configuration with ports that are free now, where routers share one and none is set. They lie below those
    that systems give to connections: one of these could take the port before a router has it, or is started again."""
    return config.model_copy(update={"grpc": _with_port(config.grpc), "http": _with_port(config.http)})


def _with_port(section: PortSection) -> PortSection:
    if section.port or not section.share_port:
        return section
    for _ in range(TRIED_PORTS):
        port = secrets.choice(OWN_PORTS)
        with socket.socket(socket.AF_INET6 if ":" in section.host else socket.AF_INET) as probe:
            try:
                probe.bind((section.host, port))
            except OSError as error:
                refused = error
            else:
                return section.model_copy(update={"port": port})
    raise EngineFailed(f"cluster: no port of {TRIED_PORTS} tried is free at {section.host}: {described(refused)}")
