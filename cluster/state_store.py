"""States and priors by name in Redis: a cache that may be slow, full or gone, so every call has a time limit."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from dendro.clock import Clock
from dendro.measured import microseconds
from dendro.state import MAX_BLOB_BYTES
from dendro.tasks import BackgroundTasks

from cluster.policies.prior import MAX_PRIOR_BYTES, Prior, PriorKey, pack_prior, unpack_prior
from cluster.redis_client import REDIS_FAULTS, AnyClient, answers, connect, drop_idle, reason_of

log = logging.getLogger("dendro.redis")

PREFIX = "dendro:state:"
PRIOR_PREFIX = "dendro:prior:"
CALL_BUDGET_S = 0.2
"""Seconds for both attempts of a call."""
PART_BYTES = 4 << 20
"""Most bytes that one call reads, within one time limit: 34 ms on a link of 1 Gbit/s."""
CALLS_AT_ONCE = 32
"""Most calls of a store in progress at once; further calls wait. redis-py opens at most 100 connections, and a call
whose first attempt is not answered keeps two for a while."""
FAILURES_TO_OPEN = 3
OPEN_S = 5.0
LOG_AGAIN_S = 60.0

Answer = TypeVar("Answer")

_CALLS = BackgroundTasks(expected=Exception)  # callers get their errors


async def within(budget_s: float, call: Coroutine[Any, Any, Answer]) -> Answer:
    """The call's answer. Raises TimeoutError after `budget_s`.

    Does not wait for a cancelled call to end: redis-py sends UNWATCH before it releases the connection, and waits
    seconds for the answer of a frozen server.
    """
    task = _CALLS.start(call)
    try:
        await asyncio.wait({task}, timeout=budget_s)
        if task.done():
            return task.result()
        raise TimeoutError
    finally:
        task.cancel()  # does nothing if it is done


async def within_two_attempts(
    budget_s: float, client: AnyClient, call: Callable[[], Coroutine[Any, Any, Answer]]
) -> Answer:
    """The answer of a call that may be made twice. Raises TimeoutError after `budget_s`.

    A load balancer drops idle connections without closing them, and a call over such a one is never answered. So after
    half of the time the call is made again, over a new connection.
    """
    try:
        return await within(budget_s / 2, call())
    except TimeoutError:
        await within(budget_s / 2, drop_idle(client))
    return await within(budget_s / 2, call())


class StoreBusy(Exception):
    """A call waited too long for its turn, and was not made."""


class CallTurns:
    """Limits a store to CALLS_AT_ONCE calls in progress, so that a burst is not taken for a server that fails. Bound to
    one event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(CALLS_AT_ONCE)

    @asynccontextmanager
    async def take(self, wait_s: float) -> AsyncGenerator[None, None]:
        """Hold a turn. Raises StoreBusy where none is free within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise StoreBusy from None
        try:
            yield
        finally:
            self._free.release()


@dataclass(slots=True)
class CallCounters:
    """Calls to Redis by outcome."""

    answered: int = 0
    refused: int = 0  # calls answered with an error
    failed: int = 0  # calls without an answer in time
    skipped: int = 0  # calls not made, as the circuit was open
    opened: int = 0  # times that the circuit opened
    answer_us: int = 0  # time of the calls that were answered


class CircuitOpen(Exception):
    """No call was made, since the last calls failed."""


class CircuitBreaker:
    """Stops calls to a server that fails: after `failures` consecutive failures no call is allowed for `open_s`
    seconds; then one call may probe. An error that the server answers is not a failure: nobody waited for it, and
    other calls may succeed."""

    def __init__(
        self,
        failures: int = FAILURES_TO_OPEN,
        open_s: float = OPEN_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self.failures = failures
        self.open_s = open_s
        self.clock = clock
        self._in_a_row = 0
        self._shut_until = 0.0
        self.counters = CallCounters()
        self._logged = ("", -math.inf)  # the last reason of a failure that was logged, and when

    @property
    def shut(self) -> bool:
        """True if no call is made, but for one probe after each pause."""
        return self._in_a_row >= self.failures

    def allows(self) -> bool:
        """True if a call may be made now. After the pause the first caller makes the probe."""
        if self._in_a_row < self.failures:
            return True
        if self.clock() < self._shut_until:
            return False
        self._shut_until = self.clock() + self.open_s
        return True

    async def ask(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer of a call to Redis. Raises CircuitOpen, or one of REDIS_FAULTS."""
        if not self.allows():
            self.counters.skipped += 1
            raise CircuitOpen
        began_s = self.clock()
        try:
            answer = await call()
        except REDIS_FAULTS as error:
            self.note(reason_of(error))
            if answers(error):
                self._in_a_row = 0
                self.counters.refused += 1
            else:
                self.failed()
            raise
        self.counters.answer_us += microseconds(self.clock() - began_s)
        self.succeeded()
        return answer

    def note(self, reason: str) -> None:
        """Log why a call failed; the same reason once a minute."""
        last, at_s = self._logged
        if reason != last or self.clock() >= at_s + LOG_AGAIN_S:
            self._logged = (reason, self.clock())
            log.warning("redis: a call failed: %s", reason)

    def succeeded(self) -> None:
        self._in_a_row = 0
        self.counters.answered += 1

    def failed(self) -> None:
        self._in_a_row += 1
        self.counters.failed += 1
        self.counters.opened += self._in_a_row == self.failures
        if self._in_a_row >= self.failures:
            self._shut_until = self.clock() + self.open_s


