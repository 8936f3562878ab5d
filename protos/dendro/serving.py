"""A replica's side of the stream: leases, streams and health. Independent of models and of Ray.

When a frame arrives, its calls are started, CALLS_AT_ONCE in a turn of the event loop. The answers that are ready when
the writer is free are sent in one frame, or in as many as their bytes need. When a stream ends, every text opened on it
is closed; a lease ends with its last text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from dendro.calls import (
    PROTOCOL_VERSION,
    CloseCall,
    Closed,
    Deliver,
    DraftCall,
    Hello,
    OpenCall,
    Opened,
    Peer,
    PreparedTree,
    TextUpdate,
    VerifyCall,
)
from dendro.certificates import has_role
from dendro.errors import NO_FAULTS, BadRequest, DendroError, EngineFailed, NotFound, PeerLost
from dendro.failures import described, log_failure
from dendro.internal.v1 import calls_pb2
from dendro.local_stream import MOST_FRAMES, FrameSocket, LocalListener
from dendro.tasks import BackgroundTasks, end_task
from dendro.text import Verdict
from dendro.tree import DraftTree
from dendro.wire import batched, hello_message

log = logging.getLogger("dendro.serving")

MAX_MESSAGE_BYTES = 4 << 20
KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # the default holds the keepalive back for a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
"""A ping every 10 s: a peer that hangs, or whose machine is gone, is detected within 15 s. A server accepts one every 5
s, also on a stream without data."""
STREAM_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # peers are reached directly
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *KEEPALIVE_OPTIONS,
)
"""Options of both ends of a stream between peers."""
SERVER_OPTIONS = (*STREAM_OPTIONS, ("grpc.so_reuseport", 0))

ATTACH_S = 5.0
"""A lease ends if no opening is attached to it within this time: its router has died or changed its choice."""
CAP_S = 3600.0
"""The longest lifetime of a lease."""
FAULT_POLL_S = 1.0
"""Interval of the health checks of a replica's engine."""
CALLS_AT_ONCE = 256
"""Calls of one stream that are started before other streams have a turn."""
FEW_CALLS = CALLS_AT_ONCE // MOST_FRAMES
"""Most calls of a frame that are started as it arrives."""
MOST_UNREAD = 4096
"""Answers that a caller may leave unread while more of its calls are started."""
DRAIN_S = 2.0
"""Seconds that a stopping server waits for its streams to end before it cuts them."""


@dataclass
class Stats:
    """Statistics of a replica: counters, and two gauges at the end."""

    pid: int
    leases: int = 0  # leases taken, each by one Serve call of a router
    openings: int = 0
    streams: int = 0
    frames_in: int = 0
    frames_out: int = 0
    calls: int = 0
    refused: int = 0  # calls answered with an error
    open_leases: int = 0
    open_openings: int = 0


@dataclass(eq=False)
class Lease:
    """A replica held for one request, until the last opening attached to it is closed."""

    token: str
    attached: set[bytes] = field(default_factory=set)
    was_attached: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Leases:
    """The leases of one replica. A lease with openings ends when they are closed or at its cap, not when its taker
    leaves."""

    def __init__(self, attach_s: float = ATTACH_S, cap_s: float = CAP_S) -> None:
        self._attach_s = attach_s
        self._cap_s = cap_s
        self._leases: dict[str, Lease] = {}
        self.taken = 0
        self.on_cap: Callable[[Lease], Awaitable[None]] | None = None  # frees what is open under an expired lease

    def __len__(self) -> int:
        return len(self._leases)

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[Lease]:
        """Take a lease. Leaving the context, as a cancelled caller does, ends it unless an opening is attached."""
        lease = Lease(secrets.token_hex(16))
        self._leases[lease.token] = lease
        self.taken += 1
        try:
            yield lease
        finally:
            if not lease.attached:
                self._end(lease)

    async def wait(self, lease: Lease) -> None:
        """Wait until the lease ends: its openings are closed, their stream broke, none was attached in time, or its cap
        is reached."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._attach_s):
                await lease.ended.wait()
        if not lease.was_attached:
            self._end(lease)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._cap_s - self._attach_s):
                await lease.ended.wait()
        if not lease.ended.is_set():
            log.warning("lease %s ends at its cap with %d openings", lease.token[:8], len(lease.attached))
            if self.on_cap is not None:
                await self.on_cap(lease)
            self._end(lease)

    def attach(self, token: str, opening: bytes) -> Lease:
        """Attach an opening to a lease. Raises NotFound for a lease that has ended or never existed."""
        lease = self._leases.get(token)
        if lease is None:
            raise NotFound("lease: has ended, or is not of this replica")
        lease.attached.add(opening)
        lease.was_attached = True
        return lease

    def detach(self, lease: Lease, opening: bytes) -> None:
        """Detach a closed opening; the lease ends with the last one."""
        lease.attached.discard(opening)
        if not lease.attached:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        self._leases.pop(lease.token, None)
        lease.ended.set()


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """Differences between the streams of drafters and of verifiers: their messages, and the call of a round."""

    service: str  # the service's full name in the protos
    calls: type[Any]  # the message of a frame with calls
    answers: Callable[..., Any]  # makes a frame, from its `hello` and `answers`
    call_from: Callable[[Any], Any]  # the call in a message; raises BadRequest
    answer: Callable[[int, Any], Any]  # the answer message for a call's number and outcome
    begin: Callable[[Any, Any, Deliver], None]  # gives an engine the call of a round; its answer is delivered
    ordered: type[Any] | None = None  # the call that another stream than the opening's may make: a verifier's


class PeerSpan(Protocol):
    """The span of one text that is open at a replica."""

    def answered(self, outcome: object) -> None:
        """Add an answer: the opening's, a tree or a verdict."""
        ...

    def end(self) -> None: ...


