"""The public gRPC API on a plain gRPC server. Errors become gRPC statuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from contextlib import aclosing

import grpc.aio
from dendro.answer import REASON_KEY
from dendro.client import CHANNEL_OPTIONS, TENANT_KEY
from dendro.errors import DendroError, EngineFailed, NotFound, Overloaded, one_line
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc

from cluster.router.admission import MAX_REQUEST_ID
from cluster.router.ingress import Ingress, log

READ_GRACE_S = 5.0
"""How long after its time limit a request's call stays open for a client that does not read. Its peers are released by
then."""
ABORT_S = 1.0
"""How long sending the status may take to a client that does not read."""


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str, str]:
    """Code, details and reason (the value of `dendro-reason`) of an error. Internal errors carry no details."""
    if isinstance(error, DendroError) and not isinstance(error, EngineFailed):
        reason = "session-unknown" if isinstance(error, NotFound) else type(error).__name__
        return error.code, one_line(str(error)), reason
    return grpc.StatusCode.INTERNAL, "internal error; the server's log has the request's id", "EngineFailed"


def logged_status(error: BaseException, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str, str]:
    """`status_of` the error that ended a request. An internal error is logged with its traceback."""
    code, details, reason = status_of(error)
    if code is grpc.StatusCode.INTERNAL:
        log.error("request %s failed", one_line(request.request_id, MAX_REQUEST_ID), exc_info=error)
    return code, details, reason


def tenant_of(metadata: Mapping[str, str | bytes]) -> str:
    """The tenant that the gateway wrote into the metadata; empty where there is no gateway."""
    value = metadata.get(TENANT_KEY, "")
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The gRPC shell of a server without Serve."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    async def Generate(  # type: ignore[override]  # the generated base allows blocking servers too
        self,
        request: pb.GenerateRequest,
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> None:
        """Write the events as the client reads them, until READ_GRACE_S after the request's time limit."""
        tenant = tenant_of(dict(context.invocation_metadata() or ()))
        unread = asyncio.timeout(self._ingress.config.router.request_timeout_s + READ_GRACE_S)
        try:
            async with unread, aclosing(self._ingress.generate(request, tenant)) as events:
                async for event in events:
                    await context.write(event)
        except Exception as raised:  # every error becomes a status; details of internal ones stay here
            error = Overloaded("request: its answer was not read in time") if unread.expired() else raised
            code, details, reason = logged_status(error, request)
            abort = context.abort(code, details, ((REASON_KEY, reason),))
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


async def serve_plain(ingress: Ingress, host: str = "127.0.0.1", port: int = 0) -> tuple[grpc.aio.Server, str]:
    """Serve an ingress without Ray. Returns the server, which the caller must stop, and its address. Port 0: a free
    port."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(ingress), server)
    bound = server.add_insecure_port(f"{host}:{port}")
    await server.start()
    return server, f"{host}:{bound}"
