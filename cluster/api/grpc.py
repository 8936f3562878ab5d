"""The router's own gRPC server: the public API, health and reflection. Errors become gRPC statuses."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

import grpc.aio
from dendro.answer import REASON_KEY, RETRY_AFTER_KEY, count_of_answers
from dendro.certificates import CertificateFiles
from dendro.client import MAX_MESSAGE_BYTES
from dendro.destinations import address_of
from dendro.errors import (
    NO_FAULTS,
    BadRequest,
    DendroError,
    EngineFailed,
    LimitReached,
    NotFound,
    OutOfTime,
    one_line,
)
from dendro.failures import log_failure
from dendro.options import MAX_REQUEST_ID
from dendro.serving import KEEPALIVE_OPTIONS
from dendro.tasks import TenantLock
from dendro.v1 import generation_pb2 as pb
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.api.callers import CallerIdentity, Callers
from cluster.api.keyless import KeylessStreams
from cluster.api.reading import SHORT_BYTES, Request, read_request
from cluster.api.requests import CUT_S, RunningRequests, identified
from cluster.router.ingress import Ingress, log

Response = TypeVar("Response")

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

HANDSHAKE_S = 10.0
"""Seconds that a new connection may take to begin, TLS included."""
CONNECTION_AGE = "grpc.max_connection_age_ms"
"""A connection so old takes no more calls, and its client looks the router's name up again; its answers run to their
ends. Clients of other languages so call routers that were added behind a name."""
CONNECTION_GRACE = "grpc.max_connection_age_grace_ms"
"""Milliseconds after that age in which all answers have ended. Streams that never end, as of health, end then."""
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    (CONNECTION_AGE, 300_000),
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    *KEEPALIVE_OPTIONS,
)
"""Options of a server that clients call."""

SEND_S = 30.0
"""Seconds that a client may take to send its request."""
READ_GRACE_S = 5.0
"""Seconds after its time limit for which a request's call stays open for a client that does not read. The request's
peers are released by then."""
ABORT_S = 1.0
"""Seconds that sending the status to a client that does not read may take."""


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str, str]:
    """Code, details and reason (the value of `dendro-reason`) of an error. Internal errors carry no details."""
    if isinstance(error, DendroError) and not isinstance(error, EngineFailed):
        reason = "session-unknown" if isinstance(error, NotFound) else type(error).__name__
        return error.code, one_line(str(error)), reason
    return grpc.StatusCode.INTERNAL, "internal error; the server's log has the request's id", "EngineFailed"


def logged_status(error: BaseException, request_id: str) -> tuple[grpc.StatusCode, str, str]:
    """`status_of` the error that ended a request. An internal error is logged with its stack."""
    code, details, reason = status_of(error)
    if code is grpc.StatusCode.INTERNAL:
        log_failure(log, error, "request %s failed", one_line(request_id, MAX_REQUEST_ID))
    return code, details, reason


class GenerationServicer:
    """The gRPC shell of an ingress."""

    def __init__(self, ingress: Ingress, requests: RunningRequests, callers: Callers) -> None:
        self._ingress = ingress
        self._requests = requests
        self._callers = callers
        self._longest_text = ingress.longest_text
        self._reading = TenantLock()
        self._calls: set[asyncio.Task[Any]] = set()  # calls whose message came, and whose status is not sent yet

    async def ended(self) -> None:
        """Wait until the status of each call whose message came is sent, but no longer than CUT_S."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=CUT_S)

    async def _message(self, messages: AsyncIterator[bytes]) -> bytes:
        """The message of the current task's call, which is counted from then on until it ends."""
        data = await _one_message(messages)
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return data

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The methods as gRPC takes them. Each gets a stream of bytes, so that it knows who calls before it takes the
        one message of a call, which it then reads in bounded time."""
        unary = {
            "GetServerInfo": self.GetServerInfo,
            "Tokenize": self.Tokenize,
            "Detokenize": self.Detokenize,
            "Abort": self.Abort,
            "Explain": self.Explain,
        }
        methods: dict[str, Any] = {
            name: grpc.stream_unary_rpc_method_handler(
                partial(self._answer, method), response_serializer=methodcaller("SerializeToString")
            )
            for name, method in unary.items()
        }
        methods["Generate"] = grpc.stream_stream_rpc_method_handler(
            self.Generate, response_serializer=pb.GenerateResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def Generate(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, pb.GenerateResponse]
    ) -> None:
        """Stream the answer. Refuses a caller without a valid key, and a request past a limit."""
        try:
            caller = self._caller(context)
            request = await self._read(pb.GenerateRequest, await self._message(messages), caller.tenant)
            request_id = identified(request)
            with self._requests.run(caller.tenant, request_id, count_of_answers(request)):
                events = self._ingress.generate(request, caller.tenant, caller.allowance, caller.traceparent)
                del request  # it may be large, and an answer may take long
                await self._write(events, request_id, context)
        except DendroError as error:  # not the ingress's: `_write` has sent those, and the ingress counted them
            self._ingress.totals.failed(error)
            await _abort(context, error)

    def _caller(self, context: Any) -> CallerIdentity:
        """Who calls. Raises Unauthenticated or LimitReached."""
        return self._callers.caller(context.invocation_metadata() or ())

    async def _answer(
        self,
        method: Callable[[CallerIdentity, bytes], Awaitable[Response]],
        messages: AsyncIterator[bytes],
        context: Any,
    ) -> Response:
        """Answer a call of a method that is no stream. Its error becomes a status."""
        try:
            caller = self._caller(context)
            return await method(caller, await self._message(messages))
        except BaseException as raised:
            if isinstance(raised, NO_FAULTS):
                raise
            self._ingress.totals.failed(raised)
            await _abort(context, raised, "without an id")
            raise  # not reached: `abort` raises

    async def _read(self, kind: type[Request], data: bytes, tenant: str) -> Request:
        """The message. Long ones are read one after another, those of tenants in turns, so that many take no more
        memory and time at once than one."""
        config = self._ingress.config.router
        read = partial(read_request, kind, data, self._longest_text, config.max_prompt_bytes)
        if len(data) <= SHORT_BYTES:
            return read()
        async with self._reading.of(tenant):
            return await asyncio.to_thread(read)

    async def _write(
        self,
        responses: AsyncGenerator[pb.GenerateResponse, None],
        request_id: str,
        context: grpc.aio.ServicerContext[bytes, pb.GenerateResponse],
    ) -> None:
        """Write the events as the client reads them, until READ_GRACE_S after the request's time limit."""
        unread = asyncio.timeout(self._ingress.config.router.request_timeout_s + READ_GRACE_S)
        try:
            async with unread, aclosing(responses) as events:
                async for event in events:
                    await context.write(event)
                    self._requests.count_rounds(event.HasField("chunk"))
        except BaseException as raised:  # every fault becomes a status; details of internal ones stay here
            if isinstance(raised, NO_FAULTS):
                raise
            error = OutOfTime("request: its answer was not read in time") if unread.expired() else raised
            if unread.expired():
                self._ingress.totals.failed(error)
            abort = _abort(context, error, request_id)
            if not unread.expired():
                await abort
            with contextlib.suppress(TimeoutError):  # the status is sent after the events that the client does not read
                async with asyncio.timeout(ABORT_S):
                    await abort
            raise asyncio.CancelledError from None  # a cancelled call ends without a status

    async def GetServerInfo(self, caller: CallerIdentity, data: bytes) -> pb.GetServerInfoResponse:
        await self._read(pb.GetServerInfoRequest, data, caller.tenant)
        return self._ingress.info()

    async def Tokenize(self, caller: CallerIdentity, data: bytes) -> pb.TokenizeResponse:
        return await self._ingress.tokenize(await self._read(pb.TokenizeRequest, data, caller.tenant))

    async def Detokenize(self, caller: CallerIdentity, data: bytes) -> pb.DetokenizeResponse:
        return await self._ingress.detokenize(await self._read(pb.DetokenizeRequest, data, caller.tenant))

    async def Abort(self, caller: CallerIdentity, data: bytes) -> pb.AbortResponse:
        request = await self._read(pb.AbortRequest, data, caller.tenant)
        return pb.AbortResponse(aborted=await self._requests.abort_everywhere(caller.tenant, (request.request_id,)))

    async def Explain(self, caller: CallerIdentity, data: bytes) -> pb.ExplainResponse:
        return self._ingress.explain(await self._read(pb.ExplainRequest, data, caller.tenant), caller.tenant)


