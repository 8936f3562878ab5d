"""The streams to peers: one per replica, shared by all requests of this process. gRPC carries their frames, or a Unix
socket where the replica is on the same machine (`dendro.local_stream`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import grpc.aio
from dendro import wire
from dendro.calls import (
    MOST_PREPARED,
    PROTOCOL_VERSION,
    CloseCall,
    Closed,
    Deliver,
    DraftCall,
    Hello,
    OpenCall,
    Opened,
    PreparedTree,
    VerifyCall,
)
from dendro.certificates import CertificateFiles, role_options
from dendro.clock import Clock
from dendro.errors import BadAnswer, BadRequest, DendroError, PeerLost, error_for, one_line
from dendro.internal.v1 import calls_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from dendro.local_stream import EOF, FrameSocket, join
from dendro.measured import microseconds
from dendro.serving import MAX_MESSAGE_BYTES, STREAM_OPTIONS
from dendro.tasks import off_loop
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.peers.opening import log

CONNECT_S = 5.0
"""Seconds that a replica may take to answer the greeting."""
WRITE_S = 30.0
"""Seconds that a replica may take to read a frame before it counts as lost. gRPC answers pings also for a process that
hangs, and what that process does not read is kept here."""
WRITTEN_S = 1.0
"""Seconds beyond WRITE_S after which a stream counts as lost if its frame is still not written."""
MOST_ON_WAY = 1024
"""Most prepared trees on a stream that this end has not read yet. What a drafter sends beyond is dropped; a frame with
so many answers beyond one for each open call ends its stream, as reading them would hold up other requests."""
FEW_ANSWERS = 4
"""Most answers of a frame that are taken as it arrives."""
UNANSWERED_S = 600.0
"""Seconds after which a round's call without an answer fails. By default no caller waits so long; of a verifier, the
calls for ordered trees that were late go on. Callers that open or close a text set limits of their own."""
FEWEST_SWEPT = 64
"""Calls without an answer among which none is looked for that nobody waits for."""

Answer = TypeVar("Answer")


class _SentCall(NamedTuple):
    """A call whose answer has not come."""

    settle: Deliver  # takes the result, or an exception; called in the event loop
    left: Callable[[], bool]  # True once nobody waits for the answer
    result: Callable[[Any], Any]
    made_s: float  # time at which it was made, by the loop's clock; infinite if its caller limits its time


def _unchanged(answer: Answer) -> Answer:
    return answer


def _never() -> bool:
    return False


def _settle(future: asyncio.Future[Any], value: object) -> None:
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


@dataclass(frozen=True, slots=True)
class PeerKind:
    """Differences between the streams of drafters and of verifiers."""

    role: str
    rounds: Callable[[grpc.aio.Channel], Any]  # begins a stream
    frame: Callable[[calls_pb2.Greeting | None, list[Any]], Any]
    answers: type[Any]  # the message of a frame with answers
    call_message: Callable[[int, Any], Any]


DRAFTER = PeerKind(
    role="drafter",
    rounds=lambda channel: cast(Any, drafter_pb2_grpc.DrafterServiceStub(channel)).Rounds(),
    frame=lambda greeting, calls: drafter_pb2.DraftFrame(greeting=greeting, calls=calls),
    answers=drafter_pb2.TreeFrame,
    call_message=wire.drafter_call_message,
)
VERIFIER = PeerKind(
    role="verifier",
    rounds=lambda channel: cast(Any, verifier_pb2_grpc.VerifierServiceStub(channel)).Rounds(),
    frame=lambda greeting, calls: verifier_pb2.VerifyFrame(greeting=greeting, calls=calls),
    answers=verifier_pb2.VerdictFrame,
    call_message=wire.verifier_call_message,
)


class PeerStream:
    """One stream to one replica. Calls of all requests share its frames; an answer carries its call's number."""

    def __init__(self, address: str, kind: PeerKind, certificates: CertificateFiles | None = None) -> None:
        self.address = address
        self._kind = kind
        if certificates is None:
            self._channel = grpc.aio.insecure_channel(address, options=STREAM_OPTIONS)
        else:
            options = (*STREAM_OPTIONS, *role_options(kind.role))
            self._channel = grpc.aio.secure_channel(address, certificates.channel_credentials(), options=options)
        self._loop = asyncio.get_running_loop()
        self._posting = threading.Lock()  # held while calls are added to `_waiting`, or all are removed
        self._waiting: dict[int, _SentCall] = {}  # key: number of the call; the oldest first
        self._sweep_at = FEWEST_SWEPT  # calls in `_waiting` at which those are dropped that nobody waits for
        self._take_prepared: Deliver | None = None
        self._room = 0  # prepared trees that the replica may send still
        self._outbox: list[Any] = []
        self._writing_s = math.inf  # time since which a frame is written; infinite while none is
        self._filled = asyncio.Event()
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._lost = ""  # why; empty while the stream works
        self._ending: asyncio.Task[None] | None = None
        self._hello: Hello | None = None
        self._local: FrameSocket | None = None  # carries the frames if the replica is on this machine
        self.frames = 0  # written
        self.calls = 0
        self._answered = 0  # answers read

    @classmethod
    async def connect(cls, address: str, kind: PeerKind, certificates: CertificateFiles | None = None) -> PeerStream:
        """Greet a replica. Raises PeerLost where it does not answer, has another protocol version, or, where there are
        `certificates`, has none of its role."""
        stream = cls(address, kind, certificates)
        try:
            async with asyncio.timeout(CONNECT_S):
                await stream._greet()
        except TimeoutError:
            await stream.close()
            raise PeerLost(f"{address}: does not answer") from None
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            await stream.close()
            raise PeerLost(f"{address}: {status_text(error)}") from None
        except BaseException:
            await stream.close()
            raise
        return stream

    async def _greet(self) -> None:
        call = self._kind.rounds(self._channel)
        await call.write(self._kind.frame(calls_pb2.Greeting(protocol=PROTOCOL_VERSION), []))
        first = await call.read()
        if first is EOF or first is None or not first.HasField("hello"):
            raise PeerLost(f"{self.address}: sends no hello")
        try:
            self._hello = wire.hello_from(first.hello)
        except BadRequest as error:
            raise PeerLost(f"{self.address}: its hello is malformed: {error}") from None
        if self._hello.protocol != PROTOCOL_VERSION:
            raise PeerLost(f"{self.address}: has protocol version {self._hello.protocol}, not {PROTOCOL_VERSION}")
        local = first.hello.local
        self._local = await join(local.name, local.ticket, self._kind.answers, MAX_MESSAGE_BYTES)
        way = call if self._local is None else self._local
        self._tasks = [asyncio.create_task(self._read(way)), asyncio.create_task(self._write(way))]
        if self._local is not None:
            self._local.take_with(self._take_few)
            self._tasks.append(asyncio.create_task(self._read(call)))

    @property
    def hello(self) -> Hello:
        """The replica's answer to the greeting."""
        assert self._hello is not None, "connect() has read it"
        return self._hello

    @property
    def lost(self) -> bool:
        return bool(self._lost)

    @property
    def local(self) -> bool:
        """True if the replica is on this machine, and a Unix socket carries the frames."""
        return self._local is not None

    async def call(self, ask: Any) -> Any:
        """Make a call of any length and return its answer. Raises what the peer raised, and PeerLost when the stream
        breaks."""
        number = next(self._numbers)
        # Calls of an opening keep their order: only its first is long, and the next is made after that one's answer.
        message = await off_loop(len(ask.update.tokens), lambda: self._kind.call_message(number, ask))
        if message.ByteSize() > MAX_MESSAGE_BYTES // 2:
            raise BadRequest("prompt", f"makes a call of {message.ByteSize()} bytes")
        return await self._post(number, message, _unchanged, math.inf)

    def ask_at_once(
        self, ask: Any, result: Callable[[Any], Any], deliver: Deliver, take_prepared: Deliver | None = None
    ) -> bool:
        """Make a call of a round as `ask`, from any thread, and send it before this returns. False, without a call, if
        that is not possible: the replica is not on this machine, or other calls wait to be sent. deliver: called once,
        in the event loop, with the result or an exception"""
        local = self._local
        if local is None or not local.flows or self._outbox or len(self._waiting) >= self._sweep_at:
            return False
        number = next(self._numbers)
        frame = self._kind.frame(None, [self._kind.call_message(number, ask)])
        with self._posting:
            if self._lost:
                return False
            if take_prepared is not None:
                self._allow_prepared(take_prepared)
            self._waiting[number] = _SentCall(deliver, _never, result, self._loop.time())
            self.calls += 1
            self.frames += 1
        with contextlib.suppress(PeerLost):  # the stream is lost as soon as the event loop reads the socket's end
            local.send(frame)
        return True

    def ask(
        self,
        ask: Any,
        result: Callable[[Any], Answer],
        take_prepared: Deliver | None = None,
    ) -> asyncio.Future[Answer]:
        """Make a call of a round, which is short, at once: it needs no task to be sent. The future has the `result` of
        its answer; it raises as `call`, and what `result` raises. take_prepared: takes prepared trees of this and all
        earlier calls"""
        if take_prepared is not None:
            with self._posting:
                self._allow_prepared(take_prepared)
        number = next(self._numbers)
        message = self._kind.call_message(number, ask)
        return self._post(number, message, result, self._loop.time())

    def _allow_prepared(self, take_prepared: Deliver) -> None:
        """Let the replica send prepared trees after a call. Called with `_posting` held."""
        self._take_prepared = take_prepared
        self._room = min(self._room + MOST_PREPARED, MOST_ON_WAY)

    def _post(
        self, number: int, message: Any, result: Callable[[Any], Answer], made_s: float
    ) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = self._loop.create_future()
        now_s = self._loop.time()
        # This process may have stood still: check after WRITTEN_S whether the frame is written.
        if now_s - self._writing_s > WRITE_S:
            self._loop.call_later(WRITTEN_S, self._lose_unread, self._writing_s)
        if self._lost:
            future.set_exception(PeerLost(self._lost))
            return future
        with self._posting:
            if len(self._waiting) >= self._sweep_at:
                self._sweep(now_s)
            self._waiting[number] = _SentCall(partial(_settle, future), future.done, result, made_s)
            self.calls += 1
        self._outbox.append(message)
        self._filled.set()
        return future

    def _lose_unread(self, writing_s: float) -> None:
        """Lose the stream if the frame whose writing began at this time is not written yet."""
        if self._writing_s == writing_s:
            self._lose(f"{self.address}: reads no calls")

    def _sweep(self, now_s: float) -> None:
        """Forget calls whose callers have left, and fail old ones: a replica may never answer them."""
        for number, sent in tuple(self._waiting.items()):
            old = sent.made_s <= now_s - UNANSWERED_S
            if old:
                sent.settle(PeerLost(f"{self.address}: does not answer a call"))
            if old or sent.left():
                del self._waiting[number]
        self._sweep_at = max(2 * len(self._waiting), FEWEST_SWEPT)

    async def _write(self, call: Any) -> None:
        loop = asyncio.get_running_loop()
        with self._losing():
            while True:
                await self._filled.wait()
                self._filled.clear()
                messages = self._outbox.copy()  # it is empty once all are sent: no call may overtake an earlier one
                for batch in wire.batched(messages, MAX_MESSAGE_BYTES // 2):
                    self.frames += 1
                    self._writing_s = loop.time()
                    await call.write(self._kind.frame(None, batch))
                    self._writing_s = math.inf
                del self._outbox[: len(messages)]

    async def _read(self, call: Any) -> None:
        with self._losing():
            while (frame := await call.read()) is not EOF:
                if frame is None:  # gRPC's result for bytes that are not a message
                    raise PeerLost(f"{self.address}: sends bytes that are no frame")
                self._take(frame)
            raise PeerLost(f"{self.address}: the stream has ended")

    def _take_few(self, frame: Any) -> bool:
        """Take a frame of few answers as it arrives. False if they are many."""
        if len(frame.answers) > FEW_ANSWERS:
            return False
        with self._losing():
            self._take(frame)
        return True

    def _take(self, frame: Any) -> None:
        """Settle the calls that a frame answers. Raises PeerLost for too many answers."""
        # Open calls, also those whose callers have left.
        if len(frame.answers) > (owed := self.calls - self._answered) + MOST_ON_WAY:
            raise PeerLost(f"{self.address}: sends {len(frame.answers)} answers to {owed} calls")
        for answer in frame.answers:
            if not answer.call:
                self._prepared(answer)
                continue
            self._answered += 1
            sent = self._waiting.pop(answer.call, None)
            if sent is not None and not sent.left():
                try:
                    outcome: Any = sent.result(wire.answer_from(answer))
                except Exception as error:  # fails one call; the stream continues
                    outcome = error
                sent.settle(outcome)

    def _prepared(self, answer: Any) -> None:
        """Pass a prepared tree on. More than were allowed, and malformed ones, are dropped."""
        with self._posting:
            if not self._room or self._take_prepared is None:
                return
            self._room -= 1
        with contextlib.suppress(DendroError):
            tree = wire.answer_from(answer)
            if isinstance(tree, PreparedTree):
                self._take_prepared(tree)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """An error of the stream fails all calls that wait on it."""
        try:
            yield
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, PeerLost) as error:
            self._lose(f"{self.address}: {status_text(error)}")

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        with self._posting:
            self._lost = reason
            waiting, self._waiting = self._waiting, {}
        log.info("stream lost: %s", reason)
        for sent in waiting.values():
            sent.settle(PeerLost(reason))
        self._outbox.clear()
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._local is not None:
            self._local.close()
        await self._channel.close(None)

    async def close(self) -> None:
        """End the stream; waiting calls fail with PeerLost."""
        self._lose(f"{self.address}: the stream was closed")
        if self._ending is not None:
            await self._ending


