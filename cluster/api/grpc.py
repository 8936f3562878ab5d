"""The router's own gRPC server: the public API, health and reflection. Errors become gRPC statuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc.aio
from dendro.answer import REASON_KEY
from dendro.client import MAX_MESSAGE_BYTES, TENANT_KEY
from dendro.errors import NO_FAULTS, DendroError, EngineFailed, NotFound, OutOfTime, one_line
from dendro.samples import count_of_answers
from dendro.serving import KEEPALIVE_OPTIONS
from dendro.v1 import generation_pb2 as pb
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.api.reading import SHORT_BYTES, Request, read_request
from cluster.api.requests import CUT_S, RunningRequests, identified
from cluster.router.admission import MAX_REQUEST_ID
from cluster.router.ingress import Ingress, log

Response = TypeVar("Response")

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

CONNECTION_AGE = "grpc.max_connection_age_ms"
"""A connection so old takes no more calls, and its client looks the router's name up again; its streams run to their
ends. Clients of other languages so call routers that were added behind a name."""
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    (CONNECTION_AGE, 300_000),
    *KEEPALIVE_OPTIONS,
)
"""Options of a server that clients call."""

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
    """`status_of` the error that ended a request. An internal error is logged with its traceback."""
    code, details, reason = status_of(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error("request %s failed", one_line(request_id, MAX_REQUEST_ID), exc_info=error)
    return code, details, reason


def tenant_of(metadata: Mapping[str, str | bytes]) -> str:
    """The tenant that the gateway wrote into the metadata; empty where there is no gateway."""
    value = metadata.get(TENANT_KEY, "")
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class GenerationServicer:
    """The gRPC shell of an ingress."""

    def __init__(self, ingress: Ingress, requests: RunningRequests) -> None:
        self._ingress = ingress
        self._requests = requests
        self._longest_text = ingress.longest_text
        self._reading = asyncio.Lock()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The methods as gRPC takes them. Those with a prompt get bytes, read in bounded time."""
        methods = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate, response_serializer=pb.GenerateResponse.SerializeToString
            ),
            "GetServerInfo": grpc.unary_unary_rpc_method_handler(
                self.GetServerInfo,
                request_deserializer=pb.GetServerInfoRequest.FromString,
                response_serializer=pb.GetServerInfoResponse.SerializeToString,
            ),
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                self.Tokenize, response_serializer=pb.TokenizeResponse.SerializeToString
            ),
            "Detokenize": grpc.unary_unary_rpc_method_handler(
                self.Detokenize, response_serializer=pb.DetokenizeResponse.SerializeToString
            ),
            "Abort": grpc.unary_unary_rpc_method_handler(
                self.Abort,
                request_deserializer=pb.AbortRequest.FromString,
                response_serializer=pb.AbortResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def Generate(self, data: bytes, context: grpc.aio.ServicerContext[bytes, pb.GenerateResponse]) -> None:
        """Stream the answer. Refuses a request past the limit with RESOURCE_EXHAUSTED."""
        tenant = tenant_of(dict(context.invocation_metadata() or ()))
        try:
            request = await self._read(pb.GenerateRequest, data)
            request_id = identified(request)
            with self._requests.run(tenant, request_id, count_of_answers(request)):
                events = self._ingress.generate(request, tenant)
                del request  # it may be large, and an answer may take long
                await self._write(events, request_id, context)
        except DendroError as error:  # not the ingress's: `_write` has sent those, and the ingress counted them
            self._ingress.totals.failed(error)
            await _abort(context, *status_of(error))

    async def _read(self, kind: type[Request], data: bytes) -> Request:
        """The message. Long ones are read one after another, so that many take no more memory and time at once than
        one."""
        config = self._ingress.config.router
        read = partial(read_request, kind, data, self._longest_text, config.max_prompt_bytes)
        if len(data) <= SHORT_BYTES:
            return read()
        async with self._reading:
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
            abort = _abort(context, *logged_status(error, request_id))
            if not unread.expired():
                await abort
            with contextlib.suppress(TimeoutError):  # the status is sent after the events that the client does not read
                async with asyncio.timeout(ABORT_S):
                    await abort
            raise asyncio.CancelledError from None  # which ends the call without a status

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: grpc.aio.ServicerContext[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        return self._ingress.info()

    async def Tokenize(
        self, data: bytes, context: grpc.aio.ServicerContext[bytes, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        async def answer() -> pb.TokenizeResponse:
            return await self._ingress.tokenize(await self._read(pb.TokenizeRequest, data))

        return await _answered(answer(), context)

    async def Detokenize(
        self, data: bytes, context: grpc.aio.ServicerContext[bytes, pb.DetokenizeResponse]
    ) -> pb.DetokenizeResponse:
        async def answer() -> pb.DetokenizeResponse:
            return await self._ingress.detokenize(await self._read(pb.DetokenizeRequest, data))

        return await _answered(answer(), context)

    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        tenant = tenant_of(dict(context.invocation_metadata() or ()))
        return pb.AbortResponse(aborted=self._requests.abort(tenant, request.request_id))


async def _answered(answer: Awaitable[Response], context: Any) -> Response:
    """The answer of a unary call. Its error becomes a status."""
    try:
        return await answer
    except BaseException as raised:
        if isinstance(raised, NO_FAULTS):
            raise
        await _abort(context, *logged_status(raised, "without an id"))
        raise  # not reached: `abort` raises


async def _abort(context: Any, code: grpc.StatusCode, details: str, reason: str) -> None:
    await context.abort(code, details, ((REASON_KEY, reason),))


class RouterServer:
    """A started server of one ingress, at `address`."""

    def __init__(self, server: grpc.aio.Server, status: Any, requests: RunningRequests, address: str) -> None:
        """status: a health.aio.HealthServicer, which the stubs lack"""
        self._server = server
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
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.ensure_future(self._server.stop(drain_s + 2 * CUT_S))
        await self.requests.drain(drain_s)
        await asyncio.sleep(0)  # lets the calls of ended requests send their status
        await self._server.stop(0.0)  # ends the calls that watch the health
        await stopping


async def serve_router(
    ingress: Ingress,
    host: str = "127.0.0.1",
    ports: Iterable[int] = (0,),
    share_port: bool = False,
    healthy: bool = True,
) -> RouterServer:
    """Serve an ingress on the first of `ports` that is free; the caller must stop the server. Port 0: a free port.

    share_port: other processes of this user may listen on the same port; the kernel divides connections among them.
    healthy: whether the health is SERVING from the start
    Raises EngineFailed where no port is free.
    """
    server = grpc.aio.server(options=(*SERVER_OPTIONS, ("grpc.so_reuseport", int(share_port))))
    requests = RunningRequests(ingress.config.router.max_requests)
    server.add_generic_rpc_handlers((GenerationServicer(ingress, requests).handlers(),))
    status = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    running = RouterServer(server, status, requests, _bind(server, host, tuple(ports)))
    await running.set_healthy(healthy)
    await server.start()
    return running


def _bind(server: grpc.aio.Server, host: str, ports: tuple[int, ...]) -> str:
    for port in ports:
        with contextlib.suppress(RuntimeError):  # raised by gRPC for a port that is taken
            return address_of(host, server.add_insecure_port(address_of(host, port)))
    raise EngineFailed(f"grpc.port: the router cannot listen at {host} on {', '.join(map(str, ports))}")


def address_of(host: str, port: int) -> str:
    """`host:port`; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
