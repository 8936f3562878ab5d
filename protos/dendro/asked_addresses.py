"""A question that goes to each address of a client, since any router may know the answer. Does no I/O."""

from __future__ import annotations

import time

import grpc

from dendro.attempts import final_error
from dendro.clock import Clock
from dendro.errors import DendroError, PeerLost

LONGEST_CALL_S = 5.0
"""Longest wait for a router's answer: one that does not answer must not keep the others from being asked."""


class AskedAddresses:
    """The calls of one question, one for each address, and those that failed."""

    def __init__(self, timeout_s: float, addresses: tuple[str, ...], clock: Clock = time.monotonic) -> None:
        self.addresses = addresses
        self.failures: list[DendroError] = []
        self._clock = clock
        self._deadline = self._call_deadline = clock() + timeout_s
        self._timeout_s = timeout_s
        self._asked = 0

    def begin_call(self) -> None:
        """Begin the call to the next address. Its timeout is an equal share of the time that is left, at most
        LONGEST_CALL_S."""
        left = max(self._deadline - self._clock(), 0.0) / max(len(self.addresses) - self._asked, 1)
        self._asked += 1
        self._call_deadline = self._clock() + min(left, LONGEST_CALL_S)

    @property
    def left_s(self) -> float:
        """Time that is left for the call."""
        return self._call_deadline - self._clock()

    def failed(self, error: grpc.RpcError, address: str) -> None:
        """Record that a router refused the call, or did not answer."""
        found = final_error(error, self._timeout_s)
        if found is None or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            found = PeerLost(f"{address}: no answer: {error.details() or error.code().name}")
        self.failures.append(found)
