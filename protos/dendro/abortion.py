"""An abort, which goes to each address, since any router may run the request. Does no I/O."""

from __future__ import annotations

import time

import grpc

from dendro.arguments import ascii_of
from dendro.attempts import final_error
from dendro.clock import Clock
from dendro.errors import DendroError, PeerLost
from dendro.v1 import generation_pb2 as pb

LONGEST_CALL_S = 5.0
"""Longest wait for a router's answer: one that does not answer must not keep the others from being asked."""


class Abortion:
    """The calls of one abort, one for each address, and what came of them."""

    def __init__(
        self, request_id: str, timeout_s: float, addresses: tuple[str, ...], clock: Clock = time.monotonic
    ) -> None:
        self.request = pb.AbortRequest(request_id=ascii_of("request_id", request_id))
        self.addresses = addresses
        self._clock = clock
        self._deadline = self._call_deadline = clock() + timeout_s
        self._timeout_s = timeout_s
        self._asked = self._ended = 0
        self._failed: list[DendroError] = []

    def begin_call(self) -> None:
        """Begin the call to the next address. Its time is its share of what is left, at most LONGEST_CALL_S."""
        left = max(self._deadline - self._clock(), 0.0) / max(len(self.addresses) - self._asked, 1)
        self._asked += 1
        self._call_deadline = self._clock() + min(left, LONGEST_CALL_S)

    @property
    def left_s(self) -> float:
        """Time that is left for the call."""
        return self._call_deadline - self._clock()

    def answered(self, response: pb.AbortResponse) -> None:
        """Record a router's answer."""
        self._ended += response.aborted

    def failed(self, error: grpc.RpcError, address: str) -> None:
        """Record that a router refused the call, or did not answer."""
        found = final_error(error, self._timeout_s)
        if found is None or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            found = PeerLost(f"{address}: no answer: {error.details() or error.code().name}")
        self._failed.append(found)

    @property
    def ended(self) -> int:
        """The number of requests that were ended. Where there is none, raises the first error of a router that refused
        or did not answer, since the request may run there."""
        if self._failed and not self._ended:
            raise self._failed[0]
        return self._ended
