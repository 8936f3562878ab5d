"""Runs a request for as long as its client is there, and sends its answer: as a whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import ExitStack, aclosing
from typing import Any

from dendro.answer import count_of_answers
from dendro.errors import NO_FAULTS, DendroError, OutOfTime
from dendro.v1 import generation_pb2 as pb
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.callers import CallerIdentity
from cluster.api.grpc import ABORT_S, READ_GRACE_S
from cluster.api.openai.answers import AnswerForm, ObjectWriter
from cluster.api.openai.errors import Failure, failure_of, to_json
from cluster.api.openai.fields import HttpRequest
from cluster.api.requests import RunningRequests
from cluster.router.ingress import Ingress

KEEP_ALIVE_S = 10.0
"""Seconds without an event after which a stream sends a comment, so that nothing between takes it for dead."""
BREAK_CONNECTION = "break-connection"
"""The key in a request's state of a function that breaks its connection."""
COMMENT = b": keep-alive\n\n"
JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class AnswerResponse(Response):
    """The answer to a request. A client that leaves ends the request."""

    def __init__(
        self,
        ingress: Ingress,
        requests: RunningRequests,
        asked: HttpRequest,
        form: AnswerForm,
        caller: CallerIdentity,
        repeatable: bool,
    ) -> None:
        """repeatable: False if the request, sent again, would be another turn of its session"""
        super().__init__()
        self._ingress = ingress
        self._requests = requests
        self._asked = asked
        self._form = form
        self._caller = caller
        self._repeatable = repeatable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = Sender(send, self._asked.message.request_id)
        await while_connected(receive, self._answer(sender, scope["state"][BREAK_CONNECTION]))

    async def _answer(self, sender: Sender, break_connection: Callable[[], None]) -> None:
        limit_s = self._ingress.config.router.request_timeout_s + READ_GRACE_S
        unread = asyncio.timeout(limit_s)
        try:
            async with unread:
                await self._run(sender)
        except BaseException as raised:  # every fault becomes a status
            if isinstance(raised, NO_FAULTS):
                raise
            error = OutOfTime("request: its answer was not read in time") if unread.expired() else raised
            failure = failure_of(error, self._asked.message.request_id, self._asked.names)
            if failure.status >= 500 and not self._repeatable:  # the store may have its turn
                failure = failure.not_repeated()
            try:
                async with asyncio.timeout(ABORT_S):
                    await sender.fail(failure)
            except TimeoutError:
                break_connection()

    async def _run(self, sender: Sender) -> None:
        message = self._asked.message
        texts = await self._ingress.token_texts(message.model) if message.HasField("logprobs") else None
        writer = ObjectWriter(self._form, texts, self._asked.include_usage, self._asked.stream)
        with ExitStack() as places:
            try:
                places.enter_context(
                    self._requests.run(self._caller.tenant, message.request_id, count_of_answers(message))
                )
            except DendroError as error:  # the ingress counts its own errors
                self._ingress.totals.failed(error)
                raise
            if self._asked.stream:
                async with sender.kept_alive():
                    await self._stream(writer, sender)
                return
            async with aclosing(self._events()) as events:
                async for event in events:
                    for _ in writer.take(event):
                        pass
                    self._requests.count_rounds(event.HasField("chunk"))
            await sender.whole(200, writer.whole())

    def _events(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        caller = self._caller
        return self._ingress.generate(self._asked.message, caller.tenant, caller.allowance, caller.traceparent)

    async def _stream(self, writer: ObjectWriter, sender: Sender) -> None:
        async with aclosing(self._events()) as events:
            async for event in events:
                parts = [to_json(part) for part in writer.take(event)]
                if parts:
                    await sender.events(*parts)
                self._requests.count_rounds(event.HasField("chunk"))
        if self._asked.include_usage:
            await sender.events(to_json(writer.last()))
        await sender.events(b"[DONE]", more=False)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do some work, whose task is cancelled when the client leaves. The request's body must have been read."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Sender:
    """Sends one response: a whole one, or a stream of events whose status is sent with the first of them."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._named = {"x-request-id": request_id}
        self._streams = self._ended = self._quiet = False
        self._sending = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> Any:
        """Send a comment after each KEEP_ALIVE_S without an event."""
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    async def _beat(self) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._quiet:
                await self._write(COMMENT, True)

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        async with self._sending:
            await self._start(status, {**JSON, "content-length": str(len(body)), **(headers or {})})
            await self._send({"type": "http.response.body", "body": body})
            self._ended = True

    async def events(self, *data: bytes, more: bool = True) -> None:
        """Send events. more: whether others follow"""
        self._quiet = False
        await self._write(b"".join(b"data: " + each + b"\n\n" for each in data), more)

    async def fail(self, failure: Failure) -> None:
        """End with an error: by the status where none was sent, else by an event."""
        if self._streams:
            await self.events(failure.body, more=False)
        elif not self._ended:
            await self.whole(failure.status, failure.body, failure.headers)

    async def _write(self, body: bytes, more: bool) -> None:
        async with self._sending:
            if not self._streams:
                self._streams = True
                await self._start(200, EVENTS)
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in (headers | self._named).items()]  # type: ignore[operator]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})
