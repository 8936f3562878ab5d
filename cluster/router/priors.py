"""A router's priors: read when a kind of requests first comes, kept here, written behind the requests that end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial

from cluster.policies.experience import Experience
from cluster.policies.prior import Prior, PriorKey, PriorStore

KINDS = 512
"""Kinds that a router keeps in mind; the one that nobody asked for longest goes."""
WRITES = 8
"""Priors that are being written at once, each kind's once at a time; the others wait for their turn."""
WAIT_S = 0.01
"""How long the first request of a kind waits for its prior. One that comes later serves those after it."""


class Priors:
    """Of one event loop. No call raises, and none but a kind's first waits."""

    def __init__(self, store: PriorStore) -> None:
        self._store = store
        self._known: OrderedDict[PriorKey, Prior] = OrderedDict()
        self._reading: dict[PriorKey, asyncio.Task[None]] = {}
        self._writing: dict[PriorKey, asyncio.Task[bool]] = {}
        self._unwritten: dict[PriorKey, None] = {}  # kinds that are known better than the store knows them, in order

    async def of(self, key: PriorKey, experience: Experience) -> Prior:
        """What is known of a kind; not to be changed. Reads it where this router never met the kind. Its costs begin
        the `experience` of its tenant where that has none."""
        if key not in self._known:
            self._remember(key)
            self._reading[key] = asyncio.create_task(self._read(key, experience))
        task = self._reading.get(key)
        if task is not None:
            await asyncio.wait({task}, timeout=WAIT_S)
        prior = self._remember(key)
        experience.take(prior.costs)
        return prior

    def learn(self, key: PriorKey, notes: Prior, experience: Experience) -> None:
        """Make a request's notes, and what its tenant's rounds cost, part of its kind's prior; write it in the
        background."""
        prior = self._remember(key)
        prior.add(notes)
        prior.costs = experience.hints()
        self._unwritten[key] = None
        self._write()

    async def settled(self) -> None:
        """Until nothing is being read or written."""
        while tasks := {*self._reading.values(), *self._writing.values()}:
            await asyncio.wait(tasks)

    async def _read(self, key: PriorKey, experience: Experience) -> None:
        try:
            found = await self._store.load(key)
            if found is not None:
                prior = self._remember(key)
                found.add(prior)  # what ended here meanwhile is the newer
                prior.lengths, prior.ranks = found.lengths, found.ranks
                experience.take(found.costs)
                prior.costs = experience.hints()
        finally:
            del self._reading[key]
            self._write()

    def _write(self) -> None:
        for key in list(self._unwritten):
            if len(self._writing) >= WRITES:
                return
            if key in self._reading or key in self._writing:
                continue
            del self._unwritten[key]
            self._writing[key] = task = asyncio.create_task(self._store.save(key, self._known[key]))
            task.add_done_callback(partial(self._written, key))

    def _written(self, key: PriorKey, task: asyncio.Task[bool]) -> None:
        del self._writing[key]
        self._write()

    def _remember(self, key: PriorKey) -> Prior:
        prior = self._known.setdefault(key, Prior())
        self._known.move_to_end(key)
        while len(self._known) > KINDS:
            forgotten, _ = self._known.popitem(last=False)
            self._unwritten.pop(forgotten, None)
        return prior
