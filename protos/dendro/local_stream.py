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
import logging
import os
import secrets
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self, cast

import grpc.aio
from google.protobuf.message import DecodeError

from dendro.errors import NO_FAULTS, PeerLost
from dendro.failures import log_failure
from dendro.tasks import BackgroundTasks

log = logging.getLogger("dendro.local_stream")

EOF = cast(Any, grpc.aio).EOF  # missing in its stubs

TICKET_BYTES = 16
ACCEPTED = b"\x01"
"""The replica's answer to a ticket that it expects."""
JOIN_S = 2.0
"""Seconds that a ticket and its answer may take. Without the answer, gRPC carries the frames."""
ACCEPT_AGAIN_S = 1.0
"""Seconds until the next attempt to accept a connection after one that failed."""
LENGTH_BYTES = 4
READ_BYTES = 1 << 16
"""Most bytes that one call of the system reads."""
MOST_FRAMES = 64
"""Most unread frames before reading from the socket pauses; also the most frames read before other tasks run."""
SHORT_BYTES = 4096
"""Most bytes of a frame that is handled as it arrives."""
MOST_NAME_BYTES = 64
_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end of a socket


class FrameSocket:
    """One end of a connection that carries frames. `read` and `write` are those of a gRPC call. Belongs to the event
    loop in which it is made; `send` may be called from any thread."""

    def __init__(self, own: socket.socket, frame: type[Any], most_bytes: int) -> None:
        """own: connected, and not blocking   frame: message of the frames that come   most_bytes: of a message that
        comes"""
        self._socket = own
        self._frame = frame
        self._most_bytes = most_bytes
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._paused = False  # nothing is read from the socket
        self._take: Callable[[Any], bool] | None = None
        self._read_at_once = 0  # frames read since others of the event loop had a turn
        self._sending = threading.Lock()  # held while bytes go to the socket, and while it is closed
        self._unsent = bytearray()  # bytes that the socket has not taken; only the event loop removes them
        self._flows = asyncio.Event()  # set while a `write` need not wait
        self._fault = ""  # why the connection was ended here; empty if it was not
        self._ended = False
        self._loop.add_reader(own, self._receive)

    # The event loop calls these.
    def _receive(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._received += data
        start = taken = 0
        while len(self._received) >= (begin := start + LENGTH_BYTES) and not self._ended:
            size = int.from_bytes(self._received[start:begin], "little")
            if size > self._most_bytes:
                self._fault = f"sends a frame of {size} bytes"
                self.close()
                break
            if len(self._received) < begin + size:
                break
            message = bytes(self._received[begin : begin + size])
            start = begin + size
            taken += 1
            try:
                if taken > MOST_FRAMES or not self._taken(message):
                    self._messages.append(message)
            except BaseException as error:  # a panic of a native library is no Exception
                if isinstance(error, NO_FAULTS):
                    raise
                log_failure(log, error, "a frame could not be handled")
                self._fault = "sends a frame that could not be handled"
                self.close()
        del self._received[:start]
        if len(self._messages) > MOST_FRAMES and not self._ended:
            self._loop.remove_reader(self._socket)
            self._paused = True
        if self._messages:
            self._wake()

    def _taken(self, message: bytes) -> bool:
        """Give a short frame to `take` if all before it were handled: while a `read` waits."""
        waits = self._reading is not None and not self._reading.done() and not self._messages
        if self._take is None or not waits or len(message) > SHORT_BYTES:
            return False
        try:
            frame = self._frame.FromString(message)
        except DecodeError:
            return False  # `read` raises
        return self._take(frame)

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def _send_later(self) -> None:
        """Send the bytes that the socket has not taken, once it takes more."""
        if not self._ended:
            self._loop.add_writer(self._socket, self._send_unsent)

    def _send_unsent(self) -> None:
        with self._sending:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._unsent.clear()
                self._shut()
            if self._unsent:
                return
            self._loop.remove_writer(self._socket)
        self._flows.set()

    # A stream calls these.
    def take_with(self, take: Callable[[Any], bool]) -> None:
        """Give short frames to `take` as they arrive while a `read` waits, in no task: a task would begin a turn of the
        event loop later. `take` returns False for a frame that `read` is to return. What it raises ends the
        connection."""
        self._take = take

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
            self._reading = self._loop.create_future()
            await self._reading
        message = self._messages.popleft()
        if self._paused and not self._messages and not self._ended:
            self._paused = False
            self._loop.add_reader(self._socket, self._receive)
        try:
            return self._frame.FromString(message)
        except DecodeError:
            self.close()
            raise PeerLost("sends bytes that are no frame") from None

    async def write(self, frame: Any) -> None:
        """Send a frame. Returns when the socket takes more. Raises PeerLost once the connection has ended."""
        self.send(frame)
        if self._unsent:
            self._flows.clear()
            await self._flows.wait()

    @property
    def flows(self) -> bool:
        """False while the socket has not taken all bytes that were sent."""
        return not self._unsent

    def send(self, frame: Any) -> None:
        """Send a frame, from any thread. Bytes that the socket does not take now are sent later. Raises PeerLost once
        the connection has ended."""
        message = frame.SerializeToString()
        data = len(message).to_bytes(LENGTH_BYTES, "little") + message
        with self._sending:
            if self._ended:
                raise PeerLost("the socket has ended")
            sent = 0
            if not self._unsent:
                try:
                    sent = self._socket.send(data)
                except (BlockingIOError, InterruptedError):
                    pass
                except OSError:
                    self._shut()
                    raise PeerLost("the socket has ended") from None
                if sent == len(data):
                    return
                try:
                    self._loop.call_soon_threadsafe(self._send_later)
                except RuntimeError:  # the loop is closed: the process ends
                    raise PeerLost("the socket has ended") from None
            self._unsent += data[sent:]

    def _shut(self) -> None:
        """End the connection after a send that failed, from any thread: both ends read its end. A part of a frame may
        have been sent, after which no other may follow."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        frame = await self.read()
        if frame is EOF:
            raise StopAsyncIteration
        return frame

    def close(self) -> None:
        """End the connection. May be called again."""
        if self._ended:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        with self._sending:
            self._ended = True
            self._socket.close()
            self._unsent.clear()
        self._flows.set()
        self._wake()


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
        except BaseException as error:
            caller.close()
            if not isinstance(error, (OSError, TimeoutError)):
                raise
            return
        if expected.done():  # the stream has ended meanwhile
            caller.close()
        else:
            expected.set_result(FrameSocket(caller, self._frame, self._most_bytes))

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
    except BaseException as error:
        own.close()
        if isinstance(error, (OSError, TimeoutError)):
            return None
        raise
    return FrameSocket(own, frame, most_bytes)


def _address(name: str) -> str:
    return "\0" + name


def _user_of(end: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket."""
    packed = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(packed)[1]
    return user
