"""Serves the HTTP API by uvicorn in the router's process and event loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Iterable
from typing import Any

import h11
import uvicorn
from dendro.destinations import address_of
from dendro.errors import Overloaded, PeerLost, one_line
from uvicorn.protocols.http.h11_impl import H11Protocol

from cluster.api.callers import Callers
from cluster.api.grpc import HANDSHAKE_S, READ_GRACE_S, most_connections
from cluster.api.listening import bind
from cluster.api.openai.app import application
from cluster.api.openai.bodies import BODY_S
from cluster.api.openai.errors import HttpRefused, failure_of
from cluster.api.openai.serving import BREAK_CONNECTION
from cluster.api.places import Places, network_of
from cluster.api.requests import CUT_S, RunningRequests
from cluster.router.ingress import Ingress

KEEP_ALIVE_S = 75
"""Seconds in which the headers of a connection's next request must have come. Clients' own limits of idle connections
are shorter, so that none sends a request while its connection is being closed."""
HEADER_BYTES, PART_BYTES = 1 << 14, 1 << 12
"""Bytes of a request's line and headers, and of the parts in which h11 gets what comes: it bounds headers that are not
whole yet, however long those are that come at once."""
MOST_CHUNKS = 1 << 12
"""Chunks of a body: of one byte or of a thousand, each takes as long to read, and nothing else runs meanwhile."""
MOST_AHEAD = 1 << 16
"""Bytes after a request, of those that follow it, which a connection reads before the request's answer is sent: it does
not see that its client has left while it does not read."""
ORIGIN = re.compile(rb"https?://[^/?]*/?", re.IGNORECASE)
"""What comes before the path where a request's target is a whole address (RFC 9112, 3.2.2)."""
ENDS = frozenset({b"content-length", b"transfer-encoding"})
"""Headers that name a body's end."""
WAITING = 2048
"""Connections that the system holds for a server which has not accepted them yet."""
ACCEPT_AGAIN_S = 0.1
"""Seconds after which a server accepts connections again, as when its process had no file descriptor left."""


