"""What a hop costs a process that does nothing else: the unit of a router's processor time a round.

A hop is a message received and one sent back on a grpc.aio stream. At every tick each of n streams has one, as each
request has a round in a verifier's step.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from dendro.errors import EngineFailed

SERVICE = "dendro.bench.Hops"
MESSAGE = bytes(64)
"""A message of about the size of a chunk of one token."""
TICK_S = 0.05
HOPS = 40
"""Hops of each stream."""
START_S = 60.0


class HopProcess:
    """A started process of this module."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stream: Any = channel.stream_stream(f"/{SERVICE}/Stream", None, None)
        self._used: Any = channel.unary_unary(f"/{SERVICE}/Used", None, None)

    async def hop_us(self, streams: int) -> float:
        """The processor time of a hop, in microseconds, where `streams` of them come at once."""
        calls = [self._stream() for _ in range(streams)]
        try:
            await self._hop(calls)  # the streams exist
            before_us = int(await self._used(b""))
            for _ in range(HOPS):
                await asyncio.sleep(TICK_S)
                await self._hop(calls)
            return (int(await self._used(b"")) - before_us) / (streams * HOPS)
        finally:
            for call in calls:
                call.cancel()

    async def _hop(self, calls: list[Any]) -> None:
        await asyncio.gather(*(call.write(MESSAGE) for call in calls))
        await asyncio.gather(*(call.read() for call in calls))


@asynccontextmanager
async def hop_process() -> AsyncIterator[HopProcess]:
    """Start the process; it ends with the context. Raises EngineFailed where it does not start."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=os.environ
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise EngineFailed(f"{__name__}: the process ended with status {await process.wait()}")
        async with grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
            yield HopProcess(channel)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _serve() -> None:
    async def stream(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for _ in messages:
            await context.write(MESSAGE)

    async def used(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return str(time.process_time_ns() // 1000).encode()

    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
        "Used": grpc.unary_unary_rpc_method_handler(used),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
