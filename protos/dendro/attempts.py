"""Repeats failed calls of a request: at once at the next address, with pauses after all addresses failed, until the
request's deadline."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import cast

import grpc

from dendro.answer import REASON_KEY, RETRY_AFTER_KEY
from dendro.clock import Clock
from dendro.errors import BadRequest, DendroError, EngineFailed, LimitReached, Overloaded, PeerLost, error_for, one_line
from dendro.rotation import Rotation

log = logging.getLogger("dendro.client")

BROKEN = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,  # the router is gone, or drains
        grpc.StatusCode.CANCELLED,  # the router ended without a status
        grpc.StatusCode.INTERNAL,  # a gateway lost its router
        grpc.StatusCode.UNKNOWN,
    }
)
"""Codes that, without our own reason, mean that the connection broke."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
WARNED_AFTER_S = 3.0
"""Seconds for which all calls of a request have failed when that is logged."""
HINTS = {
    "Connection refused": "is a cluster running there? `dendro serve` prints its address",
    "http1.x server": "the port is one of HTTP; `dendro serve` prints the address for gRPC first",
}
"""Advice for connections that cannot be made, by words in gRPC's error."""
OVER_LIMIT, OWN_RECEIPT = "message larger than max", "CLIENT: Received"
"""Words in gRPC's error for a message over a limit, and in that for an answer over the client's own limit."""


class Attempts:
    """The deadline of one request, and the failures of its calls since it last progressed. Does no I/O."""

    def __init__(self, timeout_s: float, clock: Clock = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._deadline = clock() + timeout_s
        self._failures = 0
        self._refused: Counter[str] = Counter()  # refused calls by address, since the last call that broke
        self._last: DendroError | None = None
        self._failing_since_s, self._warned = 0.0, False

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline. After it, raises the error of the last call, or PeerLost."""
        left = self._deadline - self._clock()
        if left <= 0:
            late = f"no complete answer within {self.timeout_s:g} s"
            last = self._last
            raise type(last)(f"{late}; the last call: {last}") if last is not None else PeerLost(late)
        return left

    def progressed(self) -> None:
        """Record that the request received tokens: earlier failures no longer count."""
        self._failures = 0
        self._refused.clear()
        self._last = None

    def pause_after(self, error: grpc.RpcError | None, address: str, rotation: Rotation, begun: bool = False) -> float:
        """Record in the rotation that a call at `address` broke or was refused. Returns the seconds to wait before the
        next call. Raises a DendroError where the call must not be repeated.

        error: None for a stream that ended without its last event
        begun: True if the answer has begun, so that giving up would lose it; otherwise the call fails once all
        addresses have refused it
        """
        if error is not None and (final := final_error(error, self.timeout_s)) is not None:
            raise final from error
        failed: DendroError
        if error is not None and _full(error):
            failed = _refusal(error)
            rotation.refused(address)
            self._refused[address] += 1
            if not begun and all(self._refused[each] >= rotation.calls_to(each) for each in rotation.addresses):
                raise failed from error
        else:
            details = error.details() or error.code().name if error is not None else "it ended without its last event"
            hint = next((f": {hint}" for words, hint in HINTS.items() if words in details), "")
            failed = PeerLost(f"the stream broke: {details}{hint}")
            rotation.broke(address)
            self._refused.clear()
        self._last = failed
        self._failures += 1
        self._warn(rotation, failed)
        passes, within = divmod(self._failures, rotation.routers)
        if within:
            return 0.0
        longest_s = min(FIRST_PAUSE_S * 2.0 ** min(passes - 1, 10), LONGEST_PAUSE_S)
        if isinstance(failed, LimitReached):
            return min(failed.retry_after_s, self.remaining_s)
        return min(longest_s * random.uniform(0.5, 1.0), self.remaining_s)  # clients of one router do not come together

    def _warn(self, rotation: Rotation, failed: DendroError) -> None:
        """Log once that calls have failed for a while, as the caller may have to wait for long."""
        if self._failures == 1:
            self._failing_since_s, self._warned = self._clock(), False
        if not self._warned and self._clock() - self._failing_since_s >= WARNED_AFTER_S:
            self._warned = True
            routers = ", ".join(rotation.addresses)
            log.warning("%s: no answer; calls go on for %.0f s: %s", routers, self.remaining_s, one_line(str(failed)))


def _full(error: grpc.RpcError) -> bool:
    """True if a router or its peers are full, or the key's share of a router is used up: not a limit of gRPC, of a
    gateway, or of the request's time."""
    reasons = (Overloaded.__name__, LimitReached.__name__)
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and _reason_of(error) in reasons


def _refusal(error: grpc.RpcError) -> Overloaded:
    """The error of a router that is full."""
    details = error.details() or ""
    if _reason_of(error) != LimitReached.__name__:
        return Overloaded(details)
    wait = _trailing(error).get(RETRY_AFTER_KEY, "")
    return LimitReached(details, float(wait) if wait.isdecimal() else FIRST_PAUSE_S)


def _trailing(error: grpc.RpcError) -> dict[str, str]:
    """The texts of the trailing metadata."""
    found = cast(Sequence[tuple[str, str | bytes]], error.trailing_metadata() or ())
    return {name: value for name, value in found if isinstance(value, str)}


def _reason_of(error: grpc.RpcError) -> str:
    """The reason that our servers give; empty in statuses of gRPC and of gateways."""
    return _trailing(error).get(REASON_KEY, "")


def final_error(error: grpc.RpcError, timeout_s: float) -> DendroError | None:
    """The error that a status stands for; None if the connection broke or the router is full, so that the call may be
    repeated."""
    code: grpc.StatusCode = error.code()
    details, ours = error.details() or "", bool(_reason_of(error))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return PeerLost(f"no complete answer within {timeout_s:g} s")
    if code is grpc.StatusCode.UNAVAILABLE or (code in BROKEN and not ours) or _full(error):
        return None
    if not ours and OVER_LIMIT in details:
        return EngineFailed(details) if OWN_RECEIPT in details else BadRequest("request", details)
    return error_for(code, details)
