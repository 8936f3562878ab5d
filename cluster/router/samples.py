"""Several answers to one prompt: their streams run concurrently, and share the replica that opened the first one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from dendro.text import Text
from dendro.v1 import generation_pb2 as pb

Responses = AsyncGenerator[pb.GenerateResponse, None]

WAITING = 4
"""Most responses, of all answers together, that wait for a client that does not read."""


class SharedPrompt:
    """Shared by the answers to one prompt: the replica where the first answer's text is opened."""

    def __init__(self) -> None:
        self.first: Text | None = None  # the first answer's text
        self._shared = asyncio.Event()
        self._turns = asyncio.Lock()

    def share(self, text: Text) -> None:
        """Called with each answer's text once it is being opened. Calls after the first change nothing."""
        if self.first is None:
            self.first = text
            self._shared.set()

    async def wait(self) -> None:
        """Wait until the first answer has called `share`. The other answers then go on one after another, so that other
        requests' rounds come between."""
        await self._shared.wait()
        async with self._turns:
            await asyncio.sleep(0)


def _numbered(response: pb.GenerateResponse, sample: int) -> pb.GenerateResponse:
    response.sample = sample
    return response


async def merged(streams: Sequence[Responses]) -> Responses:
    """Yield the responses of several streams as they come, each with the number of its stream. Raises the first error
    of any stream; all streams are closed before it ends."""
    waiting: asyncio.Queue[pb.GenerateResponse | None] = asyncio.Queue(WAITING)

    async def drive(sample: int, stream: Responses) -> None:
        async with aclosing(stream):
            async for response in stream:
                await waiting.put(_numbered(response, sample))

    async def note_end() -> None:
        await asyncio.wait(drivers, return_when=asyncio.FIRST_EXCEPTION)
        await waiting.put(None)

    drivers = [asyncio.create_task(drive(sample, stream)) for sample, stream in enumerate(streams)]
    ending = asyncio.create_task(note_end())
    try:
        while (response := await waiting.get()) is not None:
            yield response
        for driver in drivers:
            if driver.done():
                driver.result()
    finally:
        for task in (ending, *drivers):
            task.cancel()
        await asyncio.gather(ending, *drivers, return_exceptions=True)