@dataclass(slots=True)
class StoreCounters:
    """Calls by outcome. `skipped` were not made, as the circuit was open; `refused` had blobs that are too large."""

    hits: int = 0
    misses: int = 0
    saved: int = 0
    errors: int = 0
    skipped: int = 0
    refused: int = 0


class RedisStates:
    """dendro.state.StateStore in Redis. No call raises, and none takes longer than `budget_s` for each PART_BYTES,
    after as long a wait for its turn.

    Not thread-safe: bound to the event loop of the first call.
    """

    def __init__(
        self,
        url: str,
        ttl_s: int,
        budget_s: float = CALL_BUDGET_S,
        breaker: CircuitBreaker | None = None,
        prefix: str = PREFIX,
        max_bytes: int = MAX_BLOB_BYTES,
    ) -> None:
        """max_bytes: larger blobs are not stored"""
        self._redis = connect(url, budget_s)
        self.prefix = prefix
        self.ttl_s = ttl_s
        self.max_bytes = max_bytes
        self.budget_s = budget_s
        self.breaker = breaker or CircuitBreaker()
        self.counters = StoreCounters()
        self._turns = CallTurns()

    async def load(self, name: str, most: int) -> bytes | None:
        """The blob of that name; None where there is none, it has more than `most` bytes, or Redis does not answer in
        time. It is read in parts, without asking for its length first: a blob that is written again meanwhile may be
        mixed, which the checksum of a state shows."""
        key, held = self.prefix + name, bytearray()
        while True:
            start, wanted = len(held), min(PART_BYTES, most + 1 - len(held))
            part = await self._ask(partial(self._redis.getrange, key, start, start + wanted - 1))
            if not isinstance(part, bytes) or not (held or part):
                self.counters.misses += 1
                return None
            held += part
            if len(held) > most:
                self.counters.refused += 1
                return None
            if len(part) < wanted:
                self.counters.hits += 1
                return bytes(held)

    def takes(self, size: int) -> bool:
        """Return True if a blob of `size` bytes may be stored; count it as refused if not."""
        self.counters.refused += size > self.max_bytes
        return size <= self.max_bytes

    async def save(self, name: str, blob: bytes) -> bool:
        """Store a blob for `ttl_s`. Returns whether it was stored."""
        if not self.takes(len(blob)):
            return False
        call = partial(self._redis.set, self.prefix + name, blob, ex=self.ttl_s)
        kept = bool(await self._ask(call, parts=max(1, -(-len(blob) // PART_BYTES))))
        self.counters.saved += kept
        return kept

    async def close(self) -> None:
        await self._redis.aclose()

    async def _ask(self, call: Callable[[], Awaitable[Answer]], parts: int = 1) -> Answer | None:
        """The answer of a call that sends or gets so many parts; None where it fails or is not made."""
        budget_s = parts * self.budget_s
        try:
            async with self._turns.take(budget_s):
                return await self.breaker.ask(
                    lambda: within_two_attempts(budget_s, self._redis, lambda: _awaited(call))
                )
        except CircuitOpen:
            self.counters.skipped += 1
        except (StoreBusy, *REDIS_FAULTS):
            self.counters.errors += 1
        return None


async def _awaited(call: Callable[[], Awaitable[Answer]]) -> Answer:
    return await call()


class RedisPriors:
    """cluster.policies.prior.PriorStore in Redis, with the time limits of `RedisStates`. Of two routers that write one
    key the last write stays; what the other learned remains in that router only."""

    def __init__(self, url: str, ttl_s: int, budget_s: float = CALL_BUDGET_S) -> None:
        self.blobs = RedisStates(url, ttl_s, budget_s, prefix=PRIOR_PREFIX, max_bytes=MAX_PRIOR_BYTES)

    async def load(self, key: PriorKey) -> Prior | None:
        """The stored prior; None if there is none, it is invalid, or Redis does not answer in time."""
        blob = await self.blobs.load(key.name, MAX_PRIOR_BYTES)
        return None if blob is None else unpack_prior(blob)

    async def save(self, key: PriorKey, prior: Prior) -> bool:
        return await self.blobs.save(key.name, pack_prior(prior))

    async def close(self) -> None:
        await self.blobs.close()
