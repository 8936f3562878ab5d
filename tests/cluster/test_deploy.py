"""Ray itself as a cluster's start uses it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import typer
from dendro.errors import BadRequest, EngineFailed
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ProxyStatus,
    ServeStatus,
)

from cluster import cli, deploy
from cluster.config import Config, Redis, demo_config
from cluster.running import running_cluster
from tests.support.toy_cluster import LOADERS, toy_config


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Ray's own process objects
def test_a_ray_that_does_not_start_is_one_sentence_and_leaves_no_process(monkeypatch):
    from ray._private import node

    started = node.Node.start_head_processes

    def slow(self):
        started(self)
        raise Exception("The current node timed out during startup.")  # as Ray raises it on a busy machine

    monkeypatch.setattr(node.Node, "start_head_processes", slow)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineFailed, match="ray: did not start: The current node timed out during startup") as failed:
        deploy.start(toy_config(), "redis://127.0.0.1:1", **LOADERS)
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    logs = Path(str(failed.value).rpartition("its logs are in ")[2].rstrip("."))
    assert logs.is_dir() and logs.parent.name.endswith(f"_{os.getpid()}"), "of this process's Ray"
    gc.collect()


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_start_that_is_ended_while_a_model_loads_ends_then_and_leaves_no_process():
    """The verifier never loads: without the event the start would wait for it."""
    before, ending, raised = set(psutil.Process().children(recursive=True)), threading.Event(), []

    def loads_forever(*_: object) -> None:
        time.sleep(1000)

    def start() -> None:
        try:
            deploy.start(toy_config(), "redis://127.0.0.1:1", "", ending, **LOADERS | {"verifier": loads_forever})
        except EngineFailed as error:
            raised.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    until = time.monotonic() + 120
    while time.monotonic() < until and thread.is_alive() and not loading():
        time.sleep(0.1)
    ending.set()
    thread.join(120)
    assert not thread.is_alive() and raised == ["cluster: it was stopped while it started"]
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    gc.collect()


def loading() -> bool:
    """Whether a replica of the verifier has begun to load."""
    found = (" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True))
    with contextlib.suppress(psutil.Error):
        return any("verifier-toy" in each for each in found)
    return False


@pytest.mark.parametrize("signals", [1, 2])
def test_a_sigterm_while_serve_starts_ends_the_start_once(signals, monkeypatch):
    """A second signal does not interrupt what the first one stops."""
    stopped = []

    def start(config: object, url: str, ray: str, ending: threading.Event) -> str:
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            assert ending.wait(60)
        time.sleep(0.3)  # the second signal comes before this thread has ended
        raise EngineFailed("cluster: it was stopped while it started")

    monkeypatch.setattr(deploy, "start", start)
    monkeypatch.setattr(deploy, "stop", lambda: stopped.append(True))
    monkeypatch.setattr(cli, "given_config", lambda _: demo_config())
    with pytest.raises(typer.Exit) as ended:
        cli.serve(ray="auto")
    assert ended.value.exit_code == 128 + signal.SIGTERM and stopped


async def test_a_sigterm_while_ray_starts_ends_no_process(monkeypatch):
    """Ray sets a handler beneath Python's, which ends the process, long before the cluster runs."""
    noted, beneath = asyncio.Event(), ctypes.CDLL(None)

    def start(*given: object) -> str:
        beneath.signal(signal.SIGTERM, 0)  # the system's own action, which ends a process
        until = time.monotonic() + 60
        while not caught_below_python() and time.monotonic() < until:
            time.sleep(0.01)
        if caught_below_python():
            os.kill(os.getpid(), signal.SIGTERM)
        return "address"

    monkeypatch.setattr(deploy, "start", start)
    monkeypatch.setattr(deploy, "stop", lambda: None)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, noted.set)
    try:
        async with running_cluster(demo_config().model_copy(update={"redis": Redis(url="redis://none")}), "auto"):
            await asyncio.wait_for(noted.wait(), 60)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class ForeignServe:
    """Serve on a Ray that others started, in memory."""

    def __init__(self, patch: pytest.MonkeyPatch, applications: tuple[str, ...], proxies: tuple[str, ...] = ()) -> None:
        self.applications = set(applications)
        self.proxies = proxies
        self.shut_down = self.left = False
        for name in ("status", "delete", "shutdown"):
            patch.setattr(serve, name, getattr(self, name))
        patch.setattr(ray, "init", lambda **_: None)
        patch.setattr(ray, "is_initialized", lambda: not self.left)
        patch.setattr(ray, "shutdown", self.leave)

    def status(self) -> ServeStatus:
        running = ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {})
        return ServeStatus(
            {name: ProxyStatus.HEALTHY for name in self.proxies}, dict.fromkeys(self.applications, running)
        )

    def delete(self, name: str) -> None:
        self.applications.discard(name)

    def shutdown(self) -> None:
        self.shut_down = True

    def leave(self) -> None:
        self.left = True


