"""The gRPC services of drafters and verifiers: frames of calls in, frames of answers out."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dendro import wire
from dendro.calls import DraftCall, Peer
from dendro.certificates import CertificateFiles
from dendro.destinations import address_of
from dendro.internal.v1 import drafter_pb2, verifier_pb2
from dendro.local_stream import LocalListener
from dendro.serving import MAX_MESSAGE_BYTES, SERVER_OPTIONS, BeginSpan, Leases, Replica, ReplicaKind, StreamServer

DRAFTER_REPLICA = ReplicaKind(
    service=drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name,
    calls=drafter_pb2.DraftFrame,
    answers=drafter_pb2.TreeFrame,
    call_from=wire.drafter_call_from,
    answer=wire.drafter_answer_message,
    begin=lambda engine, call, deliver: engine.draft_for(call, deliver),
    ordered=DraftCall,
)
VERIFIER_REPLICA = ReplicaKind(
    service=verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name,
    calls=verifier_pb2.VerifyFrame,
    answers=verifier_pb2.VerdictFrame,
    call_from=wire.verifier_call_from,
    answer=wire.verifier_answer_message,
    begin=lambda engine, call, deliver: engine.verify_for(call, deliver),
)


async def serve_engine(
    kind: ReplicaKind,
    engine: Peer,
    leases: Leases | None = None,
    host: str = "127.0.0.1",
    fault: Callable[[], str] | None = None,
    certificates: CertificateFiles | None = None,
    begin_span: BeginSpan | None = None,
) -> Replica:
    """Serve a started engine, and a health service; the caller stops the replica. Without `leases`, calls need none.

    begin_span: for texts whose answers are sampled
    certificates: of this peer, whose callers then need one of their own; without them, no TLS
    fault: called once a second; why the engine cannot serve now, empty if it can. A fault makes the health NOT_SERVING
    """
    hello, secured = await engine.hello(), certificates is not None
    local = LocalListener.on_this_system(kind.calls, MAX_MESSAGE_BYTES)
    streams = StreamServer(engine, kind, hello, leases, authenticated=secured, begin_span=begin_span, local=local)
    rounds = grpc.stream_stream_rpc_method_handler(
        streams.run, request_deserializer=kind.calls.FromString, response_serializer=methodcaller("SerializeToString")
    )
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(kind.service, {"Rounds": rounds}),))
    status = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    address = address_of(host, 0)  # any free port
    if certificates is None:
        bound = server.add_insecure_port(address)
    else:
        bound = server.add_secure_port(address, certificates.server_credentials())
    await server.start()
    await status.set("", health_pb2.HealthCheckResponse.SERVING)
    replica = Replica(streams, server, status, address_of(host, bound), local)
    if fault is not None:
        replica.watch(fault)
    return replica
