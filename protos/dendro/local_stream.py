"""Frames of a peers' stream over a Unix socket, between two processes of one machine.

A caller greets a replica over gRPC (`dendro.serving`), whose connection authenticates it and shows whether the other
process is gone or stands still. The hello names a socket and a ticket. A caller of the same machine and user that
presents the ticket there gets all later frames of the stream over the socket; elsewhere the name is unknown, and gRPC
carries them. A call and its answer then take less than half of the processor time and latency
(docs/design/states.md#streams-between-peers).

The name is an abstract one of unix(7): it is no file, and it ends with its process. A connection begins with a ticket,
which is answered by ACCEPTED. A frame is the length of its message as 4 bytes, the least first, and the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Self, cast

import grpc.aio
from google.protobuf.message import DecodeError

from dendro.errors import PeerLost
from dendro.tasks import BackgroundTasks

EOF = cast(Any, grpc.aio).EOF  # missing in its stubs

TICKET_BYTES = 16
ACCEPTED = b"\x01"
"""The replica's answer to a ticket that it expects."""
JOIN_S = 2.0
"""Seconds that a ticket and its answer may take. Without the answer, gRPC carries the frames."""
ACCEPT_AGAIN_S = 1.0
"""Seconds until the next attempt to accept a connection after one that failed."""
LENGTH_BYTES = 4
MOST_FRAMES = 64
"""Most unread frames before reading from the socket pauses; also the most frames read before other tasks run."""
MOST_NAME_BYTES = 64
_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end of a socket


class FrameSocket(asyncio.Protocol):
    """One end of a connection that carries frames. `read` and `write` are those of a gRPC call."""

    def __init__(self, frame: type[Any], most_bytes: int) -> None:
        """frame: message of the frames that come   most_bytes: of a message that comes"""
        self._frame = frame
        self._most_bytes = most_bytes
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._read_at_once = 0  # frames read since others of the event loop had a turn
        self._flows = asyncio.Event()  # set while the transport takes more bytes
        self._flows.set()
        self._fault = ""  # why the connection was ended here; empty if it was not
        self._ended = False
        self._transport: asyncio.Transport | None = None

    # The event loop calls these.
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) >= (begin := start + LENGTH_BYTES):
            size = int.from_bytes(self._received[start:begin], "little")
            if size > self._most_bytes:
                self._fault = f"sends a frame of {size} bytes"
                self.close()
                break
            if len(self._received) < begin + size:
                break
            self._messages.append(bytes(self._received[begin : begin + size]))
            start = begin + size
        del self._received[:start]
        if len(self._messages) > MOST_FRAMES and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        self._flows.clear()

    def resume_writing(self) -> None:
        self._flows.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._flows.set()
        self._wake()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    # A stream calls these.
    async def read(self) -> Any:
        """The next frame; EOF once the connection has ended. Raises PeerLost for bytes that are no frame."""
        self._read_at_once += 1
        if self._read_at_once > MOST_FRAMES:
            self._read_at_once = 1
            await asyncio.sleep(0)
        while not self._messages:
            if self._fault:
                raise PeerLost(self._fault)
            if self._ended:
                return EOF
            self._read_at_once = 1
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        message = self._messages.popleft()
        if not self._messages and self._transport is not None:
            self._transport.resume_reading()
        try:
            return self._frame.FromString(message)
        except DecodeError:
            self.close()
            raise PeerLost("sends bytes that are no frame") from None

    async def write(self, frame: Any) -> None:
        """Send a frame. Returns when the socket takes more. Raises PeerLost once the connection has ended."""
        if self._transport is None or self._transport.is_closing():
            raise PeerLost("the socket has ended")
        message = frame.SerializeToString()
        self._transport.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
        if not self._flows.is_set():
            await self._flows.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        frame = await self.read()
        if frame is EOF:
            raise StopAsyncIteration
        return frame

    def close(self) -> None:
        """End the connection. May be called again."""
        if self._transport is not None:
            self._transport.abort()


