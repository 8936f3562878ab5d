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
import copy
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc.aio
from google.protobuf.message import Message

from dendro.abortion import Abortion
from dendro.answer import (
    Complete,
    Completion,
    DrafterStats,
    EchoedPrompt,
    Event,
    ModelInfo,
    OpeningStats,
    Prompt,
    Round,
    SpeculationStats,
    Started,
    build_detokenize,
    build_request,
    build_tokenize,
    collect,
    collect_samples,
    collect_stream,
    models_of,
    one_answer,
    sendable,
)
from dendro.arguments import ascii_of, seconds_of, secret_of
from dendro.attempts import Attempts
from dendro.chat import Chat
from dendro.daemon_threads import in_thread
from dendro.destinations import Channels, Destination, Destinations, LookUp, look_up
from dendro.errors import PeerLost
from dendro.explanation import Explanation
from dendro.options import Options
from dendro.progress import RequestProgress
from dendro.rotation import Rotation
from dendro.speculation import Mode, Speculation
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc

__all__ = [
    "AsyncClient",
    "Chat",
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
KEY_HEADER = "authorization"
"""Metadata key of a call's API key, after `Bearer `."""

TIMEOUT_S = 600.0
"""A request's deadline unless another is given."""
CLOSED = "client: was closed during the call"
END_S = 1.0
"""Longest wait for the end of a stream whose answers are complete. A call that has not ended then is cancelled, which
servers and proxies count as a client that left."""
MAX_MESSAGE_BYTES = 8 << 20
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the default holds the keepalive back for a minute
    ("grpc.http2.max_pings_without_data", 0),  # a router that hangs is detected also while no data flows
    ("grpc.lb_policy_name", "round_robin"),  # calls go in turn to all addresses of a name
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def _metadata_of(tenant: str, key: str = "") -> tuple[tuple[str, str], ...]:
    named = ((TENANT_KEY, ascii_of("tenant", tenant)),) if tenant else ()
    return (*named, (KEY_HEADER, f"Bearer {secret_of('key', key)}")) if key else named


def channel_options(destination: Destination) -> tuple[tuple[str, int | str], ...]:
    named = (("grpc.default_authority", destination.authority),) if destination.target != destination.authority else ()
    return (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(destination.proxied)), *named)


