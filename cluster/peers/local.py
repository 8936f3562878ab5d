"""Peers in this process: no Ray, no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Generic, Self, TypeVar

from dendro.calls import Deliver, DraftCall
from dendro.engine import Engine, LocalDrafter, LocalVerifier
from dendro.order import Missed
from dendro.state import StateStore

from cluster.config import Config
from cluster.peers.opening import Leased
from cluster.peers.pools import Peers

E = TypeVar("E", bound=Engine)


class LocalPool(Generic[E]):
    """One engine of this process, which can always be leased."""

    def __init__(self, engine: E) -> None:
        self._engine = engine

    async def lease(self) -> Leased[E]:
        return Leased(self._engine, await self._engine.hello(), "")


class LocalLinks:
    """Ways from verifiers to drafters of the same process: from thread to thread, without an event loop."""

    def __init__(self, drafters: Mapping[str, LocalDrafter]) -> None:
        self._drafters = drafters

    def draft(self, drafter: str, call: DraftCall, deliver: Deliver) -> None:
        if (engine := self._drafters.get(drafter)) is None:
            deliver(Missed.UNLINKED)
        else:
            engine.draft_for(call, deliver)


class LocalPeers(Peers):
    """Peers that are engines of this process: no Ray, no sockets."""

    def __init__(
        self, config: Config, targets: Mapping[str, LocalVerifier], drafters: Mapping[str, LocalDrafter]
    ) -> None:
        self.engines: list[Engine] = [*targets.values(), *drafters.values()]
        super().__init__(
            config,
            {name: LocalPool(engine) for name, engine in targets.items()},
            {name: LocalPool(engine) for name, engine in drafters.items()},
        )

    @classmethod
    def load(cls, config: Config, states: StateStore) -> Self:
        """Load every checkpoint of a configuration; takes seconds. `start` precedes the first request."""
        from cluster.engines import load_drafter, load_verifier

        limits = config.structures.limits
        targets = {name: load_verifier(name, target, states, limits) for name, target in config.targets.items()}
        drafters = {
            name: load_drafter(name, drafter, states, config.targets, limits)
            for name, drafter in config.drafters.items()
        }
        for target in targets.values():
            target.link(LocalLinks(drafters))
        return cls(config, targets, drafters)

    async def start(self) -> None:
        """Start the engines."""
        await asyncio.gather(*(engine.start() for engine in self.engines))

    async def close(self) -> None:
        """Stop the engines, and wait for their work in progress."""
        await asyncio.gather(*(engine.stop() for engine in self.engines))