def status_text(error: Exception) -> str:
    """An error's text; a gRPC status is first mapped to our own error."""
    if isinstance(error, grpc.aio.AioRpcError):
        return str(error_for(error.code(), one_line(error.details() or error.code().name)))
    return str(error) or type(error).__name__


class _RemotePeer:
    """Base of remote drafters and verifiers."""

    def __init__(self, stream: PeerStream, clock: Clock = time.monotonic) -> None:
        self.stream = stream
        self._clock = clock

    async def hello(self) -> Hello:
        return self.stream.hello

    async def open(self, call: OpenCall) -> Opened:
        return _expect(Opened, await self.stream.call(call))

    async def close(self, call: CloseCall) -> Closed:
        return _expect(Closed, await self.stream.call(call))

    def _us_since(self, began_s: float) -> int:
        return microseconds(self._clock() - began_s)


class RemoteDrafter(_RemotePeer):
    """A drafter in another process."""

    def draft(self, call: DraftCall) -> asyncio.Future[DraftTree]:
        """The tree. Its `draft_us` is capped at the duration of the call."""
        return self.stream.ask(call, partial(self._capped, self._clock()), call.take_prepared)

    def draft_at_once(self, call: DraftCall, deliver: Deliver) -> bool:
        """Make the call from any thread, and send it before this returns; see `PeerStream.ask_at_once`."""
        return self.stream.ask_at_once(call, partial(self._capped, self._clock()), deliver, call.take_prepared)

    def _capped(self, began_s: float, answer: object) -> DraftTree:
        tree = _expect(DraftTree, answer)
        took_us = self._us_since(began_s)
        return replace(tree, draft_us=took_us) if tree.draft_us > took_us else tree


