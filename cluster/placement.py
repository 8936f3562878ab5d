"""Where texts can be opened: leases from Ray Serve's replicas, or the engines of this process.

With app.py, the only module that knows Serve's interfaces. Serve chooses the replica, counts the lease as an ongoing
request for as long as it lives, and hears of no round.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

from dendro.calls import DrafterPeer, VerifierPeer
from dendro.errors import Overloaded, PeerLost
from dendro.state import StateStore
from dendro.text import Text

from cluster.checkpoints import ClusterFacts
from cluster.config import Config
from cluster.handles import (
    DRAFTER,
    PATIENCE_S,
    VERIFIER,
    Company,
    DrafterHandle,
    FarDrafter,
    FarVerifier,
    Leased,
    NoDrafter,
    Pace,
    Peer,
    PeerStream,
    Pool,
    Streams,
    VerifierHandle,
)

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("dendro.placement")

LEASE_S = 10.0
"""How long Serve may take to find a replica with room."""

P = TypeVar("P", bound=Peer)


class Engine(Peer, Protocol):
    """An engine of this process has a life of its own, too."""

    def start(self) -> Awaitable[None] | None: ...
    def stop(self) -> Awaitable[None] | None:
        """Ends the work at hand; those who still wait are told so."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters and gauges by name."""
        ...

    def fault(self) -> str:
        """Why it can serve nothing now, such as a step that does not come back; empty where it is well."""
        ...


class DrafterEngine(DrafterPeer, Engine, Protocol):
    """A drafter of this process."""


class VerifierEngine(VerifierPeer, Engine, Protocol):
    """A verifier of this process."""


async def start_engine(engine: Engine) -> None:
    """Start an engine, whether it does so at once or has to be awaited."""
    if (starting := engine.start()) is not None:
        await starting


async def stop_engine(engine: Engine) -> None:
    """Stop an engine; one that joins its thread is left to do so without holding the loop up."""
    if (stopping := await asyncio.to_thread(engine.stop)) is not None:
        await stopping


E = TypeVar("E", bound=Engine)


class NearPool(Generic[E]):
    """One engine of this process: leases are free, and there is always one. It starts with the first of them."""

    def __init__(self, engine: E) -> None:
        self._engine = engine
        self._starting: asyncio.Task[None] | None = None

    async def lease(self) -> Leased[E]:
        if self._starting is None:
            self._starting = asyncio.create_task(start_engine(self._engine))
        await asyncio.shield(self._starting)
        return Leased(self._engine, await self._engine.hello(), "")


class ServePool(Generic[P]):
    """The replicas of one deployment. Of one event loop: streams are bound to it."""

    def __init__(self, handle: DeploymentHandle, streams: Streams, far: Callable[[PeerStream], P]) -> None:
        self._lease = handle.options(stream=True).lease
        self._streams = streams
        self._far = far
        self._held: set[asyncio.Task[None]] = set()
        self.leases = 0

    async def lease(self) -> Leased[P]:
        """One streaming Serve call; its first item says where the replica is, and it ends when the lease does."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import BackPressureError, RayServeException

        answers: Any = self._lease.remote()
        try:
            async with asyncio.timeout(LEASE_S):
                said: dict[str, str] = await anext(aiter(answers))
                stream = await self._streams.to(said["address"])
        except BackPressureError as error:
            raise Overloaded(f"lease: {error}") from None
        except TimeoutError:
            answers.cancel()
            raise Overloaded(f"lease: no replica has room within {LEASE_S:g} s") from None
        except (PeerLost, RayError, RayServeException, StopAsyncIteration) as error:
            answers.cancel()
            raise PeerLost(f"lease: {error or type(error).__name__}") from None
        except asyncio.CancelledError:
            answers.cancel()
            raise
        self.leases += 1
        task = asyncio.create_task(self._hold(answers))
        self._held.add(task)
        task.add_done_callback(self._held.discard)
        return Leased(self._far(stream), stream.said, said["lease"], said["address"])

    async def _hold(self, answers: Any) -> None:
        """Keep the call until the replica ends it: Serve cancels one that nobody holds."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            async for _ in answers:
                pass
        except (RayError, RayServeException) as error:
            log.info("a leased replica is gone: %s", type(error).__name__)


