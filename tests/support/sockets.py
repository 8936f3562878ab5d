"""Fakes behind real sockets, in this process or in child processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from dendro.servicer import DRAFTER_REPLICA, VERIFIER_REPLICA, serve_engine
from dendro.serving import BeginSpan, Leases, Replica, ReplicaKind

from tests.support.fakes import FakeDrafter, FakeVerifier, RemotePool

ROUND_S = 0.003
"""Least seconds of a fake verifier's round."""
Served = tuple[Replica, RemotePool]
"""An engine behind a socket, and a pool that has its address alone."""


def drafter_at(
    engine: FakeDrafter, leases: Leases | None = None, begin_span: BeginSpan | None = None
) -> AbstractAsyncContextManager[Served]:
    return _at("drafter", DRAFTER_REPLICA, engine, leases, begin_span)


def verifier_at(
    engine: FakeVerifier, leases: Leases | None = None, begin_span: BeginSpan | None = None
) -> AbstractAsyncContextManager[Served]:
    """A fake's rounds take longer than messages, so that a drafter is open after a few of them."""
    if isinstance(engine, FakeVerifier):
        engine.pause_s = max(engine.pause_s, ROUND_S)
    return _at("verifier", VERIFIER_REPLICA, engine, leases, begin_span)


@asynccontextmanager
async def _at(
    name: str, kind: ReplicaKind, engine: Any, leases: Leases | None, begin_span: BeginSpan | None
) -> AsyncIterator[Served]:
    replica = await serve_engine(kind, engine, leases, begin_span=begin_span)
    pool = RemotePool(name, [replica.address])
    try:
        yield replica, pool
    finally:
        await pool.streams.close()
        await replica.stop()


async def process(*words: str) -> tuple[asyncio.subprocess.Process, str]:
    """Start a process of `children`; returns it with the first line that it prints."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.children",
        *words,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None
    return child, (await child.stdout.readline()).decode().strip()


async def end(*children: asyncio.subprocess.Process) -> None:
    """Kill processes that may be dead already."""
    for child in children:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def until(holds, timeout_s: float = 10.0) -> None:
    """Wait until `holds()` is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110  # the code that makes it true sets no event
            await asyncio.sleep(0.01)
