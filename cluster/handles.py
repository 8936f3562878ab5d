"""A request's hold on a drafter and a verifier: what they lack of the text is sent, what goes wrong is mended.

The only file that calls peers. A handle takes its lease and opens its text in the background: a verifier's as soon as
it is made, a drafter's when a tree is wanted for the first time, as what it costs is taken from all texts' rounds:

  lease -> open (the whole text) -> draft or verify (what the peer lacks), round after round -> close

- A peer that lost the text (NotFound) is opened again where it is.
- A drafter that is late, wrong or gone costs the round its speculation and nothing else; a later lease brings it back.
- A verifier that is gone is replaced, and the text opened at the next one: the tokens are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
import grpc.aio
from dendro import wire
from dendro.calls import (
    PROTOCOL_VERSION,
    TARGET_FACTS,
    CloseCall,
    Closed,
    DraftCall,
    DrafterPeer,
    Hello,
    OpenCall,
    Opened,
    Terms,
    TextUpdate,
    VerifierPeer,
    VerifyCall,
    new_opening,
)
from dendro.errors import BadRequest, DendroError, EngineFailed, NotFound, Overloaded, PeerLost, error_for, one_line
from dendro.internal.v1 import calls_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from dendro.serving import MAX_MESSAGE_BYTES, STREAM_OPTIONS
from dendro.shapes import TreeShape
from dendro.text import Finish, Text, Verdict
from dendro.tree import DraftTree
from tree_layers.checkpoint import Facts

log = logging.getLogger("dendro.handles")
EOF = cast(Any, grpc.aio).EOF  # its stubs do not know it

CONNECT_S = 5.0
"""How long a replica may take to answer a greeting."""
OPEN_S = 120.0
"""How long a peer may take to consume a text."""
STEP_S = 30.0
"""How long a verifier may take with a round, its queue included, before it counts as frozen."""
PATIENCE_S = 60.0
"""How long a request looks for a verifier that can go on with it."""
SLOW_OPENING = 1 / 3
"""The share of the patience after which a text whose opening is not answered is opened at another replica besides."""
CLOSE_S = 5.0
"""How long a peer may take to save a state and let go."""
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 3.0
FROZEN_S = 5.0
"""How long a late draft may stay out before its drafter counts as frozen and another is leased."""
IDLE_ROUNDS = 32
"""Rounds of `off` after which a drafter's lease is given back."""
STRIKES = 3
"""Malformed trees after which a request asks for no more of them."""

# The draft's deadline: min(max(3 * usual draft, 20 ms), max(2 * usual round at the verifier, 60 ms)). The first term
# is generous to a drafter that merely had a slow moment, the second says what a late one may cost: a round's own price
# or two. The floors keep a scheduler's hiccup from counting as lateness.
DRAFT_FACTOR, DRAFT_FLOOR_S = 3.0, 0.020
VERIFY_FACTOR, VERIFY_FLOOR_S = 2.0, 0.060
SMOOTHING = 0.2
"""Weight of the newest measurement in the usual times."""


# ---- The wire: one stream per replica, shared by all requests ----


@dataclass(frozen=True, slots=True)
class Kind:
    """What differs between the streams of drafters and of verifiers."""

    rounds: Callable[[grpc.aio.Channel], Any]  # begins a stream
    frame: Callable[[calls_pb2.Greeting | None, list[Any]], Any]
    call_message: Callable[[int, Any], Any]
    answer_from: Callable[[Any], Any]


DRAFTER = Kind(
    rounds=lambda channel: cast(Any, drafter_pb2_grpc.DrafterServiceStub(channel)).Rounds(),
    frame=lambda greeting, calls: drafter_pb2.DraftFrame(greeting=greeting, calls=calls),
    call_message=wire.drafter_call_message,
    answer_from=wire.drafter_answer_from,
)
VERIFIER = Kind(
    rounds=lambda channel: cast(Any, verifier_pb2_grpc.VerifierServiceStub(channel)).Rounds(),
    frame=lambda greeting, calls: verifier_pb2.VerifyFrame(greeting=greeting, calls=calls),
    call_message=wire.verifier_call_message,
    answer_from=wire.verifier_answer_from,
)