class RemoteVerifier(_RemotePeer):
    """A verifier in another process."""

    def verify(self, call: VerifyCall) -> asyncio.Future[Verdict]:
        """The verdict. Its `verify_us` and `queue_us` together are capped at the duration of the call."""
        began_s = self._clock()

        def capped(answer: object) -> Verdict:
            verdict = _expect(Verdict, answer)
            took_us = self._us_since(began_s)
            if verdict.verify_us + verdict.queue_us <= took_us:
                return verdict
            verify_us = min(verdict.verify_us, took_us)
            return replace(verdict, verify_us=verify_us, queue_us=min(verdict.queue_us, took_us - verify_us))

        return self.stream.ask(call, capped)


def _expect(kind: type[Answer], answer: object) -> Answer:
    if not isinstance(answer, kind):
        raise BadAnswer(f"peer: answers with a {type(answer).__name__} instead of a {kind.__name__}")
    return answer


class Streams:
    """The streams of this process, one per replica, shared by all requests."""

    def __init__(self, kind: PeerKind, certificates: CertificateFiles | None = None) -> None:
        """certificates: of this router; without them, no TLS"""
        self._kind = kind
        self._certificates = certificates
        self._streams: dict[str, asyncio.Task[PeerStream]] = {}

    def alive(self, address: str) -> bool:
        """True if a stream to a replica is connected."""
        return self.connected(address) is not None

    def connected(self, address: str) -> PeerStream | None:
        """The stream to a replica; None if none is connected."""
        known = self._streams.get(address)
        if known is None or not known.done() or known.cancelled() or known.exception() is not None:
            return None
        stream = known.result()
        return None if stream.lost else stream

    async def to(self, address: str) -> PeerStream:
        """The stream to a replica, connected where there is none or it was lost. Raises as `PeerStream.connect`."""
        for other in [other for other, task in self._streams.items() if task.done() and not self.alive(other)]:
            del self._streams[other]  # a lost stream is not used again, and replicas that follow have other addresses
        if address not in self._streams:
            self._streams[address] = asyncio.create_task(PeerStream.connect(address, self._kind, self._certificates))
        connecting = self._streams[address]
        try:
            return await asyncio.shield(connecting)
        except DendroError:
            if self._streams.get(address) is connecting:
                del self._streams[address]
            raise

    async def close(self) -> None:
        """Close all streams, also those that are asked for meanwhile."""
        while self._streams:
            _, task = self._streams.popitem()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, DendroError):
                await (await task).close()
