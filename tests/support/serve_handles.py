"""Handles of Ray Serve's deployments, without Ray: each grants leases at addresses that a test chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ray.serve.exceptions import RayServeException

Grant = Callable[["FakeHandle"], str]
"""Returns the address at which the next lease is granted; empty: none is before `changed`."""


class FakeAnswers:
    """A streaming call for a lease, which waits where no replica grants one."""

    def __init__(self, handle: FakeHandle) -> None:
        self._handle = handle
        self._granted = ""
        self._ended = asyncio.Event()

    def __aiter__(self) -> FakeAnswers:
        return self

    async def __anext__(self) -> dict[str, str]:
        if self._granted:
            await self._ended.wait()
            raise StopAsyncIteration
        if not (address := self._handle.grant(self._handle)):
            await self._handle.changed.wait()
            address = self._handle.grant(self._handle)
        self._granted = address
        self._handle.ongoing.append(address)
        return {"address": address, "lease": ""}

    def cancel(self) -> None:
        if self._granted and not self._ended.is_set():
            self._handle.ongoing.remove(self._granted)
        self._ended.set()


class FakeBroadcast:
    """A call of all replicas at once."""

    def __init__(self, answers: list[object]) -> None:
        self._answers = answers

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[object]:
        if not self._answers:
            raise RayServeException("the deployment is unavailable")
        return self._answers


class FakeHandle:
    """A deployment whose replicas are `running`; `grant` chooses one of them for each lease."""

    def __init__(self, grant: Grant, running: tuple[str, ...] = ()) -> None:
        self.grant = grant
        self.running = running
        self.ongoing: list[str] = []  # addresses of the leases that Serve counts
        self.changed = asyncio.Event()  # set when calls that wait are to be granted
        self.calls = 0

    def options(self, stream: bool) -> FakeHandle:
        return self

    @property
    def lease(self) -> FakeHandle:
        return self

    @property
    def stats(self) -> FakeHandle:
        return self

    def remote(self) -> FakeAnswers:
        self.calls += 1
        return FakeAnswers(self)

    def broadcast(self, method: str) -> FakeBroadcast:
        return FakeBroadcast([{"calls": address} for address in self.running])


def no_replica(handle: FakeHandle) -> str:
    """A grant of a deployment without a replica."""
    return ""