class PeerStream:
    """One stream to one replica. Calls of all requests go into its frames; answers find their call by its number."""

    def __init__(self, address: str, kind: Kind) -> None:
        self.address = address
        self._kind = kind
        self._channel = grpc.aio.insecure_channel(address, options=STREAM_OPTIONS)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: list[Any] = []
        self._filled = asyncio.Event()
        self._next = 1
        self._tasks: list[asyncio.Task[None]] = []
        self._lost = ""  # why; empty: it lives
        self._ending: asyncio.Task[None] | None = None
        self._hello: Hello | None = None
        self.frames = 0  # written
        self.calls = 0

    @classmethod
    async def connect(cls, address: str, kind: Kind) -> PeerStream:
        """Greet a replica; raises PeerLost where none answers, or one that speaks another protocol."""
        stream = cls(address, kind)
        try:
            async with asyncio.timeout(CONNECT_S):
                await stream._greet()
        except TimeoutError:
            await stream.close()
            raise PeerLost(f"{address}: does not answer") from None
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            await stream.close()
            raise PeerLost(f"{address}: {_told(error)}") from None
        except BaseException:
            await stream.close()
            raise
        return stream

    async def _greet(self) -> None:
        call = self._kind.rounds(self._channel)
        await call.write(self._kind.frame(calls_pb2.Greeting(protocol=PROTOCOL_VERSION), []))
        first = await call.read()
        if first is EOF or first is None or not first.HasField("hello"):
            raise PeerLost(f"{self.address}: says no hello")
        try:
            self._hello = wire.hello_from(first.hello)
        except BadRequest as error:
            raise PeerLost(f"{self.address}: its hello is malformed: {error}") from None
        if self._hello.protocol != PROTOCOL_VERSION:
            raise PeerLost(f"{self.address}: speaks protocol {self._hello.protocol}; this is {PROTOCOL_VERSION}")
        self._tasks = [asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))]

    @property
    def said(self) -> Hello:
        """What the replica said of itself."""
        assert self._hello is not None, "connect() has read it"
        return self._hello

    @property
    def lost(self) -> bool:
        return bool(self._lost)

    async def call(self, ask: Any) -> Any:
        """One call and its answer. Raises what the peer raised, PeerLost when the stream breaks under it."""
        if self._lost:
            raise PeerLost(self._lost)
        number, self._next = self._next, self._next + 1
        message = self._kind.call_message(number, ask)
        if message.ByteSize() > MAX_MESSAGE_BYTES // 2:
            raise BadRequest("prompt", f"makes a call of {message.ByteSize()} bytes")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._outbox.append(message)
        self._filled.set()
        self.calls += 1
        try:
            answer = await future
        finally:
            self._waiting.pop(number, None)
        return self._kind.answer_from(answer)

    async def _write(self, call: Any) -> None:
        with self._losing():
            while True:
                await self._filled.wait()
                self._filled.clear()
                messages, self._outbox = self._outbox, []
                for batch in wire.batched(messages, MAX_MESSAGE_BYTES // 2):
                    self.frames += 1
                    await call.write(self._kind.frame(None, batch))

    async def _read(self, call: Any) -> None:
        with self._losing():
            while (frame := await call.read()) is not EOF:
                if frame is None:  # what gRPC gives for bytes that are no message
                    raise PeerLost(f"{self.address}: sends bytes that are no frame")
                for answer in frame.answers:
                    future = self._waiting.get(answer.call)
                    if future is not None and not future.done():
                        future.set_result(answer)
            raise PeerLost(f"{self.address}: the stream has ended")

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Whatever ends the stream ends all that wait on it."""
        try:
            yield
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, PeerLost) as error:
            self._lose(f"{self.address}: {_told(error)}")

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = reason
        log.info("stream lost: %s", reason)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(reason))
        self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._channel.close(None)

    async def close(self) -> None:
        """End the stream; what waits on it is lost."""
        self._lose(f"{self.address}: the stream was closed")
        if self._ending is not None:
            await self._ending


def _told(error: Exception) -> str:
    """What a peer's gRPC status says, in the words of our family."""
    if isinstance(error, grpc.aio.AioRpcError):
        return str(error_for(error.code(), one_line(error.details() or error.code().name)))
    return str(error) or type(error).__name__


class _FarPeer:
    """What a drafter and a verifier at the other end of a stream share."""

    def __init__(self, stream: PeerStream) -> None:
        self.stream = stream

    async def hello(self) -> Hello:
        return self.stream.said

    async def open(self, call: OpenCall) -> Opened:
        return cast(Opened, _expect(Opened, await self.stream.call(call)))

    async def close(self, call: CloseCall) -> Closed:
        return cast(Closed, _expect(Closed, await self.stream.call(call)))


class FarDrafter(_FarPeer):
    """A drafter at the other end of a stream."""

    async def draft(self, call: DraftCall) -> DraftTree:
        """The tree. Its `draft_us` is no more than the call took."""
        began_s = time.monotonic()
        tree = cast(DraftTree, _expect(DraftTree, await self.stream.call(call)))
        took_us = _us_since(began_s)
        return replace(tree, draft_us=took_us) if tree.draft_us > took_us else tree


class FarVerifier(_FarPeer):
    """A verifier at the other end of a stream."""

    async def verify(self, call: VerifyCall) -> Verdict:
        """The verdict. Its `verify_us` and `queue_us` together are no more than the call took."""
        began_s = time.monotonic()
        verdict = cast(Verdict, _expect(Verdict, await self.stream.call(call)))
        took_us = _us_since(began_s)
        if verdict.verify_us + verdict.queue_us <= took_us:
            return verdict
        verify_us = min(verdict.verify_us, took_us)
        return replace(verdict, verify_us=verify_us, queue_us=min(verdict.queue_us, took_us - verify_us))


def _us_since(began_s: float) -> int:
    return int(1e6 * (time.monotonic() - began_s))


def _expect(kind: type, answer: object) -> object:
    if not isinstance(answer, kind):
        raise EngineFailed(f"peer: answers with a {type(answer).__name__} where a {kind.__name__} was asked for")
    return answer


class Streams:
    """The streams of this process, one per replica, shared by all requests."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._streams: dict[str, asyncio.Task[PeerStream]] = {}

    async def to(self, address: str) -> PeerStream:
        """The stream to a replica, made where there is none or where it was lost. Raises as `PeerStream.connect`."""
        known = self._streams.get(address)
        if known is not None and known.done() and (known.cancelled() or known.exception() or known.result().lost):
            del self._streams[address]
        if address not in self._streams:
            self._streams[address] = asyncio.create_task(PeerStream.connect(address, self._kind))
        return await asyncio.shield(self._streams[address])

    async def close(self) -> None:
        for task in self._streams.values():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, DendroError):
                await (await task).close()
        self._streams.clear()


# ---- Leases, as the handles see them ----


class Peer(Protocol):
    """What drafters and verifiers share."""

    async def hello(self) -> Hello: ...
    async def open(self, call: OpenCall) -> Opened: ...
    async def close(self, call: CloseCall) -> Closed: ...


P = TypeVar("P", bound=Peer)
P_co = TypeVar("P_co", bound=Peer, covariant=True)


@dataclass(frozen=True, slots=True)
class Leased(Generic[P_co]):
    """A replica held for one request. It ends with the last opening that names `token`, by the replica's own count."""

    peer: P_co
    hello: Hello
    token: str  # empty: the peer gives none
    address: str = ""  # of the replica; empty: it is in this process


class Pool(Protocol[P_co]):
    """Replicas that serve the same model."""

    async def lease(self) -> Leased[P_co]:
        """Hold one of them. Raises PeerLost or Overloaded where there is none now."""
        ...


@dataclass(slots=True)
class Pace:
    """What drafts and rounds usually take, over all requests of a pool. Seconds; zero: nothing is known yet."""

    draft_level_s: float = 0.0  # a drafter works by level, so a tree's time is told by its depth
    verify_s: float = 0.0

    def drafted(self, seconds: float, depth: int) -> None:
        self.draft_level_s = _smoothed(self.draft_level_s, seconds / max(depth, 1))

    def verified(self, seconds: float) -> None:
        self.verify_s = _smoothed(self.verify_s, seconds)

    def deadline_s(self, depth: int, longest_s: float) -> float:
        """How long a round waits for a tree of `depth` levels."""
        patience = max(VERIFY_FACTOR * self.verify_s, VERIFY_FLOOR_S) if self.verify_s else longest_s
        usual = max(DRAFT_FACTOR * self.draft_level_s * depth, DRAFT_FLOOR_S) if self.draft_level_s else longest_s
        return min(usual, patience, longest_s)


def _smoothed(usual: float, newest: float) -> float:
    return newest if not usual else usual + SMOOTHING * (newest - usual)


@dataclass(slots=True)
class Clock:
    """What a handle's calls took, summed over its rounds, in microseconds."""

    rounds: int = 0
    wall_us: int = 0  # from the call to its answer
    busy_us: int = 0  # of that, the peer's own work
    queue_us: int = 0  # of that, waiting at the peer

    @property
    def hop_us(self) -> int:
        """What was neither: frames, sockets and event loops."""
        return self.wall_us - self.busy_us - self.queue_us

    def add(self, wall_s: float, busy_us: int, queue_us: int = 0) -> None:
        self.rounds += 1
        self.wall_us += int(1e6 * wall_s)
        self.busy_us += busy_us
        self.queue_us += queue_us


# ---- A text at a peer ----


class Seat(Generic[P]):
    """One opening of one text at one leased peer."""

    def __init__(self, leased: Leased[P], text: Text, vocabulary: int = 0) -> None:
        """`vocabulary` is the target's, where the peer is no verifier."""
        self.peer = leased.peer
        self.hello = leased.hello
        self.leased = leased
        self._opening = new_opening()
        self._held = 0  # tokens that the peer was told, and therefore holds or asks for
        self._terms = Terms(text.sampling, text.limits, text.tenant, text.marks, vocabulary)

    async def open(self, text: Text) -> Opened:
        call = OpenCall(self.update(text), self._terms, self.leased.token)
        async with asyncio.timeout(OPEN_S):
            return await self.peer.open(call)

    def update(self, text: Text) -> TextUpdate:
        """The text, less what the peer was told before. It counts as told: calls of a stream keep their order."""
        base, start = len(text), self._held
        self._held = base
        return TextUpdate(self._opening, base, text.digest(base), start, tuple(text.ids[start:]))

    def unsaid(self, update: TextUpdate) -> None:
        """The peer refused the call before it read the text."""
        self._held = update.start

    async def close(self, text: Text) -> int:
        """End the opening; how many tokens the saved state covers. Never raises for a peer that is gone."""
        try:
            async with asyncio.timeout(CLOSE_S):
                return (await self.peer.close(CloseCall(self.update(text)))).saved
        except (DendroError, TimeoutError) as error:
            log.info("close: %s", error or "the peer does not answer")
            return 0
        except Exception:  # a near engine's own fault: the request is over all the same
            log.exception("close failed")
            return 0


class _Background:
    """Tasks that outlive the call that began them, and are known."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), DendroError | None):
            log.error("a background task failed", exc_info=task.exception())


class VerifierHandle:
    """A request's verifier. `verify` gives the target's tokens, wherever the text has to be opened for it."""

    def __init__(
        self,
        text: Text,
        pool: Pool[VerifierPeer],
        pace: Pace,
        patience_s: float = PATIENCE_S,
        step_s: float = STEP_S,
        facts: Facts | None = None,
    ) -> None:
        """`facts` are what the router knows of the target's checkpoint; a replica of another one is not used."""
        self._facts = facts
        self.clock = Clock()
        self.moves = 0  # times that the text was opened at another verifier
        self.reopened = 0  # times that it was opened again at the same
        self.saved = 0  # tokens that the state covers which closing left behind
        self.opened: Opened | None = None
        self.hello: Hello | None = None
        self.greeted = asyncio.Event()  # `hello` is known
        self.on_refused_tree: Callable[[], None] | None = None
        self._pool = pool
        self._pace = pace
        self._patience_s = patience_s
        self._step_s = step_s
        self._faults = 0  # openings and rounds since the last verdict that ended by a verifier's own fault
        self._began_with: Hello | None = None  # of the first verifier that was leased
        self._seat: Seat[VerifierPeer] | None = None
        self._tried: Seat[VerifierPeer] | None = None  # the seat whose opening runs
        self._closed = False
        self._background = _Background()
        self._opening: asyncio.Task[None] | None = self._background.start(self._settle(text))

    async def ready(self) -> None:
        """Until the text is open for the first time, or its opening was given up; never raises."""
        opening = self._opening
        if self._seat is None and opening is not None:
            await asyncio.wait({opening})

    async def meet(self) -> Hello:
        """The hello of the first verifier that is leased. Raises PeerLost or Overloaded where none is leased within the
        patience."""
        if self.hello is None and (opening := self._opening) is not None:
            greeted = asyncio.ensure_future(self.greeted.wait())
            try:
                await asyncio.wait({opening, greeted}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                greeted.cancel()
            if self.hello is None:
                await asyncio.shield(opening)  # raises what ended it
        if self.hello is None:
            raise PeerLost("verifier: the handle is closed")
        return self.hello

    async def verify(self, text: Text, tree: DraftTree) -> Verdict:
        """The target's verdict. Raises BadRequest for a text that no verifier takes, PeerLost or Overloaded after
        the patience, EngineFailed when a second opening or round ends by a verifier's own fault, the same one's or
        another's."""
        give_up_s = time.monotonic() + self._patience_s
        forgotten = 0
        while True:
            seat = await self._settled(text)
            began_s = time.monotonic()
            call = VerifyCall(seat.update(text), tree)
            try:
                async with asyncio.timeout(self._step_s):
                    verdict = await seat.peer.verify(call)
                _check_verdict(verdict, tree, text, seat.hello)
            except NotFound as error:
                log.info("verifier: %s; the text is opened again", error)
                self.reopened += 1
                forgotten += 1
                if forgotten > 2 * STRIKES:
                    raise EngineFailed(f"verifier: keeps forgetting the text: {error}") from error
                self._seat = None
                self._begin(text, seat, same=forgotten == 1)
            except BadRequest as error:
                if not tree.guesses:
                    raise
                seat.unsaid(call.update)
                log.warning("verifier: refuses the tree: %s", error)
                tree = DraftTree.root_only(text.root)
                if self.on_refused_tree is not None:
                    self.on_refused_tree()
            except Overloaded:
                if time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(FIRST_BACKOFF_S)
            except (PeerLost, EngineFailed, TimeoutError) as error:
                if self._is_last_fault(error):
                    raise
                if time.monotonic() > give_up_s:
                    raise PeerLost(f"verifier: {error or 'does not answer'}") from error
                log.warning("verifier: %s; the text moves", error or "does not answer")
                self.moves += 1
                self._seat = None
                self._begin(text, seat, same=False)
            else:
                self._faults = 0
                wall_s = time.monotonic() - began_s
                if not verdict.cold:
                    self._pace.verified(wall_s)
                self.clock.add(wall_s, verdict.verify_us, verdict.queue_us)
                return verdict

    async def close(self, text: Text) -> None:
        """Let go, with the text so that its last state can be saved. May be called again; never raises."""
        if self._closed:
            return
        self._closed = True
        await _end(self._opening)
        seat, self._seat = self._seat or self._tried, None
        if seat is not None:
            self.saved = await seat.close(text)

    def _begin(self, text: Text, old: Seat[VerifierPeer], same: bool) -> None:
        self._opening = self._background.start(self._settle(text, old, same))

    async def _settled(self, text: Text) -> Seat[VerifierPeer]:
        if self._seat is None:
            if self._opening is None:
                raise PeerLost("verifier: the handle is closed")
            await asyncio.shield(self._opening)
        if self._seat is None:
            raise PeerLost("verifier: the handle is closed")
        return self._seat

    async def _settle(self, text: Text, old: Seat[VerifierPeer] | None = None, same: bool = False) -> None:
        """Lease a verifier and open the text there, as often as it takes within the patience; once more where it
        fails at its own fault.

        `old` is the opening that this one replaces, under the `same` lease at first. It is closed when its follower
        is open: a lease ends with the last of its openings.
        """
        give_up_s = time.monotonic() + self._patience_s
        pause_s = FIRST_BACKOFF_S
        leased = old.leased if old is not None and same else None
        while True:
            try:
                if leased is None:
                    leased = await self._pool.lease()
                self._check_same(leased.hello)
                self.hello = leased.hello
                self.greeted.set()
                self._tried = Seat(leased, text)
                seat, opened = await self._first_open(self._tried, text)
            except (DendroError, TimeoutError) as error:
                self._drop_tried(text)
                if self._is_last_fault(error) or (isinstance(error, BadRequest) and self.opened is None):
                    raise  # where `opened`, another verifier took the text: this one's limits are tighter
                if time.monotonic() + pause_s > give_up_s:
                    if isinstance(error, Overloaded):
                        raise
                    raise PeerLost("verifier: none opens the text in time") from error
                log.info("verifier: %s; trying again", error or "does not answer")
                leased = None
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_BACKOFF_S)
            else:
                self.opened = self.opened or opened
                if seat is not self._tried:
                    self._drop_tried(text)
                self._seat, self._tried = seat, None
                return
            finally:
                if old is not None:
                    self._background.start(old.close(text))
                    old = None

    async def _first_open(self, seat: Seat[VerifierPeer], text: Text) -> tuple[Seat[VerifierPeer], Opened]:
        """Open the text at a seat and, where that takes long, at another replica besides: whichever is open first.

        The first opening goes on meanwhile: a long prompt or a queue is no fault. Where there is no other replica now,
        one is looked for again after as long a time. Raises the first opening's error when both have failed; `seat`
        itself is the caller's to close where it is not returned.
        """
        first = asyncio.ensure_future(seat.open(text))
        second: asyncio.Task[tuple[Seat[VerifierPeer], Opened]] | None = None
        try:
            while True:
                running = [task for task in (first, second) if task is not None and not task.done()]
                if not running:
                    return seat, first.result()  # raises
                done, _ = await asyncio.wait(
                    running, timeout=SLOW_OPENING * self._patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if first in done and first.exception() is None:
                    return seat, first.result()
                if second is not None and second in done and second.exception() is None:
                    answer, second = second.result(), None
                    return answer
                if not done and running == [first]:
                    log.info("verifier: the text is not open yet; another replica is looked for")
                    second = asyncio.create_task(self._open_elsewhere(seat.leased.address, text))
        finally:
            first.cancel()
            if second is not None:
                self._background.start(self._drop_second(second, text))

    async def _open_elsewhere(self, address: str, text: Text) -> tuple[Seat[VerifierPeer], Opened]:
        """Open the text at a replica of another address. Raises PeerLost or Overloaded where none is to be had now."""
        leased = await self._pool.lease()
        self._check_same(leased.hello)
        if leased.address == address:
            raise PeerLost("verifier: there is no other replica")
        seat = Seat(leased, text)
        try:
            return seat, await seat.open(text)
        except BaseException:
            self._background.start(seat.close(text))
            raise

    async def _drop_second(self, second: asyncio.Task[tuple[Seat[VerifierPeer], Opened]], text: Text) -> None:
        """End an opening that is not wanted any more, and close it where it was answered just now."""
        await _end(second)
        if not second.cancelled() and second.exception() is None:
            await second.result()[0].close(text)

    def _drop_tried(self, text: Text) -> None:
        """Where an opening failed and its peer lives, it must not keep memory for it."""
        if self._tried is not None:
            self._background.start(self._tried.close(text))
            self._tried = None

    def _is_last_fault(self, error: BaseException) -> bool:
        """Count a verifier's own fault; whether it is the second since the last verdict, which ends the request."""
        self._faults += isinstance(error, EngineFailed)
        return isinstance(error, EngineFailed) and self._faults > 1

    def _check_same(self, hello: Hello) -> None:
        """Another model, dtype or exactness would give other tokens: a request that has begun does not go on there, and
        none begins with a replica of another checkpoint than the router's."""
        if fault := unlike(hello, self._facts):
            raise PeerLost(f"verifier: {fault}")
        if self._began_with is None:
            self._began_with = hello
        if hello.target != self._began_with.target:
            differ = [name for name in TARGET_FACTS if getattr(hello, name) != getattr(self._began_with, name)]
            raise PeerLost(f"verifier: differs from the one that the text began at in {', '.join(differ)}")


def _check_verdict(verdict: Verdict, tree: DraftTree, text: Text, hello: Hello) -> None:
    """A verdict that does not fit its tree, its text or its target's vocabulary is the verifier's fault."""
    guesses = verdict.length - 1  # accepted, those past a cut among them
    if len(verdict.ranks) != min(guesses, len(verdict.tokens)) or guesses + verdict.trimmed > tree.guesses:
        raise EngineFailed(
            f"verifier: its verdict has N = {verdict.length}, {len(verdict.ranks)} ranks and {verdict.trimmed} guesses "
            f"left out of a tree of {tree.guesses}"
        )
    for above, row, token in zip(verdict.path, verdict.path[1:], verdict.tokens, strict=False):
        if row >= tree.rows or tree.parents[row] != above or tree.tokens[row] != token:
            raise EngineFailed(f"verifier: its verdict's path {verdict.path} is none of the tree")
    if max(verdict.tokens) >= hello.vocabulary:
        raise EngineFailed(f"verifier: emits {max(verdict.tokens)}; its vocabulary is {hello.vocabulary}")
    room, ended = text.limits.max_length - len(text) - len(verdict.tokens), verdict.finish
    if (
        room < 0
        or (ended is None and (room == 0 or verdict.length != len(verdict.tokens)))
        or (ended is Finish.LENGTH and room > 0)
        or (ended is Finish.END_OF_TEXT and (text.limits.ignore_end or verdict.tokens[-1] not in hello.end_ids))
    ):
        raise EngineFailed(
            f"verifier: finish {ended}, N = {verdict.length}, {len(verdict.tokens)} tokens, {room} from the limit"
        )


class Company(Protocol):
    """The requests that run beside one, as far as its drafter is concerned."""

    @property
    def guesses(self) -> bool:
        """Whether trees are still worth it, when a text is about to be opened for them."""
        ...

    def opening(self) -> AbstractContextManager[None]:
        """While a drafter processes the text."""
        ...


class DrafterHandle:
    """A request's drafter. `draft` gives a tree in time, or the root alone; it never raises for a drafter's fault."""

    def __init__(
        self,
        pool: Pool[DrafterPeer],
        pace: Pace,
        verifier: VerifierHandle,
        longest_s: float = 0.5,
        company: Company | None = None,
        adaptive: bool = True,
        facts: Facts | None = None,
        vocabulary: int = 0,
    ) -> None:
        """`longest_s` bounds every wait for a draft; a round that is not `adaptive` waits so long. The verifier's
        limits are those that a tree must keep. Without `company` a tree that is asked for is wanted. `facts` are what
        the router knows of the drafter's checkpoint; a replica of another one is not used. `vocabulary` is the target's
        by the router's facts, until its verifier says it."""
        self._facts = facts
        self._vocabulary = vocabulary
        self.clock = Clock()
        self.fallbacks: Counter[str] = Counter()  # rounds without the tree that was asked for, by reason
        self.leases = 0
        self.saved = 0
        self.opened: Opened | None = None
        self._pool = pool
        self._pace = pace
        self._verifier = verifier
        self._longest_s = longest_s
        self._company = company
        self._adaptive = adaptive
        self._seat: Seat[DrafterPeer] | None = None
        self._tried: Seat[DrafterPeer] | None = None
        self._idle = 0
        self._strikes = 0
        self._given_up = ""  # why no drafter is asked any more in this request; empty: it is
        self._late_draft: asyncio.Task[None] | None = None
        self._pause_s = FIRST_BACKOFF_S
        self._not_before_s = 0.0
        self._closed = False
        self._background = _Background()
        self._opening: asyncio.Task[None] | None = None  # a text that never wants a tree costs no drafter anything
        verifier.on_refused_tree = self.strike

    def strike(self) -> None:
        """The drafter made a tree that is none; after the third, it is asked for no more."""
        self._strikes += 1

    async def draft(self, text: Text, shape: TreeShape) -> DraftTree:
        if not shape.drafted:
            self._rest(text)
            return DraftTree.root_only(text.root)
        self._idle = 0
        if self._opening is None:
            await self._verifier_greets()  # by then it shows how many requests came with this one
            if self._company is not None and not self._company.guesses:
                return self._without(text, "unwanted")
            self._begin(text)
            await self._wait_first()
        reason = self._unfit(text, shape)
        if reason:
            return self._without(text, reason)
        seat = self._seat
        if seat is None:
            self._begin(text)
            return self._without(text, "opening")
        return await self._draft(seat, text, shape)

    async def _draft(self, seat: Seat[DrafterPeer], text: Text, shape: TreeShape) -> DraftTree:
        began_s = time.monotonic()
        call = DraftCall(seat.update(text), shape)
        work = asyncio.ensure_future(seat.peer.draft(call))
        longest_s = self._longest_s
        deadline_s = self._pace.deadline_s(shape.depth, longest_s) if self._adaptive else longest_s
        try:
            await asyncio.wait({work}, timeout=deadline_s)
        except asyncio.CancelledError:
            work.cancel()
            raise
        wall_s = time.monotonic() - began_s
        if not work.done():
            # The call stays: the peer has the text from it, and its answer says what the usual time really is.
            self._late_draft = self._background.start(self._late(seat, work, began_s, text, shape))
            return self._without(text, "late", wall_s)
        try:
            tree = work.result()
            self._check(tree, text, shape)
        except BadRequest as error:
            log.warning("drafter: its tree is refused: %s", error)
            seat.unsaid(call.update)
            self.strike()
            return self._without(text, "malformed", wall_s)
        except NotFound as error:
            log.info("drafter: %s; the text is opened again", error)
            self._seat = None
            self._begin(text, seat)
            return self._without(text, "stale", wall_s)
        except DendroError as error:
            log.info("drafter: %s", error)
            self._leave(seat, text)
            self._back_off()
            return self._without(text, "lost" if isinstance(error, PeerLost) else "failed", wall_s)
        except Exception:  # a near engine's own fault costs the round its speculation, as a far one's does
            log.exception("drafter: failed")
            self._leave(seat, text)
            self._back_off()
            return self._without(text, "failed", wall_s)
        self._pace.drafted(wall_s, shape.depth)
        self.clock.add(wall_s, tree.draft_us)
        self._pause_s = FIRST_BACKOFF_S
        return tree

    async def close(self, text: Text) -> None:
        """Let go, with the text so that its last state can be saved. May be called again; never raises."""
        if self._closed:
            return
        self._closed = True
        await _end(self._opening)
        seat, self._seat = self._seat or self._tried, None
        if seat is not None:
            self.saved = await seat.close(text)

    def _unfit(self, text: Text, shape: TreeShape) -> str:
        """Why no tree of this shape can be asked for; empty where one can."""
        seat, target = self._seat, self._verifier.hello
        if not self._given_up and self._strikes >= STRIKES:
            self._given_up = "struck"
        if self._given_up:
            if seat is not None:
                self._leave(seat, text)
            return self._given_up
        if self._late_draft is not None and not self._late_draft.done():
            return "busy"  # with a tree that was too late: to wait for it again would pay for it twice
        for hello in (target, seat.hello if seat is not None else None):
            if hello is not None and (shape.rows > hello.max_rows or shape.depth > hello.max_depth):
                return "limits"
        return ""

    def _check(self, tree: DraftTree, text: Text, shape: TreeShape) -> None:
        if tree.tokens[0] != text.root:
            raise BadRequest("tree.tokens", f"begins with {tree.tokens[0]}; the text's root is {text.root}")
        if tree.rows > shape.rows or int(tree.depths.max()) > shape.depth:
            raise BadRequest("tree", f"has {tree.rows} rows and depth {tree.depths.max()}; asked was {shape}")
        target = self._verifier.hello
        if target is not None and (tree.tokens >= target.vocabulary).any():
            raise BadRequest("tree.tokens", f"past the target's vocabulary of {target.vocabulary}")

    async def _verifier_greets(self) -> None:
        """Until a verifier is leased, or none was in time."""
        verifier = asyncio.ensure_future(self._verifier.ready())
        greeted = asyncio.ensure_future(self._verifier.greeted.wait())
        try:
            await asyncio.wait({verifier, greeted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            verifier.cancel()
            greeted.cancel()

    async def _wait_first(self) -> None:
        """The first round waits for the drafter no longer than for the verifier's own opening; a later one that is the
        first to want a tree does not wait."""
        if self._seat is None and self._opening is not None:
            verifier = asyncio.ensure_future(self._verifier.ready())
            try:
                await asyncio.wait({self._opening, verifier}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                verifier.cancel()

    def _without(self, text: Text, reason: str, wall_s: float = 0.0) -> DraftTree:
        """The round's plain decoding, at the cost that the drafter made."""
        self.fallbacks[reason] += 1
        wall_us = int(1e6 * wall_s)
        self.clock.add(wall_s, wall_us)
        return replace(DraftTree.root_only(text.root), draft_us=wall_us, missed=True)

    async def _late(
        self, seat: Seat[DrafterPeer], work: asyncio.Future[DraftTree], began_s: float, text: Text, shape: TreeShape
    ) -> None:
        """Learn from a draft that nobody waits for any more; a drafter that never answers is left."""
        await asyncio.wait({work}, timeout=FROZEN_S)
        if work.done() and not work.cancelled() and work.exception() is None:
            self._pace.drafted(time.monotonic() - began_s, shape.depth)
            return
        work.cancel()
        if not self._closed:
            self._leave(seat, text)

    def _rest(self, text: Text) -> None:
        """A round without speculation; after many, the drafter is given back."""
        self._idle += 1
        if self._idle >= IDLE_ROUNDS and self._seat is not None:
            self._leave(self._seat, text)

    def _leave(self, seat: Seat[DrafterPeer], text: Text) -> None:
        if self._seat is seat:
            self._seat = None
        self._background.start(seat.close(text))

    def _begin(self, text: Text, old: Seat[DrafterPeer] | None = None) -> None:
        """Open in the background, unless that runs or is too soon. `old` is opened again under its own lease."""
        running = self._opening is not None and not self._opening.done()
        if not running and not self._closed and (old is not None or time.monotonic() >= self._not_before_s):
            self._opening = self._background.start(self._settle(text, old))

    def _back_off(self) -> None:
        """The next lease is not taken at once: what failed may fail again, at the cost of a text each time."""
        self._not_before_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_BACKOFF_S)

    async def _settle(self, text: Text, old: Seat[DrafterPeer] | None = None) -> None:
        """Open the text at a drafter, once; the next round that wants a tree tries again."""
        with self._company.opening() if self._company is not None else contextlib.nullcontext():
            await self._open(text, old)

    async def _open(self, text: Text, old: Seat[DrafterPeer] | None) -> None:
        try:
            if old is not None:
                leased = old.leased
            else:
                leased = await self._pool.lease()
                self.leases += 1
            if fault := unlike(leased.hello, self._facts):
                log.warning("drafter: is not used: %s", fault)
                self._given_up = "mismatch"
                return
            target = self._verifier.hello
            seat = self._tried = Seat(leased, text, target.vocabulary if target is not None else self._vocabulary)
            opened = await seat.open(text)
        except (DendroError, TimeoutError) as error:
            log.info("drafter: %s; trying again later", error or "does not answer")
            self._back_off()
            if self._tried is not None:
                self._background.start(self._tried.close(text))
                self._tried = None
        else:
            self.opened = self.opened or opened
            self._seat, self._tried = seat, None
        finally:
            if old is not None:  # only now: a lease ends with the last of its openings
                self._background.start(old.close(text))


def unlike(hello: Hello, facts: Facts | None) -> str:
    """How a replica differs from the router's facts of its checkpoint; empty where it does not, or where the router has
    none. Whether a drafter's tokens mean what its target's do was found by these facts, before anything started."""
    if facts is None or hello.facts == facts.digest:
        return ""
    compared = (
        ("tokenizer", hello.tokenizer, facts.tokenizer),
        ("vocabulary", hello.vocabulary, facts.vocabulary),
        ("end ids", hello.end_ids, tuple(sorted(facts.end_ids))),
    )
    parts = [f"its {name} is {theirs}, here {ours}" for name, theirs, ours in compared if theirs != ours]
    return f"it was loaded from another checkpoint: {'; '.join(parts) or 'its configuration differs'}"


class NoDrafter:
    """The handle of a target that has no drafter."""

    opened: Opened | None = None

    async def draft(self, text: Text, shape: TreeShape) -> DraftTree:
        return DraftTree.root_only(text.root)

    async def close(self, text: Text) -> None:
        return


async def _end(task: asyncio.Task[Any] | None) -> None:
    """End a task that may have ended, and wait for it."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task})