@pytest.mark.parametrize(
    ("applications", "proxies", "shut_down"),
    [(("dendro", "other"), (), False), (("dendro",), ("node",), False), (("dendro",), (), True), ((), (), True)],
    ids=["another application", "proxies", "ours alone", "none was deployed"],
)
def test_stopping_on_a_foreign_ray_deletes_our_application_alone(monkeypatch, applications, proxies, shut_down):
    found = ForeignServe(monkeypatch, applications, proxies)
    deploy.stop()
    assert found.applications == {*applications} - {"dendro"} and found.left
    assert found.shut_down == shut_down, "only where nothing of others is left"


@pytest.mark.parametrize(
    ("error", "message"),
    [(TimeoutError(), "requests of application dendro still run"), (RayActorError(), "dendro was not deleted: The")],
)
def test_a_foreign_ray_that_does_not_delete_in_time_or_is_gone_is_left_with_a_warning(
    error, message, monkeypatch, caplog
):
    def fail(name: str) -> None:
        raise error

    found = ForeignServe(monkeypatch, ("dendro",))
    monkeypatch.setattr(serve, "delete", fail)
    deploy.stop()
    assert message in caplog.text and found.left and not found.shut_down


def test_a_foreign_ray_with_an_application_of_our_name_is_refused_and_keeps_it(monkeypatch):
    found = ForeignServe(monkeypatch, ("dendro", "other"))
    with pytest.raises(BadRequest, match=r"^--ray: far:6379 has an application 'dendro' already, .*; stop the"):
        deploy.start(toy_config(), "redis://127.0.0.1:1", "far:6379", **LOADERS)
    assert found.applications == {"dendro", "other"} and found.left and not found.shut_down


def pool(number: int = 1, **resources: object) -> dict[str, object]:
    return {"checkpoint": "none", "replicas": number, "resources": {"cpu": 0.1, **resources}}


@pytest.mark.parametrize(
    ("targets", "has", "refusal"),
    [
        ({"a": pool(gpu=1)}, {}, r"targets\.a\.resources\.gpu: 1 in all, and Ray .* has 0 left of 0; set less, or"),
        ({"a": pool(2, gpu=1)}, {"GPU": 1}, r"targets\.a\.resources\.gpu: 2 in all, and Ray .* has 1 left of 1"),
        ({"a": pool(gpu=1), "b": pool(gpu=0.5)}, {"GPU": 1}, r"targets\.b\.resources\.gpu: 0\.5 in all, .* 0 left"),
        ({"a": {**pool(gpu=1), "tensor_parallel": 2}}, {"GPU": 1}, r"targets\.a\.resources\.gpu: 2 in all"),
        ({"a": pool(custom={"x": 1})}, {"GPU": 1}, r"targets\.a\.resources\.custom\.x: 1 in all, .* 0 left of 0"),
    ],
)
def test_what_a_ray_of_ones_own_cannot_hold_is_refused_by_field(targets, has, refusal, monkeypatch):
    ForeignServe(monkeypatch, ())
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, **has})
    with pytest.raises(BadRequest, match=f"^{refusal}"):
        deploy.start(toy_config(targets=targets), "redis://127.0.0.1:1", **LOADERS)


