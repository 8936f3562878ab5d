"""Fakes behind real sockets, in this process or in one of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dendro.serving import Leases, Replica
from fakes import FakeDrafter, FakeVerifier, FarPool

from drafter_service.servicer import serve_drafter
from verifier_service.servicer import serve_verifier


@asynccontextmanager
async def drafter_at(engine: FakeDrafter, leases: Leases | None = None) -> AsyncIterator[tuple[Replica, FarPool]]:
    replica = await serve_drafter(engine, leases)
    pool = FarPool("drafter", [replica.address])
    try:
        yield replica, pool
    finally:
        await pool.streams.close()
        await replica.stop()


@asynccontextmanager
async def verifier_at(engine: FakeVerifier, leases: Leases | None = None) -> AsyncIterator[tuple[Replica, FarPool]]:
    replica = await serve_verifier(engine, leases)
    pool = FarPool("verifier", [replica.address])
    try:
        yield replica, pool
    finally:
        await pool.streams.close()
        await replica.stop()


async def process(*words: str) -> tuple[asyncio.subprocess.Process, str]:
    """One of the processes of children.py, and the first line it prints."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "children.py"),
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
    """Wait for a condition; AssertionError when it does not come to hold."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110  # what is waited for happens in code that knows no event of ours
            await asyncio.sleep(0.01)
