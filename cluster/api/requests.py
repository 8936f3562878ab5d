"""The requests that a router runs, whichever protocol they came by: their places, their ids, and how they are ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableSet
from contextlib import contextmanager
from typing import Any

from dendro.errors import Aborted, BadRequest, DendroError, Overloaded, PeerLost
from dendro.v1 import generation_pb2 as pb

from cluster.api.places import Places

CUT_S = 2.0
"""Seconds that a stopping server waits for the requests that it ends."""


EndAtAll = Callable[[str, tuple[str, ...]], Awaitable[int]]
"""Ends a tenant's requests with these ids at all routers. Returns how many were ended; raises PeerLost where none was,
and a router did not answer."""


def identified(request: pb.GenerateRequest) -> str:
    """The request's id, which is made and set where it has none."""
    request.request_id = request.request_id or secrets.token_hex(16)
    return request.request_id


class RunningRequests:
    """Counts and limits the running requests, and ends them: one, by its id, or all. Bound to one event loop."""

    def __init__(self, most: int, writing: MutableSet[asyncio.Task[Any]] | None = None) -> None:
        """most: answers that run at once   writing: tasks of requests whose turn may be in its session already, so that
        they are not aborted (`TurnWriter.writing`); a task leaves it with its request"""
        self._places = Places(most)
        self._running: dict[asyncio.Task[Any], tuple[str, str]] = {}  # tenant and request id
        self._writing = set[asyncio.Task[Any]]() if writing is None else writing
        self._ended: dict[asyncio.Task[Any], DendroError] = {}  # why a task that is ended by us is cancelled
        self._idle = asyncio.Event()  # is set while no request runs
        self._idle.set()
        self._requests = self._refused = self._rounds = 0
        self.at_all_routers: EndAtAll | None = None  # None: there is no other router

    def stats(self) -> dict[str, int]:
        """Counters; the gauge `running`, of answers; and the processor time that this process has used."""
        return {
            "pid": os.getpid(),
            "requests": self._requests,
            "refused": self._refused,
            "rounds": self._rounds,
            "running": self._places.taken,
            "places": self._places.most,
            "cpu_us": time.process_time_ns() // 1000,
        }

    def count_rounds(self, rounds: int) -> None:
        """Count rounds whose chunks were sent."""
        self._rounds += rounds

    @contextmanager
    def run(self, tenant: str, request_id: str, answers: int) -> Iterator[None]:
        """Run a request of `answers` answers in the current task. Raises Overloaded where there is no room, and
        BadRequest where there never is; inside, Aborted or PeerLost once the request is ended by a call here."""
        if answers > self._places.most:
            raise BadRequest("n", f"is {answers}; this router runs at most {self._places.most} answers")
        try:
            self._places.take(tenant, answers)
        except Overloaded:
            self._refused += 1
            raise
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = tenant, request_id
        self._idle.clear()
        self._requests += 1
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            raise self._ended[task] from None
        finally:
            self._ended.pop(task, None)
            self._running.pop(task, None)
            self._writing.discard(task)
            self._places.leave(tenant, answers)
            if not self._running:
                self._idle.set()

    def abort(self, tenant: str, ids: Collection[str]) -> int:
        """End a tenant's requests that run here and have one of these ids, but for those whose turn is being written.
        Returns how many were ended by this call."""
        wanted = {(tenant, each) for each in ids}
        found = [
            task
            for task, key in self._running.items()
            if key in wanted and task not in self._ended and task not in self._writing
        ]
        for task in found:
            self._end(task, Aborted("request: was aborted by its client"))
        return len(found)

    async def abort_everywhere(self, tenant: str, ids: Collection[str]) -> int:
        """`abort` here and at all other routers of the cluster. Raises PeerLost where none was ended, and a router did
        not answer: the request may run there."""
        ended = self.abort(tenant, ids)
        if self.at_all_routers is None:
            return ended
        try:
            return ended + await self.at_all_routers(tenant, tuple(ids))
        except PeerLost:
            if ended:
                return ended
            raise

    def cut(self) -> None:
        """End all running requests with UNAVAILABLE, at which clients resume them elsewhere."""
        for task in list(self._running):
            self._end(task, PeerLost("router: is stopped; call another"))

    def _end(self, task: asyncio.Task[Any], reason: DendroError) -> None:
        if task not in self._ended:
            self._ended[task] = reason
            task.cancel()

    async def idle(self, timeout_s: float) -> None:
        """Wait until no request runs, but no longer than `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    async def drain(self, drain_s: float) -> None:
        """Let running requests end; those that run after `drain_s` are cut."""
        await self.idle(drain_s)
        self.cut()
        await self.idle(CUT_S)
