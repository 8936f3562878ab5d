"""The asyncio and the blocking client. An answer is complete only with `Complete`; a broken stream is resumed.

```python
async with AsyncClient("127.0.0.1:9000") as client:
    async for event in client.generate("def area(radius):", temperature=0.7, keep_session=True):
        if isinstance(event, Round):
            print(event.text, end="")
```

A stream may break at any token: the client calls again with the tokens it has, and the server continues after them with
the tokens of an unbroken stream. Of several addresses, separated by commas, each call takes the next. A call that broke
is repeated until the request's deadline, at another address where there is one; so is one that a full router refused,
unless all of them refuse a new request. All errors are DendroErrors (dendro.errors).
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

import grpc.aio

from dendro.answer import (
    Complete,
    Completion,
    DrafterStats,
    EchoedPrompt,
    Event,
    Mode,
    ModelInfo,
    OpeningStats,
    Options,
    Round,
    Speculation,
    SpeculationStats,
    Started,
    build_request,
    collect,
    collect_samples,
    collect_stream,
    models_of,
    sendable,
)
from dendro.arguments import ascii_of, seconds_of
from dendro.attempts import Attempts
from dendro.progress import RequestProgress
from dendro.rotation import Rotation
from dendro.samples import one_answer
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc

__all__ = [
    "AsyncClient",
    "Client",
    "Complete",
    "Completion",
    "DrafterStats",
    "Event",
    "Mode",
    "ModelInfo",
    "OpeningStats",
    "Options",
    "EchoedPrompt",
    "Round",
    "Speculation",
    "SpeculationStats",
    "Started",
]

TENANT_KEY = "dendro-tenant"

MAX_MESSAGE_BYTES = 8 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # a router that hangs is detected also while no data flows
    ("grpc.lb_policy_name", "round_robin"),  # over the addresses that one name resolves to
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class Asking(ABC):
    """The interface of asyncio clients; requests go to a cluster's address or stay in this process."""

    @abstractmethod
    def send(self, request: pb.GenerateRequest) -> AsyncGenerator[Event, None]:
        """Stream the answer to a request message."""

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """Stream an answer: Started, Rounds, Complete. Leaving the iteration cancels the request."""
        request = build_request(prompt, **options)
        async with aclosing(self.send(request)) as events:
            async for event in events:
                yield event

    async def generate_text(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """The whole answer. Raises BadRequest where several are asked for."""
        request = one_answer(build_request(prompt, **options))
        return await collect_stream(self.send(request))

    async def generate_samples(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> tuple[Completion, ...]:
        """The whole answers of a request with `n`."""
        request = build_request(prompt, **options)
        return collect_samples([event async for event in self.send(request)])


class AsyncClient(Asking):
    """An asyncio client of a cluster. Bound to the event loop in which it is first used."""

    def __init__(
        self,
        address: str,
        *,
        tenant: str = "",
        timeout_s: float = 600.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """address: `host:port` of a router, or several separated by commas   timeout_s: of each request, all of its
        calls together"""
        self.address = address
        self.timeout_s = seconds_of("timeout_s", timeout_s)
        self._metadata = ((TENANT_KEY, ascii_of("tenant", tenant)),) if tenant else ()
        self._credentials = credentials
        self._rotation = Rotation(address)
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    def _stub(self, address: str) -> generation_pb2_grpc.GenerationServiceAsyncStub:
        channel = self._channels.get(address)
        if channel is None:  # created on first use, since it is bound to the running loop
            channel = self._channels[address] = (
                grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)
            )
        return generation_pb2_grpc.GenerationServiceStub(channel)

    async def send(self, request: pb.GenerateRequest) -> AsyncGenerator[Event, None]:
        """Stream the answer to a request message."""
        answer = RequestProgress(request, self.timeout_s)
        while not answer.finished:
            broken: grpc.RpcError | None = None
            address = self._rotation.take()
            stub = self._stub(address)
            request = sendable(answer.next_request(), MAX_MESSAGE_BYTES)
            call = stub.Generate(request, timeout=answer.attempts.remaining_s, metadata=self._metadata)
            try:
                async for response in call:
                    event = answer.take(response)
                    if event is not None:
                        yield event
            except grpc.aio.AioRpcError as error:
                broken = error
            finally:
                call.cancel()  # ends the server's work if the caller left the iteration; else does nothing
            if not answer.finished:
                await asyncio.sleep(answer.pause_after(broken, address, self._rotation))

    async def models(self) -> tuple[ModelInfo, ...]:
        """The served models."""
        attempts = Attempts(self.timeout_s)
        while True:
            address = self._rotation.take()
            try:
                response = await self._stub(address).GetServerInfo(
                    pb.GetServerInfoRequest(), timeout=attempts.remaining_s, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(attempts.pause_after(error, address, self._rotation))
            else:
                return models_of(response)


class Client:
    """A blocking client of a cluster; may be used from several threads."""

    def __init__(
        self,
        address: str,
        *,
        tenant: str = "",
        timeout_s: float = 600.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """address: `host:port` of a router, or several separated by commas   timeout_s: of each request, all of its
        calls together"""
        self.address = address
        self.timeout_s = seconds_of("timeout_s", timeout_s)
        self._metadata = ((TENANT_KEY, ascii_of("tenant", tenant)),) if tenant else ()
        self._rotation = Rotation(address)
        self._channels = {
            each: grpc.insecure_channel(each, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(each, credentials, options=CHANNEL_OPTIONS)
            for each in self._rotation.addresses
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _stub(self, address: str) -> generation_pb2_grpc.GenerationServiceStub:
        return generation_pb2_grpc.GenerationServiceStub(self._channels[address])

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Iterator[Event]:
        """Stream an answer: Started, Rounds, Complete. Leaving the iteration cancels the request."""
        request = build_request(prompt, **options)
        yield from self.send(request)

    def send(self, request: pb.GenerateRequest) -> Iterator[Event]:
        """Stream the answer to a request message."""
        answer = RequestProgress(request, self.timeout_s)
        while not answer.finished:
            broken: grpc.RpcError | None = None
            address = self._rotation.take()
            stub = self._stub(address)
            request = sendable(answer.next_request(), MAX_MESSAGE_BYTES)
            call = stub.Generate(request, timeout=answer.attempts.remaining_s, metadata=self._metadata)
            try:
                for response in call:
                    event = answer.take(response)
                    if event is not None:
                        yield event
            except grpc.RpcError as error:
                broken = error
            finally:
                call.cancel()
            if not answer.finished:
                time.sleep(answer.pause_after(broken, address, self._rotation))

    def generate_text(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """The whole answer. Raises BadRequest where several are asked for."""
        request = one_answer(build_request(prompt, **options))
        return collect(list(self.send(request)))

    def generate_samples(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> tuple[Completion, ...]:
        """The whole answers of a request with `n`."""
        request = build_request(prompt, **options)
        return collect_samples(list(self.send(request)))

    def models(self) -> tuple[ModelInfo, ...]:
        """The served models."""
        attempts = Attempts(self.timeout_s)
        while True:
            address = self._rotation.take()
            try:
                response = self._stub(address).GetServerInfo(
                    pb.GetServerInfoRequest(), timeout=attempts.remaining_s, metadata=self._metadata
                )
            except grpc.RpcError as error:
                time.sleep(attempts.pause_after(error, address, self._rotation))
            else:
                return models_of(response)
