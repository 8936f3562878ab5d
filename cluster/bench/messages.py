"""What a message on a grpc.aio stream costs a process that does nothing else: the unit of a router's time a round.

The process answers n streams with a message each at every tick, as a verifier's step gives each request a chunk.
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

SERVICE = "dendro.bench.Messages"
MESSAGE = bytes(64)
"""About a chunk of one token."""
TICK_S = 0.05
MESSAGES = 40
"""Messages of each stream."""
START_S = 60.0


class MessageProcess:
    """A started process of this module."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stream: Any = channel.unary_stream(f"/{SERVICE}/Stream", None, None)
        self._used: Any = channel.unary_unary(f"/{SERVICE}/Used", None, None)

    async def message_us(self, streams: int) -> float:
        """The processor time of a message, where `streams` of them are sent at once."""

        async def read() -> None:
            async for _ in self._stream(b""):
                pass

        before_us = int(await self._used(b""))
        await asyncio.gather(*(read() for _ in range(streams)))
        return (int(await self._used(b"")) - before_us) / (streams * MESSAGES)


@asynccontextmanager
async def message_process() -> AsyncIterator[MessageProcess]:
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
        async with grpc.aio.insecure_channel(address) as channel:
            yield MessageProcess(channel)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _serve() -> None:
    tick = asyncio.Event()

    async def stream(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for _message in range(MESSAGES):
            await tick.wait()
            await context.write(MESSAGE)

    async def used(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return str(time.process_time_ns() // 1000).encode()

    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Used": grpc.unary_unary_rpc_method_handler(used),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    while True:
        await asyncio.sleep(TICK_S)
        tick.set()
        tick.clear()


if __name__ == "__main__":
    asyncio.run(_serve())
