"""Threads of a process that compile structures, each beside a canary process, shared fairly among tenants."""

from __future__ import annotations

import atexit
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from dendro.daemon_threads import settle, start_thread
from dendro.errors import Overloaded
from dendro.structure_canary import Canary

COMPILED_AT_ONCE = 2
WAITING = 256
"""Most structures of all tenants that wait to be compiled."""
WAITING_OF_TENANT = 64
IDLE_S = 30.0
"""Seconds without work after which a thread and its canary end."""

Result = TypeVar("Result")


class CompileQueue:
    """Runs work in threads that have a canary each. A tenant has one thread at a time, and tenants take turns, so
    structures that compile for long only keep their own tenant's waiting."""

    def __init__(self, threads: int = COMPILED_AT_ONCE, waiting: int = WAITING, of_tenant: int = WAITING_OF_TENANT):
        self._threads, self._most, self._most_of_tenant = threads, waiting, of_tenant
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[Canary], Any]]]] = OrderedDict()
        self._running: set[str] = set()  # tenants whose work runs
        self._changed = threading.Condition()
        self._canaries: set[Canary] = set()  # one for each thread
        self._idle = 0

    def submit(self, tenant: str, work: Callable[[Canary], Result]) -> Future[Result]:
        """Run `work` when it is its tenant's turn. Raises Overloaded where too much waits."""
        future = Future[Result]()
        with self._changed:
            waiting = sum(map(len, self._waiting.values()))
            if waiting >= self._most or len(self._waiting.get(tenant, ())) >= self._most_of_tenant:
                raise Overloaded(f"structures: {waiting} wait to be compiled; try again later")
            self._waiting.setdefault(tenant, deque()).append((future, work))
            if self._idle <= waiting and len(self._canaries) < self._threads:  # a notified thread still counts as idle
                self._canaries.add(canary := Canary())
                start_thread("structure-compiler", partial(self._run, canary))
            self._changed.notify()
        return future

    def _next(self) -> tuple[str, Future[Any], Callable[[Canary], Any]] | None:
        for tenant, works in self._waiting.items():
            if tenant not in self._running:
                future, work = works.popleft()
                del self._waiting[tenant]
                if works:
                    self._waiting[tenant] = works  # goes behind the other tenants
                self._running.add(tenant)
                return tenant, future, work
        return None

    def _run(self, canary: Canary) -> None:
        while True:
            with self._changed:
                self._idle += 1
                found = self._changed.wait_for(self._next, IDLE_S)
                self._idle -= 1
                if found is None:
                    self._canaries.discard(canary)
                    break
            tenant, future, work = found
            settle(future, lambda work=work: work(canary))  # type: ignore[misc]
            del future, work, found
            with self._changed:
                self._running.discard(tenant)
                self._changed.notify_all()
        canary.stop()

    def kill(self) -> None:
        """Kill the processes, at the end of this one."""
        for canary in list(self._canaries):
            canary.kill()


QUEUE = CompileQueue()
"""The queue of this process, shared by its engines and routers."""
atexit.register(QUEUE.kill)
