"""What a hop costs a process that does nothing else: the unit of a router's processor time a round.

A hop is a message received and one sent back on a grpc.aio stream. At every tick each of n streams has one, as each
request has a round in a verifier's step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from cluster.measure.processes import ContenderProcess, contender_process, serve_calls

SERVICE = "dendro.bench.Hops"
METHOD = f"/{SERVICE}/Stream"
MESSAGE = bytes(64)
"""A message of about the size of a chunk of one token."""
TICK_S = 0.05
HOPS = 40
"""Hops of each stream."""


@asynccontextmanager
async def hop_process() -> AsyncIterator[Callable[[int], Awaitable[float]]]:
    """Start the process; it ends with the context. Yields the function `hop_us`; raises EngineFailed."""
    async with (
        contender_process("hops", __name__, [], os.environ) as process,
        grpc.aio.insecure_channel(process.facts["address"], options=(("grpc.enable_http_proxy", 0),)) as channel,
    ):
        yield partial(hop_us, process, channel.stream_stream(METHOD, None, None))


async def hop_us(process: ContenderProcess, stream: Any, streams: int) -> float:
    """The processor time of a hop, in microseconds, where `streams` of them come at once."""
    calls = [stream() for _ in range(streams)]
    try:
        await _hop(calls)  # the streams exist
        before = await process.call(SERVICE)
        for _ in range(HOPS):
            await asyncio.sleep(TICK_S)
            await _hop(calls)
        after = await process.call(SERVICE)
        return float(after["used_us"] - before["used_us"]) / (streams * HOPS)
    finally:
        for call in calls:
            call.cancel()


async def _hop(calls: Sequence[Any]) -> None:
    await asyncio.gather(*(call.write(MESSAGE) for call in calls))
    await asyncio.gather(*(call.read() for call in calls))


async def _serve() -> None:
    async def stream(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for _ in messages:
            await context.write(MESSAGE)

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    used = {"address": address}, lambda _: {"used_us": time.process_time_ns() // 1000}
    await asyncio.to_thread(serve_calls, lambda: used)


if __name__ == "__main__":
    asyncio.run(_serve())