class LocalListener:
    """A replica's socket, where callers of its machine join the streams that they have begun over gRPC."""

    def __init__(self, frame: type[Any], most_bytes: int) -> None:
        """frame, most_bytes: those of every FrameSocket"""
        self.name = f"dendro-{secrets.token_hex(16)}"
        self._frame = frame
        self._most_bytes = most_bytes
        self._expected: dict[bytes, asyncio.Future[FrameSocket]] = {}  # key: ticket
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._socket.bind(_address(self.name))
        self._socket.listen()
        self._joining = BackgroundTasks()
        self._joining.start(self._accept())

    @classmethod
    def on_this_system(cls, frame: type[Any], most_bytes: int) -> LocalListener | None:
        """Listen, in the running event loop. None if the system has no abstract names."""
        return cls(frame, most_bytes) if sys.platform == "linux" else None

    async def _accept(self) -> None:
        while True:
            try:
                caller, _ = await asyncio.get_running_loop().sock_accept(self._socket)
            except OSError:  # the process has no free file descriptor
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            self._joining.start(self._admit(caller))

    async def _admit(self, caller: socket.socket) -> None:
        """Read a caller's ticket, and give its connection to the stream of the ticket; else close it."""
        loop = asyncio.get_running_loop()
        try:
            if _user_of(caller) != os.getuid():
                raise PermissionError
            async with asyncio.timeout(JOIN_S):
                ticket = await loop.sock_recv(caller, TICKET_BYTES)  # one message of its size is read whole
                expected = self._expected.pop(ticket, None)
                if expected is None:
                    raise PermissionError
                await loop.sock_sendall(caller, ACCEPTED)
            joined = FrameSocket(self._frame, self._most_bytes)
            await loop.connect_accepted_socket(lambda: joined, caller)
        except BaseException as error:
            caller.close()
            if not isinstance(error, (OSError, TimeoutError)):
                raise
            return
        if expected.done():  # the stream has ended meanwhile
            joined.close()
        else:
            expected.set_result(joined)

    @contextlib.contextmanager
    def expect(self) -> Iterator[tuple[bytes, asyncio.Future[FrameSocket]]]:
        """A new ticket, and the connection that presents it. Leaving the context ends both."""
        ticket, joined = secrets.token_bytes(TICKET_BYTES), asyncio.get_running_loop().create_future()
        self._expected[ticket] = joined
        try:
            yield ticket, joined
        finally:
            self._expected.pop(ticket, None)
            if joined.done() and not joined.cancelled():
                joined.result().close()
            joined.cancel()

    def close(self) -> None:
        self._joining.cancel()
        self._socket.close()


async def join(name: str, ticket: bytes, frame: type[Any], most_bytes: int) -> FrameSocket | None:
    """Connect to the listener of this name, with a ticket. None if it is not on this machine, or refuses.

    frame, most_bytes: those of the FrameSocket
    """
    if sys.platform != "linux" or not name or len(name.encode()) > MOST_NAME_BYTES or len(ticket) != TICKET_BYTES:
        return None
    loop = asyncio.get_running_loop()
    own = socket.socket(socket.AF_UNIX)
    own.setblocking(False)
    try:
        own.connect(_address(name))
        if _user_of(own) != os.getuid():  # a replica that lies could name any socket
            raise PermissionError
        async with asyncio.timeout(JOIN_S):
            await loop.sock_sendall(own, ticket)
            if await loop.sock_recv(own, len(ACCEPTED)) != ACCEPTED:
                raise PermissionError
        joined = FrameSocket(frame, most_bytes)
        await loop.create_unix_connection(lambda: joined, sock=own)
    except BaseException as error:
        own.close()
        if isinstance(error, (OSError, TimeoutError)):
            return None
        raise
    return joined


def _address(name: str) -> str:
    return "\0" + name


def _user_of(end: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    packed = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(packed)[1]
    return user