class Asking(ABC):
    """The interface of asyncio clients; requests go to a cluster's address or stay in this process."""

    @abstractmethod
    def send(self, request: pb.GenerateRequest) -> AsyncGenerator[Event, None]:
        """Stream the answer to a request message."""

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Event, None]:
        """Stream an answer: Started, Rounds, Complete. Leaving the iteration cancels the request."""
        request = build_request(prompt, **options)
        async with aclosing(self.send(request)) as events:
            async for event in events:
                yield event

    async def generate_text(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer. Raises BadRequest where several are asked for."""
        request = one_answer(build_request(prompt, **options))
        return await collect_stream(self.send(request))

    async def generate_samples(self, prompt: Prompt, **options: Unpack[Options]) -> tuple[Completion, ...]:
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
        key: str = "",
        timeout_s: float = TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
        proxy: bool = True,
        look_up: LookUp = look_up,
    ) -> None:
        """Arguments are those of `Client`."""
        self.address = address
        self.timeout_s = seconds_of("timeout_s", timeout_s)
        self._metadata = _metadata_of(tenant, key)
        self._credentials = credentials
        self._rotation = Rotation(address)
        self._destinations = Destinations(proxy, credentials is not None, look_up)
        # They are opened when they are first used, since they are bound to the loop.
        self._channels = Channels(self._open, self._destinations, self._rotation)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls. They, and later ones, raise PeerLost."""
        for channel in self._channels.drain():
            await channel.close(None)

    def for_tenant(self, tenant: str) -> Self:
        """A client of another tenant over the same connections, with the same key: closing one closes both."""
        other = copy.copy(self)
        others = (each for each in self._metadata if each[0] != TENANT_KEY)
        other._metadata = (*_metadata_of(tenant), *others)
        return other

    def _open(self, destination: Destination) -> grpc.aio.Channel:
        options = channel_options(destination)
        if self._credentials is None:
            return grpc.aio.insecure_channel(destination.target, options=options)
        return grpc.aio.secure_channel(destination.target, self._credentials, options=options)

    @asynccontextmanager
    async def _stub(self, address: str, most_s: float) -> AsyncIterator[generation_pb2_grpc.GenerationServiceAsyncStub]:
        """Lend a stub for one call. most_s: longest wait for the address's name"""
        if self._destinations.unknown(address):
            await in_thread("look-up", lambda: self._destinations.destination(address, most_s))
        destination, channel = self._channels.take(address, most_s)
        try:
            yield generation_pb2_grpc.GenerationServiceStub(channel)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._channels.closed or (task is not None and task.cancelling()):
                raise
            raise PeerLost(CLOSED) from None  # gRPC cancels the calls of a channel that is closed
        finally:
            for unused in self._channels.release(destination):
                await unused.close(None)

    async def send(self, request: pb.GenerateRequest) -> AsyncGenerator[Event, None]:
        """Stream the answer to a request message."""
        answer = RequestProgress(request, self.timeout_s)
        while not answer.finished:
            broken: grpc.RpcError | None = None
            address = self._rotation.take()
            request = sendable(answer.next_request(), MAX_MESSAGE_BYTES)
            async with self._stub(address, answer.attempts.remaining_s) as stub:
                call = stub.Generate(request, timeout=answer.attempts.remaining_s, metadata=self._metadata)
                try:
                    async for response in call:
                        event = answer.take(response)
                        if event is not None:
                            yield event
                        if answer.stream_complete:
                            await _ended(call)
                            break
                except grpc.aio.AioRpcError as error:
                    broken = error
                finally:
                    call.cancel()  # ends the server's work if the caller left the iteration; else does nothing
            if not answer.finished:
                await asyncio.sleep(answer.pause_after(broken, address, self._rotation))

    async def _call(self, method: str, request: Message) -> Any:
        """The response of a method that is no stream, from any router."""
        attempts = Attempts(self.timeout_s)
        while True:
            address = self._rotation.take()
            try:
                async with self._stub(address, attempts.remaining_s) as stub:
                    call = getattr(stub, method)
                    return await call(request, timeout=attempts.remaining_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                await asyncio.sleep(attempts.pause_after(error, address, self._rotation))

    async def _ask_each(self, method: str, asked: Abortion | Explanation) -> None:
        """Call a method at each address of this client."""
        for address in asked.addresses:
            asked.begin_call()
            try:
                async with self._stub(address, asked.left_s) as stub:
                    call = getattr(stub, method)
                    response: Any = await call(asked.request, timeout=asked.left_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                asked.failed(error, address)
            else:
                asked.answered(response)

    async def models(self) -> tuple[ModelInfo, ...]:
        """The served models."""
        return models_of(await self._call("GetServerInfo", pb.GetServerInfoRequest()))

    async def tokenize(self, prompt: str | Chat, *, model: str = "", literal_prompt: bool = False) -> tuple[int, ...]:
        """The tokens of a prompt that begins a text. model: default: the first"""
        response = await self._call("Tokenize", build_tokenize(prompt, model, literal_prompt))
        return tuple(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", show_special_tokens: bool = False) -> str:
        """The text of tokens."""
        response = await self._call("Detokenize", build_detokenize(token_ids, model, show_special_tokens))
        return str(response.text)

    async def abort(self, request_id: str) -> int:
        """End a request; its client gets the error Aborted. Each address of this client is asked, at one router where
        several are behind it. Returns how many were ended; 0: none of that id runs at the routers that were asked.
        Raises the error of an address that refused or did not answer, where none was ended."""
        asked = Abortion(request_id, self.timeout_s, self._rotation.addresses)
        await self._ask_each("Abort", asked)
        return asked.ended

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        """The rounds of a request, from all routers that keep some: an answer may have been resumed at another one.
        Each address of this client is asked, at one router where several are behind it. Raises NotFound if all answered
        and none keeps any, and the error of an address that refused or did not answer, where no other does."""
        asked = Explanation(request_id, self.timeout_s, self._rotation.addresses)
        await self._ask_each("Explain", asked)
        return asked.joined


async def _ended(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    ended = asyncio.Event()
    call.add_done_callback(lambda _: ended.set())
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await ended.wait()


class Client:
    """A blocking client of a cluster; may be used from several threads."""

    def __init__(
        self,
        address: str,
        *,
        tenant: str = "",
        key: str = "",
        timeout_s: float = TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
        proxy: bool = True,
        look_up: LookUp = look_up,
    ) -> None:
        """
        address: `host:port` of a router, or several separated by commas; a name's addresses are looked up anew
        tenant: believed by a router without keys that listens on the loopback alone
        key: API key, which decides the tenant and has limits; sent in the open without `credentials`
        timeout_s: of each request, all of its calls together
        proxy: whether `http_proxy` and `no_proxy` of the environment apply; never to addresses of loopback
        look_up: the addresses behind a name
        """
        self.address = address
        self.timeout_s = seconds_of("timeout_s", timeout_s)
        self._metadata = _metadata_of(tenant, key)
        self._rotation = Rotation(address)
        self._credentials = credentials
        self._channels = Channels(self._open, Destinations(proxy, credentials is not None, look_up), self._rotation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls. They, and later ones, raise PeerLost."""
        for channel in self._channels.drain():
            channel.close()

    def _open(self, destination: Destination) -> grpc.Channel:
        options = channel_options(destination)
        if self._credentials is None:
            return grpc.insecure_channel(destination.target, options=options)
        return grpc.secure_channel(destination.target, self._credentials, options=options)

    @contextmanager
    def _stub(self, address: str, most_s: float) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
        """Lend a stub for one call. most_s: longest wait for the address's name"""
        destination, channel = self._channels.take(address, most_s)
        try:
            yield generation_pb2_grpc.GenerationServiceStub(channel)
        except ValueError:  # a channel that is closed raises it for a new call
            if not self._channels.closed:
                raise
            raise PeerLost(CLOSED) from None
        finally:
            for unused in self._channels.release(destination):
                unused.close()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Event]:
        """Stream an answer: Started, Rounds, Complete. Leaving the iteration cancels the request."""
        request = build_request(prompt, **options)
        yield from self.send(request)

    def send(self, request: pb.GenerateRequest) -> Iterator[Event]:
        """Stream the answer to a request message."""
        answer = RequestProgress(request, self.timeout_s)
        while not answer.finished:
            broken: grpc.RpcError | None = None
            address = self._rotation.take()
            request = sendable(answer.next_request(), MAX_MESSAGE_BYTES)
            with self._stub(address, answer.attempts.remaining_s) as stub:
                call = stub.Generate(request, timeout=answer.attempts.remaining_s, metadata=self._metadata)
                try:
                    for response in call:
                        event = answer.take(response)
                        if event is not None:
                            yield event
                        if answer.stream_complete:
                            ended = threading.Event()
                            if call.add_callback(ended.set):
                                ended.wait(END_S)
                            break
                except grpc.RpcError as error:
                    broken = error
                finally:
                    call.cancel()
            if not answer.finished:
                time.sleep(answer.pause_after(broken, address, self._rotation))

    def generate_text(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer. Raises BadRequest where several are asked for."""
        request = one_answer(build_request(prompt, **options))
        return collect(list(self.send(request)))

    def generate_samples(self, prompt: Prompt, **options: Unpack[Options]) -> tuple[Completion, ...]:
        """The whole answers of a request with `n`."""
        request = build_request(prompt, **options)
        return collect_samples(list(self.send(request)))

    def _call(self, method: str, request: Message) -> Any:
        """The response of a method that is no stream, from any router."""
        attempts = Attempts(self.timeout_s)
        while True:
            address = self._rotation.take()
            try:
                with self._stub(address, attempts.remaining_s) as stub:
                    return getattr(stub, method)(request, timeout=attempts.remaining_s, metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.pause_after(error, address, self._rotation))

    def models(self) -> tuple[ModelInfo, ...]:
        """The served models."""
        return models_of(self._call("GetServerInfo", pb.GetServerInfoRequest()))

    def tokenize(self, prompt: str | Chat, *, model: str = "", literal_prompt: bool = False) -> tuple[int, ...]:
        """The tokens of a prompt that begins a text. model: default: the first"""
        return tuple(self._call("Tokenize", build_tokenize(prompt, model, literal_prompt)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", show_special_tokens: bool = False) -> str:
        """The text of tokens."""
        return str(self._call("Detokenize", build_detokenize(token_ids, model, show_special_tokens)).text)

    def abort(self, request_id: str) -> int:
        """End a request; its client gets the error Aborted. Each address of this client is asked, at one router where
        several are behind it. Returns how many were ended; 0: none of that id runs at the routers that were asked.
        Raises the error of an address that refused or did not answer, where none was ended."""
        asked = Abortion(request_id, self.timeout_s, self._rotation.addresses)
        for address in asked.addresses:
            asked.begin_call()
            try:
                with self._stub(address, asked.left_s) as stub:
                    response = stub.Abort(asked.request, timeout=asked.left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                asked.failed(error, address)
            else:
                asked.answered(response)
        return asked.ended