BeginSpan = Callable[[str], PeerSpan | None]
"""Begins a span below that of a `traceparent`; None where it is not sampled."""


@dataclass(slots=True)
class _Opening:
    """A text that is open on a stream."""

    last: TextUpdate  # the text up to the last call; used to close it if the stream breaks
    lease: Lease | None
    opening: asyncio.Task[Any]
    span: PeerSpan | None = None


class StreamServer:
    """Answers the calls of many streams with one engine."""

    def __init__(
        self,
        engine: Peer,
        kind: ReplicaKind,
        hello: Hello,
        leases: Leases | None = None,
        authenticated: bool = False,
        begin_span: BeginSpan | None = None,
        local: LocalListener | None = None,
    ) -> None:
        """leases: None if openings need no lease; authenticated: whether callers need the certificate of a router, or
        of a verifier for calls that this kind of replica answers to one; begin_span: for openings whose answers are
        sampled; None: there are no traces; local: where callers of this machine join; None: nowhere"""
        self._local = local
        self._authenticated = authenticated
        self._begin_span = begin_span
        self._engine = engine
        self._kind = kind
        self._hello = hello_message(hello)
        self._stats = Stats(hello.pid)
        self.leases = leases
        self._open: dict[bytes, _Opening] = {}
        self._answering = BackgroundTasks()
        self._rounds: set[Deliver] = set()  # calls of rounds that the engine has not answered
        self._fault = ""  # why the engine cannot serve; empty while it can
        self._owed: list[TextUpdate] = []  # texts to close when the engine has recovered
        self._closing = BackgroundTasks()  # close texts, also those of broken streams
        if leases is not None:
            leases.on_cap = self._expire

    def stats(self) -> Stats:
        """The counters so far."""
        leases = self.leases
        return replace(
            self._stats,
            leases=leases.taken if leases is not None else 0,
            open_leases=len(leases) if leases is not None else 0,
            open_openings=len(self._open),
        )

    @property
    def fault(self) -> str:
        """Reason why no calls are served; empty while the engine can serve."""
        return self._fault

    def lose(self, fault: str) -> None:
        """Answer all calls that wait for a hanging engine with PeerLost, and end every lease, so that routers open
        their texts at other replicas."""
        self._fault = fault
        self._answering.cancel()
        for deliver in self._rounds.copy():
            deliver(PeerLost(f"replica: {fault}"))
        for opening, held in tuple(self._open.items()):
            held.opening.cancel()
            self._owed.append(held.last)
            self._forget(opening)

    def recover(self) -> None:
        """Serve calls again. Texts that were open when the engine hung are closed in the background, since it may hang
        again."""
        self._fault, owed, self._owed = "", self._owed, []
        for last in owed:
            self._closing.start(self._close(last))

    async def run(self, frames: AsyncIterator[Any], context: Any) -> None:
        """Serve one stream, from its greeting to its end."""
        if self._local is None:
            await self._greet(frames, context)
            await self._serve(frames, context, None)
            return
        with self._local.expect() as (ticket, joined):
            await self._greet(frames, context, calls_pb2.LocalStream(name=self._local.name, ticket=ticket))
            await self._serve(frames, context, joined)

    async def _serve(
        self, frames: AsyncIterator[Any], context: Any, joined: asyncio.Future[FrameSocket] | None
    ) -> None:
        """Serve one stream after its greeting. joined: its socket, once the caller has joined there"""
        self._stats.streams += 1
        # A verifier knows the names of openings from routers: 128 random bits. It opens and closes none itself.
        opens = not self._authenticated or has_role(context.auth_context(), "router")
        mine: set[bytes] = set()
        answers: list[Any] = []
        ready, written = asyncio.Event(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()
        way: Any = context  # Answers go where the last frame came from.
        loop = asyncio.get_running_loop()

        def answer(number: int, outcome: Any) -> None:
            """Leave an answer to the writer."""
            if isinstance(outcome, BaseException):
                self._stats.refused += 1
                if not isinstance(outcome, DendroError):  # service boundary: one call fails, the stream continues
                    log_failure(log, outcome, "a call failed")
                if not isinstance(outcome, Exception):
                    outcome = EngineFailed(f"a native library panicked: {described(outcome)}")
            answers.append(self._kind.answer(number, outcome))
            ready.set()

        def answer_round(number: int, span: PeerSpan | None, outcome: Any) -> None:
            if span is not None and not isinstance(outcome, BaseException):
                span.answered(outcome)
            answer(number, outcome)

        def deliver_later(number: int, span: PeerSpan | None, outcome: Any) -> None:
            """Leave a round's answer to the event loop, from any thread."""
            with contextlib.suppress(RuntimeError):  # the loop is closed: the replica ends
                loop.call_soon_threadsafe(answer_round, number, span, outcome)

        def deliver(number: int, span: PeerSpan | None, outcome: Any) -> None:
            """Send a round's answer, from any thread: at once if it is the only one of its step, else with others."""
            direct = way
            alone = span is None and not answers and _is_alone(outcome)
            if not (alone and isinstance(direct, FrameSocket) and direct.flows):
                deliver_later(number, span, outcome)
                return
            try:
                direct.send(self._kind.answers(answers=[self._kind.answer(number, outcome)]))
                self._stats.frames_out += 1
            except PeerLost:  # the caller has gone, and its stream ends
                return
            except Exception as error:  # fails one call; the stream continues
                deliver_later(number, None, error)

        async def answer_later(number: int, work: Awaitable[Any]) -> None:
            try:
                outcome: Any = await work
            except asyncio.CancelledError:
                if not self._fault:
                    raise
                outcome = PeerLost(f"replica: {self._fault}")
            except Exception as error:
                outcome = error
            except BaseException as error:
                if isinstance(error, NO_FAULTS):
                    raise
                outcome = error
            answer(number, outcome)

        def begin(message: Any) -> None:
            """Begin a call. One of a round is with the engine when this returns, and needs no task."""
            self._stats.calls += 1
            number = message.call
            try:
                call, held = self._call_of(message, mine, opens)
                if held is not None and not isinstance(call, CloseCall):
                    if isinstance(call, DraftCall) and call.prepared_from:
                        call = replace(call, take_prepared=partial(deliver, 0, None))
                    goes_on = isinstance(call, VerifyCall) and call.ahead  # the engine begins the next round at once
                    self._begin_round(call, partial(deliver_later if goes_on else deliver, number, held.span))
                    return
                work = self._begin_open(call, mine) if held is None else self._begin_close(call, held, mine)
            except BaseException as error:
                if isinstance(error, NO_FAULTS):
                    raise
                answer(number, error)
                return
            task = self._answering.start(answer_later(number, work))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def write() -> None:
            while True:
                await ready.wait()
                ready.clear()
                taken, answers[:] = answers[:], []
                for batch in batched(taken, MAX_MESSAGE_BYTES // 2):
                    self._stats.frames_out += 1
                    await way.write(self._kind.answers(answers=batch))
                written.set()

        async def pause() -> None:
            await asyncio.sleep(0)
            while len(answers) > MOST_UNREAD:
                written.clear()
                await written.wait()

        async def take(frames: AsyncIterator[Any], back: Any) -> None:
            nonlocal way
            numbers = itertools.count(1)
            async for frame in frames:
                way = back
                self._stats.frames_in += 1
                for message, number in zip(frame.calls, numbers, strict=False):
                    if number % CALLS_AT_ONCE == 0 or len(answers) > MOST_UNREAD:
                        await pause()
                    begin(message)

        def take_few(back: FrameSocket, frame: Any) -> bool:
            """Begin the calls of a frame as it arrives. False if they are many, which `take` begins in several turns of
            the event loop."""
            nonlocal way
            if len(frame.calls) > FEW_CALLS or len(answers) > MOST_UNREAD:
                return False
            way = back
            self._stats.frames_in += 1
            for message in frame.calls:
                begin(message)
            return True

        async def take_local(joined: asyncio.Future[FrameSocket]) -> None:
            local = await joined
            local.take_with(partial(take_few, local))
            with contextlib.suppress(PeerLost):  # the caller loses the socket, too, and ends the stream
                await take(local, local)

        writer = asyncio.create_task(write())
        local = None if joined is None else asyncio.create_task(take_local(joined))
        try:
            await take(frames, context)
        finally:
            writer.cancel()
            if local is not None:
                local.cancel()
            for task in tasks:
                task.cancel()
            # Shielded: gRPC cancels the handler of a broken stream, but its openings must still be closed.
            await asyncio.shield(asyncio.gather(*(self._free(opening) for opening in mine)))

    async def _greet(
        self, frames: AsyncIterator[Any], context: Any, local: calls_pb2.LocalStream | None = None
    ) -> None:
        roles = ("router", "verifier") if self._kind.ordered is not None else ("router",)
        if self._authenticated and not any(has_role(context.auth_context(), role) for role in roles):
            needed = " or a ".join(roles)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"peer: needs the certificate of a {needed}")
        first: Any = await anext(aiter(frames), None)
        protocol = first.greeting.protocol if first is not None and first.HasField("greeting") else 0
        if protocol != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"greeting.protocol: is {protocol}; this is {PROTOCOL_VERSION}"
            )
        answer = self._kind.answers(hello=self._hello)
        if local is not None:
            answer.hello.local.CopyFrom(local)
        await context.write(answer)

    def _call_of(self, message: Any, mine: set[bytes], opens: bool) -> tuple[Any, _Opening | None]:
        """The call of a message, and the opening that it names; None for a call that opens a text. Raises DendroError
        for a call that is refused."""
        if self._fault:
            raise PeerLost(f"replica: {self._fault}")
        call: Any = self._kind.call_from(message)
        ordered = self._kind.ordered is not None and isinstance(call, self._kind.ordered)
        if not opens and not ordered:
            raise BadRequest("call", "is of a router alone")
        if isinstance(call, OpenCall):
            return call, None
        opening = call.update.opening
        held = self._open.get(opening) if ordered or opening in mine else None
        if held is None:
            raise NotFound("opening: there is none of this name on this stream")
        held.last = replace(call.update, start=call.update.base, tokens=())
        return call, held

    def _begin_round(self, call: Any, deliver: Deliver) -> None:
        """Give the call of a round to the engine. `deliver` is called once, from any thread: with the engine's answer,
        or with PeerLost if the engine hangs before it."""

        def once(outcome: object) -> None:
            try:
                self._rounds.remove(once)
            except KeyError:
                return
            deliver(outcome)

        self._rounds.add(once)
        try:
            self._kind.begin(self._engine, call, once)
        except BaseException as error:
            if isinstance(error, NO_FAULTS):
                raise
            once(error)

    def _begin_close(self, call: CloseCall, held: _Opening, mine: set[bytes]) -> Awaitable[Closed]:
        mine.discard(call.update.opening)
        # Shielded: the state of the text is saved also if the stream breaks meanwhile.
        return asyncio.shield(self._closing.start(self._answer_close(held, call)))

    async def _answer_close(self, held: _Opening, call: CloseCall) -> Closed:
        try:
            await end_task(held.opening)
            return await self._engine.close(call)
        finally:
            self._forget(call.update.opening)

    def _begin_open(self, call: OpenCall, mine: set[bytes]) -> Awaitable[Opened]:
        opening = call.update.opening
        if opening in self._open:
            raise BadRequest("update.opening", "is open already")
        lease = self.leases.attach(call.lease, opening) if self.leases is not None else None
        task = asyncio.ensure_future(self._engine.open(call))
        last = replace(call.update, start=call.update.base, tokens=())
        begin = self._begin_span if call.traceparent else None
        held = _Opening(last, lease, task, begin(call.traceparent) if begin is not None else None)
        self._open[opening] = held
        mine.add(opening)
        self._stats.openings += 1
        return self._answer_open(opening, held, mine)

    async def _answer_open(self, opening: bytes, held: _Opening, mine: set[bytes]) -> Opened:
        try:
            opened: Opened = await held.opening
            if held.span is not None:
                held.span.answered(opened)
            return opened
        except asyncio.CancelledError:
            if self._fault:
                raise
            raise NotFound("opening: was closed before it was ready") from None
        except BaseException:
            self._forget(opening, mine)
            raise

    def _forget(self, opening: bytes, mine: set[bytes] | None = None) -> None:
        held = self._open.pop(opening, None)
        if mine is not None:
            mine.discard(opening)
        if held is not None and held.span is not None:
            held.span.end()
        if held is not None and held.lease is not None and self.leases is not None:
            self.leases.detach(held.lease, opening)

    async def _free(self, opening: bytes) -> None:
        """Close a text whose router is gone, at its last known length."""
        held = self._open.get(opening)
        if held is None:
            return
        await end_task(held.opening)
        try:
            await self._close(held.last)
        finally:
            self._forget(opening)

    async def _close(self, last: TextUpdate) -> None:
        """Close a text whose router does not wait for it. Logs errors, so that other texts are closed too."""
        try:
            await self._engine.close(CloseCall(last))
        except DendroError as error:
            log.info("an abandoned opening was gone: %s", described(error))
        except Exception as error:
            log_failure(log, error, "an abandoned opening could not be closed")

    async def _expire(self, lease: Lease) -> None:
        await asyncio.gather(*(self._free(opening) for opening in tuple(lease.attached)))


