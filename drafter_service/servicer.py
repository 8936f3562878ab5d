"""The drafter's gRPC service: frames of calls in, frames of trees out. Forwards to an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
from dendro import wire
from dendro.calls import DraftCall, DrafterPeer
from dendro.internal.v1 import calls_pb2, drafter_pb2, drafter_pb2_grpc
from dendro.serving import Leases, Replica, ReplicaKind, StreamServer, serve


def _calls(frame: drafter_pb2.DraftFrame) -> Sequence[drafter_pb2.DrafterCall]:
    return frame.calls


def _frame(hello: calls_pb2.Hello | None, answers: list[drafter_pb2.DrafterAnswer]) -> drafter_pb2.TreeFrame:
    return drafter_pb2.TreeFrame(hello=hello, answers=answers)


REPLICA_KIND: ReplicaKind[drafter_pb2.DraftFrame, drafter_pb2.TreeFrame, DraftCall] = ReplicaKind(
    calls=_calls, call_from=wire.drafter_call_from, answer=wire.drafter_answer_message, frame=_frame
)


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Forwards gRPC streams to a `StreamServer`."""

    def __init__(self, streams: StreamServer[Any, Any, Any]) -> None:
        self._streams = streams

    async def Rounds(  # type: ignore[override]  # the generated base allows blocking servers too
        self,
        request_iterator: AsyncIterator[drafter_pb2.DraftFrame],
        context: grpc.aio.ServicerContext[drafter_pb2.DraftFrame, drafter_pb2.TreeFrame],
    ) -> None:
        await self._streams.run(request_iterator, context)


async def serve_drafter(
    engine: DrafterPeer,
    leases: Leases | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    fault: Callable[[], str] | None = None,
) -> Replica:
    """Serve a started engine; the caller stops the returned replica. Without `leases`, calls need no lease.

    fault: why the engine cannot serve, empty if it can; called once a second.
    """

    async def draft(call: DraftCall) -> Any:
        return await engine.draft(call)

    hello = await engine.hello()
    streams = StreamServer(engine, draft, REPLICA_KIND, hello, leases)
    servicer = DrafterServicer(streams)
    return await serve(
        streams,
        lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server),
        host,
        port,
        fault,
    )