async def _one_message(messages: AsyncIterator[bytes]) -> bytes:
    """The message of a call that has one. Raises BadRequest where there is none, or it comes too slowly."""
    try:
        async with asyncio.timeout(SEND_S):
            data = await anext(aiter(messages), None)
    except TimeoutError:
        raise BadRequest("request", f"did not arrive within {SEND_S:g} s") from None
    if data is None:
        raise BadRequest("request", "is missing")
    return data


async def _abort(context: Any, error: BaseException, request_id: str = "") -> None:
    """End a call with the status of an error. request_id: in the log of an internal one"""
    code, details, reason = logged_status(error, request_id)
    wait = ((RETRY_AFTER_KEY, f"{error.retry_after_s:.0f}"),) if isinstance(error, LimitReached) else ()
    await context.abort(code, details, ((REASON_KEY, reason), *wait))


class RouterServer:
    """A started server of one ingress, at `address`."""

    def __init__(
        self,
        server: grpc.aio.Server,
        servicer: GenerationServicer,
        status: Any,
        requests: RunningRequests,
        address: str,
        callers: Callers,
    ) -> None:
        """status: a health.aio.HealthServicer, which the stubs lack"""
        self._watching = asyncio.create_task(callers.watch())
        self._server = server
        self._servicer = servicer
        self._health = status
        self.requests = requests
        self.address = address
        self.healthy = False

    def stats(self) -> dict[str, int]:
        """Counters and gauges of the requests."""
        return self.requests.stats()

    async def set_healthy(self, healthy: bool) -> None:
        """Report SERVING or NOT_SERVING. Requests are served in either case."""
        self.healthy = healthy
        status = health_pb2.HealthCheckResponse.SERVING if healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Report NOT_SERVING, close the port, send GOAWAY, and let running requests end. Those that run after `drain_s`
        are ended with UNAVAILABLE, at which clients resume them elsewhere."""
        self.healthy = False
        self._watching.cancel()
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.ensure_future(self._server.stop(drain_s + 2 * CUT_S))
        await self.requests.drain(drain_s)
        await self._servicer.ended()
        await self._server.stop(0.0)  # ends the calls that watch the health
        await stopping


async def serve_router(
    ingress: Ingress,
    host: str = "127.0.0.1",
    ports: Iterable[int] = (0,),
    share_port: bool = False,
    healthy: bool = True,
    callers: Callers | None = None,
    certificates: CertificateFiles | None = None,
) -> RouterServer:
    """Serve an ingress on the first of `ports` that is free; the caller must stop the server. Port 0: a free port.

    share_port: other processes of this user may listen on the same port; the kernel divides connections among them.
    healthy: whether the health is SERVING from the start
    callers: who may call, shared with other doors of this router; default: those of the ingress's configuration
    certificates: of TLS; default: those of the ingress's configuration, none without them
    Raises EngineFailed where no port is free, and BadRequest for an invalid file of keys or a certificate.
    """
    callers = callers or Callers(ingress.config)
    if certificates is None and ingress.config.tls.clients is not None:
        certificates = ingress.config.tls.clients.files()
    longest_s = ingress.config.router.request_timeout_s + SEND_S + 2 * READ_GRACE_S
    options = (
        ("grpc.so_reuseport", int(share_port)),
        ("grpc.max_allowed_incoming_connections", most_connections(ingress.config.grpc.max_connections)),
        (CONNECTION_GRACE, int(longest_s * 1000)),
    )
    server = grpc.aio.server(interceptors=(KeylessStreams(SERVICE),), options=(*SERVER_OPTIONS, *options))
    requests = RunningRequests(ingress.config.router.max_requests, ingress.turns.writing)
    servicer = GenerationServicer(ingress, requests, callers)
    server.add_generic_rpc_handlers((servicer.handlers(),))
    status = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    address = _bind(server, host, tuple(ports), certificates)
    running = RouterServer(server, servicer, status, requests, address, callers)
    await running.set_healthy(healthy)
    await server.start()
    return running


def _bind(server: grpc.aio.Server, host: str, ports: tuple[int, ...], certificates: CertificateFiles | None) -> str:
    for port in ports:
        wanted = address_of(host, port)
        with contextlib.suppress(RuntimeError):  # raised by gRPC for a port that is taken
            if certificates is None:
                return address_of(host, server.add_insecure_port(wanted))
            return address_of(host, server.add_secure_port(wanted, certificates.server_credentials()))
    raise EngineFailed(f"grpc.port: the router cannot listen at {host} on {', '.join(map(str, ports))}")


def most_connections(configured: int) -> int:
    """Connections of one port that may be open: a process's peers, files and other port need descriptors, too."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(configured, files // 4) if files > 0 else configured


def port_of(address: str) -> int:
    """The port of `host:port`."""
    return int(address.rpartition(":")[2])
