"""The verifier's gRPC service: frames of calls in, frames of verdicts out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
from dendro import wire
from dendro.calls import VerifierPeer, VerifyCall
from dendro.internal.v1 import calls_pb2, verifier_pb2, verifier_pb2_grpc
from dendro.serving import Leases, Replica, ReplicaKind, StreamServer, serve


def _calls(frame: verifier_pb2.VerifyFrame) -> Sequence[verifier_pb2.VerifierCall]:
    return frame.calls


def _frame(hello: calls_pb2.Hello | None, answers: list[verifier_pb2.VerifierAnswer]) -> verifier_pb2.VerdictFrame:
    return verifier_pb2.VerdictFrame(hello=hello, answers=answers)


REPLICA_KIND: ReplicaKind[verifier_pb2.VerifyFrame, verifier_pb2.VerdictFrame, VerifyCall] = ReplicaKind(
    calls=_calls, call_from=wire.verifier_call_from, answer=wire.verifier_answer_message, frame=_frame
)


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """The class that gRPC calls; `StreamServer` does the work."""

    def __init__(self, streams: StreamServer[Any, Any, Any]) -> None:
        self._streams = streams

    async def Rounds(  # type: ignore[override]  # the generated base allows blocking servers too
        self,
        request_iterator: AsyncIterator[verifier_pb2.VerifyFrame],
        context: grpc.aio.ServicerContext[verifier_pb2.VerifyFrame, verifier_pb2.VerdictFrame],
    ) -> None:
        await self._streams.run(request_iterator, context)


async def serve_verifier(
    engine: VerifierPeer,
    leases: Leases | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    fault: Callable[[], str] | None = None,
) -> Replica:
    """Serve a started engine; the caller stops the replica. Without `leases`, calls need no lease.

    fault: called once a second; returns why the engine cannot serve now, "" where it can.
    """

    async def verify(call: VerifyCall) -> Any:
        return await engine.verify(call)

    hello = await engine.hello()
    streams = StreamServer(engine, verify, REPLICA_KIND, hello, leases)
    servicer = VerifierServicer(streams)
    return await serve(
        streams,
        lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server),
        host,
        port,
        fault,
    )