class _Requests(h11.Connection):
    """Reads the requests of a connection, whose bodies have a bounded number of chunks."""

    fault = ""  # why what came is no request
    _chunks = 0

    def next_event(self) -> Any:
        try:
            return self._next_bounded()
        except h11.RemoteProtocolError as error:
            self.fault = str(error)
            raise

    def _next_bounded(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
            named = ORIGIN.match(event.target)
            event = h11.Request(
                method=event.method,
                headers=[each for each in event.headers if each[0] != b"upgrade"],  # no other protocol is spoken
                target=b"/" + event.target[named.end() :] if named else event.target,
                http_version=event.http_version,
            )
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            if self._chunks > MOST_CHUNKS:
                raise h11.RemoteProtocolError(f"a body has more than {MOST_CHUNKS} chunks")
        return event


class _Connection(H11Protocol):
    """A connection whose requests can break it, and which ends where none comes in time, or one takes too long. (h11,
    as it bounds the headers.)"""

    def __init__(self, request_s: float, *args: Any, **options: Any) -> None:
        """request_s: seconds that a request may take until its answer is written, its body's included"""
        super().__init__(*args, **options)
        self.conn = self._asked = _Requests(h11.SERVER, HEADER_BYTES)
        self.app_state = {BREAK_CONNECTION: self.abort}
        self.lost = self.loop.create_future()
        self._request_s = request_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting = self.loop.call_later(KEEP_ALIVE_S, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.cancel()
        if not self.lost.done():  # a stopped server has cancelled it
            self.lost.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PART_BYTES):
            if not self.transport.is_closing():
                super().data_received(data[start : start + PART_BYTES])

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self._waiting.cancel()
            self._waiting = self.loop.call_later(self._request_s, self.abort)
            if {name for name, _ in self.headers} >= ENDS:  # what follows may be a body's rest to a proxy before us
                self.shutdown()  # it ends the connection after the answer
        # h11 keeps a request that proposed another protocol in the second state until it is answered.
        ends = h11.DONE, h11.MIGHT_SWITCH_PROTOCOL  # type: ignore[attr-defined]  # h11's list of exports lacks it
        ended = self.conn.their_state in ends
        if ended and len(self.conn.trailing_data[0]) < MOST_AHEAD:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # else the request whose body is invalid would send an answer, too
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            failure = failure_of(HttpRefused(400, one_line(f"the request is not valid HTTP: {self._asked.fault}")), "")
            length = str(len(failure.body))
            headers = {"content-type": "application/json", "content-length": length, "connection": "close"}
            answer = h11.Response(status_code=failure.status, headers=[*headers.items()], reason=b"Bad Request")
            with contextlib.suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
                for event in (answer, h11.Data(data=failure.body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()
        else:  # an answer has begun, or been sent, before the body was read
            self.abort()

    def on_response_complete(self) -> None:
        self._waiting.cancel()
        self._waiting = self.loop.call_later(KEEP_ALIVE_S, self.abort)
        super().on_response_complete()  # may begin the next request

    def abort(self) -> None:
        """Close it without what its client has not read: a mere close would wait for that."""
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        self.abort()


class _EmbeddedServer(uvicorn.Server):
    """A server in a loop and a process that are not its own: it leaves signals alone. It bounds its connections from
    the moment that they are accepted, before TLS: uvicorn knows them from their first byte of HTTP."""

    def __init__(self, config: uvicorn.Config, request_s: float, places: Places, refused: Callable[[], None]) -> None:
        """request_s: see `_Connection`   places: for connections, by their clients' addresses   refused: called for a
        connection that has none"""
        super().__init__(config)
        self._request_s = request_s
        self._places = places
        self._refused = refused
        self._served: set[asyncio.Task[None]] = set()

    def open(self, listening: socket.socket) -> None:
        self.config.load()
        listening.listen(WAITING)
        self._listening = listening
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # `sock_accept` does not wait for a connection that is there
            try:
                accepted, peer = await loop.sock_accept(self._listening)
            except OSError:  # no file descriptor is left, or the client has gone
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            address = network_of(peer[0])
            try:
                self._places.take(address, 1)
            except Overloaded:
                accepted.close()
                self._refused()
                continue
            task = asyncio.create_task(self._converse(accepted, address))
            self._served.add(task)
            task.add_done_callback(self._served.discard)

    async def _converse(self, accepted: socket.socket, address: str) -> None:
        """Serve a connection until it ends."""
        connection = _Connection(self._request_s, self.config, self.server_state, {})
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self.config.ssl,
                ssl_handshake_timeout=HANDSHAKE_S if self.config.ssl else None,
            )
            await connection.lost
        except OSError:  # no TLS, or none in time
            accepted.close()
        finally:
            self._places.leave(address, 1)

    async def main_loop(self) -> None:
        """Renew the date in responses, until cancelled."""
        while True:
            await self.on_tick(0)
            await asyncio.sleep(1.0)

    def close(self) -> None:
        """Accept no more connections, and close each when its answer ends."""
        self._accepting.cancel()
        self._listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    def abort(self) -> None:
        """Break the connections that are left, whose clients do not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self._served:
            task.cancel()


class HttpServer:
    """A started server, at `address`."""

    def __init__(self, server: _EmbeddedServer, requests: RunningRequests, address: str) -> None:
        self.address = address
        self._server = server
        self._requests = requests
        self._dating = asyncio.create_task(server.main_loop())

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._server.server_state.connections)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Close the port, let running requests end, and end those that run after `drain_s`."""
        self._server.close()
        await self._requests.drain(drain_s)
        with contextlib.suppress(TimeoutError):  # a client may read slowly, or not at all
            async with asyncio.timeout(CUT_S):
                while self.connections:  # noqa: ASYNC110  # uvicorn has no event for it
                    await asyncio.sleep(0.01)
        self._dating.cancel()
        self._server.abort()


async def serve_http(
    ingress: Ingress,
    requests: RunningRequests,
    callers: Callers,
    healthy: Callable[[], bool] = lambda: True,
    host: str = "127.0.0.1",
    ports: Iterable[int] = (0,),
    share_port: bool = False,
) -> HttpServer:
    """Serve an ingress on the first of `ports` that is free; the caller must stop the server. Port 0: a free port.

    requests, callers: those of the router, over all protocols; `serve_router` makes the first, and follows the keys
    healthy: whether `/health` answers 200; else it answers 503
    share_port: see `serve_router`
    Raises EngineFailed where no port is free, and BadRequest for a certificate that cannot be used.
    """
    settings = ingress.config
    tls = settings.tls.clients
    files = tls.files() if tls is not None else None
    listening = bind(host, tuple(ports), "http.port", share_port)
    config = uvicorn.Config(
        application(ingress, requests, callers, healthy),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ssl_context_factory=(lambda *_: files.ssl_context()) if files is not None else None,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _EmbeddedServer(
        config,
        BODY_S + settings.router.request_timeout_s + 2 * READ_GRACE_S,
        Places(most_connections(settings.http.max_connections)),
        lambda: ingress.totals.failed(PeerLost("connection: too many are open")),
    )
    server.open(listening)
    return HttpServer(server, requests, address_of(host, int(listening.getsockname()[1])))
