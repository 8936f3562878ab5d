"""Bounds the streams of gRPC that need no key, of health and reflection: anyone may begin one, and it need not end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc.aio
from dendro.errors import Overloaded
from google.protobuf.message import Message

from cluster.api.places import Places, network_of

MOST_STREAMS = 1024
"""Streams without a key that run at once at a router. The last eighth is kept for addresses that have less than an
equal share."""
MOST_BYTES = 4096
"""Bytes of the message that begins a stream: the name of a watched service is held as long as it is watched."""

Answer = Callable[[Any, Any], Any]


class KeylessStreams(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # it is not generic when it runs
    """Refuses streams of other services than `service` past MOST_STREAMS."""

    def __init__(self, service: str) -> None:
        self._keyed = f"/{service}/"
        self._places = Places(MOST_STREAMS)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming or handler_call_details.method.startswith(self._keyed):
            return handler
        one = handler.stream_stream is None
        made = grpc.unary_stream_rpc_method_handler if one else grpc.stream_stream_rpc_method_handler
        answer = handler.unary_stream if one else handler.stream_stream
        return made(self._bounded(answer), handler.request_deserializer, handler.response_serializer)

    def _bounded(self, answer: Answer) -> Answer:
        async def run(asked: Any, context: Any) -> None:
            if isinstance(asked, Message) and asked.ByteSize() > MOST_BYTES:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"request: has more than {MOST_BYTES} bytes")
            address = network_of_peer(context.peer())
            try:
                self._places.take(address, 1)
            except Overloaded as error:
                await context.abort(error.code, "router: too many streams without a key run here; try again later")
            try:
                answers = answer(asked, context)
                if hasattr(answers, "__aiter__"):
                    async for each in answers:
                        await context.write(each)
                else:
                    await answers
            finally:
                self._places.leave(address, 1)

        return run


def network_of_peer(peer: str) -> str:
    """`network_of` a peer of gRPC, such as `ipv4:192.0.2.1:5000` or `ipv6:%5B2001:db8::1%5D:5000`."""
    return network_of(unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]"))
