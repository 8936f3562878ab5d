"""Start and stop what a command needs: a cluster on Ray Serve, or the engines in this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import psutil
from dendro.errors import EngineFailed
from dendro.state import MemoryStates

from cluster.api.access_files import access_problems
from cluster.api.grpc import serve_router
from cluster.api.local import LocalClient
from cluster.checkpoints import check_checkpoints
from cluster.config import Config
from cluster.garbage import freeze_loaded
from cluster.hub import fetched, pinned
from cluster.precompiling import precompiled
from cluster.redis_server import RedisServer
from cluster.router.ingress import Ingress
from cluster.sessions import MemorySessions
from cluster.socket_paths import check_ray_sockets
from cluster.withheld import without_secrets

RESTORING_S = 0.05
"""How long Ray's handler of SIGTERM stays in place while Ray starts."""


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _restore_sigterm_handler() -> None:
    """Install Python's SIGTERM handler again: Ray sets one beneath Python's that ends the process before the cluster
    is stopped."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


async def _done(starting: asyncio.Future[str]) -> None:
    """Wait for a thread that starts Ray, while no SIGTERM ends this process."""
    while not starting.done():
        await asyncio.wait({starting}, timeout=RESTORING_S)
        _restore_sigterm_handler()


def _ready(config: Config, here: bool) -> Config:
    """A checked configuration whose revisions are pinned. `here`: the weights are loaded on this machine, so those on
    the hub are fetched now, while a terminal can show the progress."""
    config = pinned(config)
    check_checkpoints(config)
    if here:
        for problem in access_problems(config):
            raise problem
        fetched(config)
    return config


@asynccontextmanager
async def running_cluster(config: Config, ray_address: str = "") -> AsyncIterator[str]:
    """Yields the addresses, separated by commas, of a cluster that runs as long as the context. Starts a Redis if the
    configuration names none.

    ray_address: of a running Ray; empty starts one.
    """
    if not ray_address:
        check_ray_sockets()
    config = await asyncio.to_thread(_ready, config, not ray_address)
    from cluster import deploy

    if not ray_address:
        deploy.check_ports(config)

    # Only errors of Ray and Serve reach the command's output; the rest is in their log files. A filter, since both set
    # their loggers' levels themselves.
    for name in ("ray._private.worker", "ray.serve"):
        logging.getLogger(name).addFilter(_is_error)

    url = config.redis.address(os.environ)
    with ExitStack() as stack:
        stack.enter_context(without_secrets(config))
        if not ray_address:  # the replicas will run on this machine
            stack.enter_context(precompiled(config))
        url = url or stack.enter_context(RedisServer(config.redis.memory_mb)).url
        ending = threading.Event()
        starting = asyncio.ensure_future(asyncio.to_thread(deploy.start, config, url, ray_address, ending))
        try:
            await _done(starting)
            address = starting.result()
        except asyncio.CancelledError:  # the thread ends as soon as it can: wait for it, then stop what it started
            ending.set()
            await _done(starting)
            with contextlib.suppress(EngineFailed):
                starting.result()
            await asyncio.to_thread(deploy.stop)
            raise
        except RuntimeError as error:  # raised by Ray or Serve
            raise EngineFailed(f"cluster: {error} {deploy.replica_logs()}") from error
        try:
            yield address
        finally:
            # Hides Ray's message that the controller has ended: it is ended on purpose.
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                await asyncio.to_thread(deploy.stop)


@asynccontextmanager
async def local_ingress(config: Config) -> AsyncIterator[Ingress]:
    """Yields an ingress with the engines in this process: no Ray, no sockets, no Redis."""
    config = await asyncio.to_thread(_ready, config, True)
    os.environ.setdefault("TQDM_DISABLE", "1")  # hides transformers' progress bar, as loading takes a moment
    from cluster.peers.pools import LocalPeers

    peers = await asyncio.to_thread(LocalPeers.load, config, MemoryStates())
    try:
        await peers.start()
        ingress = Ingress(config, peers, MemorySessions())
        try:
            yield ingress
        finally:
            await ingress.close()
    finally:
        await peers.close()


@asynccontextmanager
async def local_client(config: Config) -> AsyncIterator[LocalClient]:
    """Yields a client of engines in this process."""
    async with local_ingress(config) as ingress:
        yield LocalClient(ingress)


@asynccontextmanager
async def running(config: Config, local: bool) -> AsyncIterator[str]:
    """Yields the address of a server that runs as long as the context: a cluster, or this process if `local`. It
    listens on this machine alone and needs no key."""
    config = config.private()
    if not local:
        async with running_cluster(config) as address:
            yield address
        return
    async with local_ingress(config) as ingress:
        server = await serve_router(ingress)
        freeze_loaded()
        try:
            yield server.address
        finally:
            gc.unfreeze()
            await server.stop(drain_s=1.0)


def descendants() -> frozenset[psutil.Process]:
    """All processes that descend from this one."""
    return frozenset(psutil.Process().children(recursive=True))


def survivors(processes: frozenset[psutil.Process], timeout_s: float) -> list[str]:
    """Names and ids of the processes that still run after `timeout_s`; zombies do not count."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [f"{process.name()} ({process.pid})" for process in alive if process.status() != psutil.STATUS_ZOMBIE]