def _is_alone(outcome: object) -> bool:
    """True for the tree or verdict of a step that had no other text. Those of several texts are sent together, and made
    into messages while the engine goes on."""
    match outcome:
        case DraftTree(texts=1) | Verdict(texts=1) | PreparedTree():
            return True
    return False


class Replica:
    """One engine served at its own address; Serve deployments wrap it."""

    def __init__(
        self,
        streams: StreamServer,
        server: grpc.aio.Server,
        status: Any,  # health.aio.HealthServicer, which the stubs lack
        address: str,
        local: LocalListener | None = None,
    ) -> None:
        self._streams = streams
        self._local = local
        self._server = server
        self._health = status
        self.address = address
        self._watching: asyncio.Task[None] | None = None

    def watch(self, fault: Callable[[], str]) -> None:
        """Check every FAULT_POLL_S whether the engine can serve, and refuse calls while it cannot."""
        self._watching = asyncio.create_task(self._watch(fault))

    async def _watch(self, fault: Callable[[], str]) -> None:
        while True:
            await asyncio.sleep(FAULT_POLL_S)
            found = fault()
            if found and not self._streams.fault:
                log.error("this replica does not serve now: %s", found)
                self._streams.lose(found)
                await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            elif self._streams.fault and not found:
                log.warning("this replica serves again")
                self._streams.recover()
                await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def lease(self) -> AsyncGenerator[dict[str, str], None]:
        """Take a lease. Yields the replica's address and the lease's token once, and returns when the lease ends."""
        leases = self._streams.leases
        if leases is None:
            raise EngineFailed("lease: this replica has no leases")
        if self._streams.fault:
            raise PeerLost(f"lease: {self._streams.fault}")
        async with leases.take() as lease:
            yield {"address": self.address, "lease": lease.token}
            await leases.wait(lease)

    def stats(self) -> dict[str, int]:
        """Counters and gauges by name."""
        return asdict(self._streams.stats())

    async def drain(self) -> None:
        """Set the health to NOT_SERVING; running work continues."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """End all streams; cut those that do not end within DRAIN_S."""
        if self._watching is not None:
            self._watching.cancel()
        await self.drain()
        if self._local is not None:
            self._local.close()
        await self._server.stop(DRAIN_S)