class Places:
    """Hands out the handles of a configuration's targets and drafters, each from its pool."""

    def __init__(
        self,
        config: Config,
        targets: Mapping[str, Pool[VerifierPeer]],
        drafters: Mapping[str, Pool[DrafterPeer]],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`patience_s` is how long a request looks for a verifier that can go on with it."""
        self._config = config
        self._patience_s = patience_s
        self._targets = targets
        self._drafters = drafters
        self._facts: ClusterFacts | None = None
        self._paces: dict[tuple[str, str], Pace] = {}
        self._verifiers: WeakKeyDictionary[Text, VerifierHandle] = WeakKeyDictionary()

    def expect(self, facts: ClusterFacts) -> None:
        """From now on, use replicas of these checkpoints alone."""
        self._facts = facts

    def verifier(self, target: str, text: Text) -> VerifierHandle:
        """A verifier for a text. Its lease and its opening run in the background."""
        facts = self._facts.targets[target] if self._facts is not None else None
        handle = VerifierHandle(text, self._targets[target], self._pace(target), self._patience_s, facts=facts)
        self._verifiers[text] = handle
        return handle

    def drafter(
        self, target: str, text: Text, company: Company, deadline_s: float = math.inf, adaptive: bool = True
    ) -> DrafterHandle | NoDrafter:
        """A drafter for a text whose verifier was asked for before: the two have to fit. None is leased before a tree
        is wanted, and its company guesses. `deadline_s` is the request's own bound on the wait for a draft; the shorter
        one holds. `adaptive` rounds wait no longer than a late draft may cost, others up to the bound."""
        names = self._config.drafters_of(target)
        if not names:
            return NoDrafter()
        longest_s = min(self._config.router.draft_timeout_ms / 1e3, deadline_s)
        facts = self._facts
        return DrafterHandle(
            self._drafters[names[0]],
            self._pace(target),
            self._verifiers[text],
            longest_s=longest_s,
            company=company,
            adaptive=adaptive,
            facts=facts.drafters[names[0]] if facts is not None else None,
            vocabulary=facts.targets[target].vocabulary if facts is not None else 0,
        )

    def _pace(self, target: str) -> Pace:
        drafter = next(iter(self._config.drafters_of(target)), "")
        return self._paces.setdefault((target, drafter), Pace())


class ServePlaces(Places):
    """Places on Ray Serve. Of one event loop."""

    def __init__(
        self,
        config: Config,
        targets: Mapping[str, DeploymentHandle],
        drafters: Mapping[str, DeploymentHandle],
    ) -> None:
        self._verifier_streams, self._drafter_streams = Streams(VERIFIER), Streams(DRAFTER)
        super().__init__(
            config,
            {name: ServePool(handle, self._verifier_streams, FarVerifier) for name, handle in targets.items()},
            {name: ServePool(handle, self._drafter_streams, FarDrafter) for name, handle in drafters.items()},
        )


class LocalPlaces(Places):
    """The engines in this process: no Ray, no sockets."""

    def __init__(
        self, config: Config, targets: Mapping[str, VerifierEngine], drafters: Mapping[str, DrafterEngine]
    ) -> None:
        self.engines: list[Engine] = [*targets.values(), *drafters.values()]
        super().__init__(
            config,
            {name: NearPool(engine) for name, engine in targets.items()},
            {name: NearPool(engine) for name, engine in drafters.items()},
        )

    @classmethod
    def load(cls, config: Config, states: StateStore) -> Self:
        """Load every checkpoint of a configuration; takes seconds. They start with their first lease."""
        from cluster.app import load_drafter, load_verifier

        return cls(
            config,
            {name: load_verifier(name, target, states) for name, target in config.targets.items()},
            {name: load_drafter(name, drafter, states) for name, drafter in config.drafters.items()},
        )

    async def close(self) -> None:
        """Stop the engines, and wait for the work they are at."""
        await asyncio.gather(*map(stop_engine, self.engines))