@pytest.mark.parametrize(
    ("targets", "has"),
    [
        ({"a": pool(9, gpu=0.1), "b": pool(1, gpu=0.1)}, {"GPU": 1}),
        ({"a": {"checkpoint": "x", "resources": {"gpu": 1}, "autoscaling": {"max_replicas": 2}}}, {"GPU": 1}),
        ({"a": pool(custom={"x": 0})}, {}),
    ],
    ids=["tenths", "at its fewest replicas", "none"],
)
def test_what_a_ray_of_ones_own_just_holds_is_not_refused(targets, has):
    deploy.check_resources(toy_config(targets=targets, drafters={}), {"CPU": 2.0, **has})


def test_what_serve_reports_of_a_deployment_while_it_starts_is_logged_once(monkeypatch, caplog):
    waits = "1 replicas have taken more than 30s to be scheduled. Resources required: {'GPU': 1.0}"
    fails = "A replica failed to start. Error:\nTraceback:\n  File 'x', line 3\nRuntimeError: out of memory"
    reports = iter(["", waits, waits, fails, fails])

    def status() -> ServeStatus:
        report = next(reports, None)
        state = ApplicationStatus.DEPLOY_FAILED if report is None else ApplicationStatus.DEPLOYING
        deployment = DeploymentStatusOverview(
            DeploymentStatus.UPDATING, DeploymentStatusTrigger.UNSPECIFIED, {}, report or ""
        )
        return ServeStatus({}, {"dendro": ApplicationStatusOverview(state, "", 0.0, {"verifier-toy": deployment})})

    ForeignServe(monkeypatch, ())
    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(serve, "run_many", lambda *_, **__: monkeypatch.setattr(serve, "status", status))
    monkeypatch.setattr(deploy, "STATUS_PERIOD_S", 0.0)
    with pytest.raises(EngineFailed):
        deploy.start(toy_config(), "redis://127.0.0.1:1", "far:6379", **LOADERS)
    assert caplog.messages == [
        f"verifier-toy: {waits}",
        "verifier-toy: A replica failed to start. Error: RuntimeError: out of memory",
    ]


@contextlib.contextmanager
def another_server() -> Iterator[int]:
    """Yields the port of a server that shares it, as routers do."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("field", ["grpc.port", "http.port", "grpc.status_port"])
async def test_a_port_that_another_server_shares_is_refused_by_field_before_anything_starts(field, monkeypatch):
    monkeypatch.setattr(deploy, "start", lambda *_: pytest.fail("it started"))
    section, _, name = field.partition(".")
    with another_server() as port:
        config = Config.model_validate({**demo_config().model_dump(), section: {name: port}})
        with pytest.raises(BadRequest, match=rf"^{field}: routers cannot listen at 127\.0\.0\.1:{port}: .*in use;"):
            async with running_cluster(config):
                pass


def test_every_port_of_routers_that_do_not_share_one_is_checked():
    with another_server() as port:
        config = toy_config(grpc={"port": port - 1, "share_port": False}, router={"replicas": 2})
        with pytest.raises(BadRequest, match=r"^grpc\.port: "):
            deploy.check_ports(config)


def test_a_port_whose_last_connections_the_server_closed_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()  # the system remembers it for a minute
            assert client.recv(1) == b""
        server.close()
        deploy.check_ports(toy_config(http={"port": port}))


def caught_below_python() -> bool:
    """Whether the kernel calls a function of this process at a SIGTERM."""
    caught = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


FORKS_BESIDE_CALLS = """
import cluster.cli  # sets the environment before gRPC is imported

import asyncio, subprocess, threading, time
import grpc, grpc.aio

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        async def echo(request, context):
            calls.release()
            return request
        return grpc.unary_unary_rpc_method_handler(echo)

async def serve_and_call():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async def call():
        while True:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for _ in range(20):
                    await channel.unary_unary("/a/b")(b"x")
    await asyncio.gather(*(call() for _ in range(4)))

calls = threading.Semaphore(0)
threading.Thread(target=asyncio.run, args=[serve_and_call()], daemon=True).start()
calls.acquire()
ends = [subprocess.call(["/bin/true"], preexec_fn=lambda: None) for _ in range(200)]  # preexec_fn: a fork, as Ray's
print(sum(end != 0 for end in ends), "of", len(ends))
"""


def test_a_command_that_calls_grpc_starts_processes_unharmed():
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, "-c", FORKS_BESIDE_CALLS], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.stdout == "0 of 200\n", done.stderr
