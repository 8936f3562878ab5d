"""A router's priors: read at the first request of a kind, cached here, written in the background as requests end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from types import MappingProxyType

from cluster.drafter_figures import DrafterFigures, rank_counts
from cluster.policies.experience import Experience
from cluster.policies.prior import Prior, PriorKey, PriorStore, pair_prior

NO_CARDS: Mapping[str, DrafterFigures] = MappingProxyType({})
KINDS = 512
"""Kinds whose priors a router caches; beyond that the least recently used is dropped."""
PAIR_TENANTS = 32
"""Most recent tenants whose requests make a new tenant's prior."""
WRITES = 8
"""Most priors that are written to the store at once, at most one for each kind; further writes are queued."""
WAIT_S = 0.01
"""Most seconds that a request waits while its kind's prior is read. A prior that comes later serves later requests."""


class Priors:
    """A router's priors. Not thread-safe: bound to one event loop. No call raises; `of` waits at most WAIT_S, while a
    prior is read."""

    def __init__(self, store: PriorStore | None = None, cards: Mapping[str, DrafterFigures] = NO_CARDS) -> None:
        """store: None: priors are shared with no other router   cards: what the drafters' training measured, by
        drafter"""
        self._store = store
        self._figures = {name: rank_counts(card) for name, card in cards.items()}
        self._known: OrderedDict[PriorKey, Prior] = OrderedDict()
        self._noted: OrderedDict[PriorKey, Prior] = OrderedDict()  # by kind: the rounds of its requests at this router
        self._stored: dict[PriorKey, Prior] = {}  # priors of all tenants as read from the store
        self._outdated: set[PriorKey] = set()  # cached priors of all tenants that lack the last requests' rounds
        self._reading: dict[PriorKey, asyncio.Task[None]] = {}
        self._writing: dict[PriorKey, asyncio.Task[bool]] = {}
        self._unwritten: dict[PriorKey, None] = {}  # kinds with changes that are not in the store, in order

    async def of(self, key: PriorKey, experience: Experience) -> Prior:
        """The prior of a kind, read-only. Reads the store if this router has not cached the kind. `experience` takes
        the prior's costs for loads at which it has none."""
        if key not in self._known and key not in self._reading:  # a kind may be dropped while it is read
            self._remember(key)
            self._reading[key] = asyncio.create_task(self._read(key, experience))
        task = self._reading.get(key)
        if task is not None:
            await asyncio.wait({task}, timeout=WAIT_S)
        prior = self._remember(key)
        experience.take(prior.costs)
        return prior

    def learn(self, key: PriorKey, notes: Prior, experience: Experience) -> None:
        """Add the rounds of a request that has ended (`notes`) to the prior of its kind. Replace the prior's costs by
        those in `experience` and its gains by those of the target's trials. The prior and the one of all tenants are
        written in the background. A request without guesses changes no prior, unless a trial has ended since."""
        prior, gains = self._remember(key), experience.concurrency.gains()
        if not notes.guessed and gains == prior.gains:
            return
        prior.add(notes)
        self._note(key, notes)
        prior.measured(experience.hints(), gains)
        self._unwritten[key] = None
        if key not in self._reading:
            pair_key = _pair_key(key)
            self._remember(pair_key).measured(prior.costs, gains)
            self._outdated.add(pair_key)
            self._unwritten[pair_key] = None
        if self._store is not None:
            self._write(self._store)

    async def settled(self) -> None:
        """Wait until no read or write is in flight."""
        while tasks := {*self._reading.values(), *self._writing.values()}:
            await asyncio.wait(tasks)

    async def _read(self, key: PriorKey, experience: Experience) -> None:
        store, pair_key = self._store, _pair_key(key)
        try:
            found = await store.load(key) if store is not None else None
            if found is None:
                pair = self._up_to_date(pair_key) if pair_key in self._known else None
                if pair is None and store is not None and (pair := await store.load(pair_key)) is not None:
                    self._stored[pair_key] = pair
                if pair is None and (card := self._card(key)).guessed:
                    pair = card
                found = pair and pair.begun()
            if found is not None:
                prior = self._remember(key)
                found.add(prior)  # requests that ended here during the read are newer
                prior.replace_rounds(found)
                experience.take(found.costs)
                experience.concurrency.begin_trials(found.gains)
                prior.costs = experience.hints()
        finally:
            del self._reading[key]
            if store is not None:
                self._write(store)

    def _card(self, key: PriorKey) -> Prior:
        """The prior of a kind before any request, from its drafters' figures. Empty for LISTED_MODES: the figures were
        measured with the shared noise, which these modes do not have."""
        figures = {} if key.mode else self._figures
        return Prior(ranks={name: figures[name][key.temperature] for name in key.drafters if name in figures})

    def _write(self, store: PriorStore) -> None:
        for key in list(self._unwritten):
            if len(self._writing) >= WRITES:
                return
            if key in self._reading or key in self._writing:
                continue
            del self._unwritten[key]
            self._writing[key] = task = asyncio.create_task(store.save(key, self._up_to_date(key)))
            task.add_done_callback(partial(self._written, store, key))

    def _written(self, store: PriorStore, key: PriorKey, task: asyncio.Task[bool]) -> None:
        del self._writing[key]
        self._write(store)

    def _up_to_date(self, key: PriorKey) -> Prior:
        """A cached prior. That of all tenants is computed here, as most requests end without a need of it."""
        prior = self._known[key]
        if key in self._outdated:
            self._outdated.discard(key)
            prior.replace_rounds(pair_prior(self._tenants(key)))
        return prior

    def _remember(self, key: PriorKey) -> Prior:
        prior = self._known.setdefault(key, Prior())
        self._known.move_to_end(key)
        while len(self._known) > KINDS:
            forgotten, _ = self._known.popitem(last=False)
            self._unwritten.pop(forgotten, None)
            self._outdated.discard(forgotten)
        return prior

    def _note(self, key: PriorKey, notes: Prior) -> None:
        self._noted.setdefault(key, Prior()).add(notes)
        self._noted.move_to_end(key)
        if len(self._noted) > KINDS:
            self._noted.popitem(last=False)

    def _tenants(self, key: PriorKey) -> list[Prior]:
        """One prior for each of the PAIR_TENANTS last tenants with requests of this kind, from their rounds at this
        router; the store's prior of all tenants and the drafters' figures count as one more tenant each. The prior with
        which a tenant began is left out, since all tenants have it in common."""
        pair = _pair_key(key)
        same = (
            noted
            for other, noted in reversed(self._noted.items())
            if other.tenant and noted.guessed and _pair_key(other) == pair
        )
        stored = [self._stored[pair]] if pair in self._stored else []
        card = self._card(key)
        return [*islice(same, PAIR_TENANTS), *stored, *([card] if card.guessed else [])]


def _pair_key(key: PriorKey) -> PriorKey:
    """The kind of all tenants' requests together; no tenant's tag is empty."""
    return replace(key, tenant="")
