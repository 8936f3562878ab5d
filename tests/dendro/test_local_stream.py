"""Frames over a Unix socket, and callers that join one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from types import SimpleNamespace

import pytest
import uvloop
from dendro import local_stream
from dendro.errors import PeerLost
from dendro.internal.v1 import calls_pb2, verifier_pb2
from dendro.local_stream import EOF, FrameSocket, LocalListener, join
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sockets import until

MOST = 1 << 16


def frame(number: int, size: int = 0) -> verifier_pb2.VerifyFrame:
    calls = [verifier_pb2.VerifierCall(call=number, update=calls_pb2.TextUpdate(opening=b"x" * size))]
    return verifier_pb2.VerifyFrame(calls=calls)


def bytes_of(message) -> bytes:
    data = message.SerializeToString()
    return len(data).to_bytes(4, "little") + data


@contextlib.asynccontextmanager
async def joined(most_bytes: int = MOST):
    """Both ends of a stream: the caller's and the replica's."""
    listener = LocalListener(verifier_pb2.VerifyFrame, most_bytes)
    with listener.expect() as (ticket, other):
        caller = await join(listener.name, ticket, verifier_pb2.VerifyFrame, most_bytes)
        assert caller is not None
        try:
            yield caller, await other
        finally:
            caller.close()
            listener.close()


@contextlib.contextmanager
def stream_of_bytes():
    """A stream, and the socket from which its bytes come."""
    own, other = socket.socketpair()
    own.setblocking(False)
    other.setblocking(False)
    stream = FrameSocket(own, verifier_pb2.VerifyFrame, MOST)
    with other:
        yield stream, other
    stream.close()


async def read_all(stream: FrameSocket) -> list[int]:
    return [one.calls[0].call async for one in stream]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.data())
def test_frames_are_read_whole_wherever_their_bytes_are_cut(sizes, data):
    sent = b"".join(bytes_of(frame(number, size)) for number, size in enumerate(sizes, 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=12)))

    async def received() -> list[int]:
        with stream_of_bytes() as (stream, other):
            for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                other.send(sent[start:end])
                await asyncio.sleep(0)
            other.close()
            return await read_all(stream)

    assert asyncio.run(received()) == list(range(1, len(sizes) + 1))


@given(st.lists(st.sampled_from([0, 5000]), min_size=1, max_size=200), st.sets(st.integers(1, 200)))
def test_frames_are_handled_in_order_whether_they_are_taken_or_read(sizes, read):
    async def handled() -> list[int]:
        with stream_of_bytes() as (stream, other):
            numbers: list[int] = []

            def take(one) -> bool:
                if taken := one.calls[0].call not in read:
                    numbers.append(one.calls[0].call)
                return taken

            async def read_rest() -> None:
                async for one in stream:
                    numbers.append(one.calls[0].call)
                    await asyncio.sleep(0)

            stream.take_with(take)
            reading = asyncio.create_task(read_rest())
            await asyncio.sleep(0)
            for number, size in enumerate(sizes, 1):
                await asyncio.get_running_loop().sock_sendall(other, bytes_of(frame(number, size)))
            other.close()
            await reading
            return numbers

    assert asyncio.run(handled()) == list(range(1, len(sizes) + 1))


async def test_a_short_frame_is_taken_in_no_task():
    with stream_of_bytes() as (stream, other):
        tasks: list[asyncio.Task[None] | None] = []
        stream.take_with(lambda one: tasks.append(asyncio.current_task()) is None)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        other.send(bytes_of(frame(1)))
        await until(lambda: tasks)
        assert tasks == [None]
        stream.close()
        assert await reading is EOF


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop, as in Serve"])
def test_frames_go_both_ways_and_the_end_of_one_side_ends_the_other(run):
    async def there_and_back() -> None:
        async with joined() as (caller, replica):
            await caller.write(frame(1))
            assert (await replica.read()).calls[0].call == 1
            await replica.write(frame(2, 5000))
            assert (await caller.read()).calls[0].call == 2
            caller.close()
            assert await replica.read() is EOF
            with pytest.raises(PeerLost):
                await replica.write(frame(3))

    run(there_and_back())


async def test_frames_of_several_threads_arrive_whole():
    async with joined() as (caller, replica):

        def send(thread: int) -> None:
            for number in range(300):
                caller.send(frame(1 + 4 * number + thread, 3000))

        sending = asyncio.gather(*(asyncio.to_thread(send, thread) for thread in range(4)))
        numbers = [(await replica.read()).calls[0].call - 1 for _ in range(1200)]
        await sending
        for thread in range(4):
            assert [each // 4 for each in numbers if each % 4 == thread] == list(range(300))
        assert caller.flows


async def test_another_thread_sends_frames_while_the_event_loop_is_busy():
    with stream_of_bytes() as (stream, other):
        sending = threading.Thread(target=stream.send, args=(frame(1),))
        sending.start()
        sending.join()
        assert other.recv(100) == bytes_of(frame(1))


async def test_a_thread_cannot_send_on_an_ended_stream():
    with stream_of_bytes() as (stream, other):
        other.close()
        with pytest.raises(PeerLost):
            await asyncio.to_thread(stream.send, frame(1))
        stream.close()
        with pytest.raises(PeerLost):
            await asyncio.to_thread(stream.send, frame(1))


class FullSocket(socket.socket):
    """A socket for which the system has no buffer."""

    def send(self, *given: object) -> int:
        raise OSError(errno.ENOBUFS, "no buffer space available")


async def test_a_send_that_fails_ends_the_connection_for_both_ends():
    own, other = socket.socketpair()
    full = FullSocket(fileno=own.detach())
    full.setblocking(False)
    stream = FrameSocket(full, verifier_pb2.VerifyFrame, MOST)
    with other:
        with pytest.raises(PeerLost):
            await asyncio.to_thread(stream.send, frame(1))
        assert await asyncio.wait_for(stream.read(), 20) is EOF
        assert other.recv(1) == b""


async def test_what_cannot_be_handled_ends_the_connection():
    with stream_of_bytes() as (stream, other):
        taken = []

        def take(one) -> bool:
            taken.append(one.calls[0].call)
            raise RuntimeError("a planted fault")

        stream.take_with(take)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        other.send(bytes_of(frame(1)) + bytes_of(frame(2)))
        with pytest.raises(PeerLost, match="could not be handled"):
            await reading
        assert taken == [1] and other.recv(1) == b""


async def test_a_ticket_counts_once_and_others_are_refused():
    listener = LocalListener(verifier_pb2.VerifyFrame, MOST)
    with listener.expect() as (ticket, other):
        assert await join(listener.name, bytes(16), verifier_pb2.VerifyFrame, MOST) is None
        first = await join(listener.name, ticket, verifier_pb2.VerifyFrame, MOST)
        assert first is not None
        assert await join(listener.name, ticket, verifier_pb2.VerifyFrame, MOST) is None
        await first.write(frame(1))
        assert (await (await other).read()).calls[0].call == 1
    assert await first.read() is EOF, "the socket ends with its stream"
    with listener.expect() as (ticket, _):
        pass
    assert await join(listener.name, ticket, verifier_pb2.VerifyFrame, MOST) is None, "the stream has ended"
    listener.close()


@pytest.mark.parametrize("name", ["", "dendro-of-another-machine", "n" * 200])
async def test_a_socket_that_is_not_here_is_not_joined(name):
    assert await join(name, bytes(16), verifier_pb2.VerifyFrame, MOST) is None


async def test_another_user_cannot_join(monkeypatch):
    listener = LocalListener(verifier_pb2.VerifyFrame, MOST)
    with listener.expect() as (ticket, other), socket.socket(socket.AF_UNIX) as own:
        own.setblocking(False)
        own.connect("\0" + listener.name)
        monkeypatch.setattr(local_stream, "os", SimpleNamespace(getuid=lambda: os.getuid() + 1))
        with contextlib.suppress(ConnectionError):
            own.send(ticket)
            assert await asyncio.get_running_loop().sock_recv(own, 1) == b""
        assert not other.done()
    listener.close()


async def test_a_socket_of_another_user_is_sent_no_ticket(monkeypatch):
    monkeypatch.setattr(local_stream, "os", SimpleNamespace(getuid=lambda: os.getuid() + 1))
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind("\0dendro-theirs")
        theirs.listen()
        assert await join("dendro-theirs", bytes(16), verifier_pb2.VerifyFrame, MOST) is None
        caller, _ = theirs.accept()
        with caller:
            assert caller.recv(1) == b""


async def test_others_have_a_turn_while_many_frames_are_read():
    with stream_of_bytes() as (stream, other):
        other.send(b"".join(bytes_of(frame(number)) for number in range(1, 1001)))
        other.close()
        reading, most = asyncio.create_task(read_all(stream)), 0
        while not reading.done():
            before = len(stream._messages)
            await asyncio.sleep(0)
            most = max(most, before - len(stream._messages))
        assert len(reading.result()) == 1000 and most <= local_stream.MOST_FRAMES


async def test_a_caller_without_a_ticket_is_cut(monkeypatch):
    monkeypatch.setattr(local_stream, "JOIN_S", 0.05)
    listener = LocalListener(verifier_pb2.VerifyFrame, MOST)
    with socket.socket(socket.AF_UNIX) as own:
        own.setblocking(False)
        own.connect("\0" + listener.name)
        assert await asyncio.get_running_loop().sock_recv(own, 1) == b""
    listener.close()


async def test_callers_are_accepted_again_after_no_file_descriptor_was_free(monkeypatch):
    monkeypatch.setattr(local_stream, "ACCEPT_AGAIN_S", 0.01)
    loop = asyncio.get_running_loop()
    accept, failed = loop.sock_accept, []

    async def accept_or_fail(own):
        if not failed:
            failed.append(OSError(errno.EMFILE, "no file descriptor is free"))
            raise failed[0]
        return await accept(own)

    monkeypatch.setattr(loop, "sock_accept", accept_or_fail)
    async with joined() as (caller, replica):
        await caller.write(frame(1))
        assert failed and (await replica.read()).calls[0].call == 1


async def test_a_ticket_without_an_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(local_stream, "JOIN_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("\0dendro-silent")
        silent.listen()
        assert await join("dendro-silent", bytes(16), verifier_pb2.VerifyFrame, MOST) is None


async def test_a_frame_that_is_too_long_ends_the_stream():
    async with joined(most_bytes=100) as (caller, replica):
        await caller.write(frame(1))
        await caller.write(frame(2, 101))
        assert (await replica.read()).calls[0].call == 1
        with pytest.raises(PeerLost, match="a frame of 1"):
            await replica.read()
        assert await caller.read() is EOF


async def test_bytes_that_are_no_frame_end_the_stream():
    async with joined() as (caller, replica):
        await caller.write(SimpleNamespace(SerializeToString=lambda: b"\xff\xff\xff"))
        with pytest.raises(PeerLost, match="no frame"):
            await replica.read()
        assert await caller.read() is EOF


async def test_a_writer_waits_while_the_other_side_does_not_read():
    async with joined() as (caller, replica):
        sent = 0

        async def write() -> None:
            nonlocal sent
            for number in range(2000):
                await caller.write(frame(number + 1, 1000))
                sent += 1

        writing = asyncio.create_task(write())
        while True:
            before = sent
            await asyncio.sleep(0.05)
            if before == sent:
                break
        assert 0 < sent < 2000
        for number in range(2000):
            assert (await replica.read()).calls[0].call == number + 1
        await writing
