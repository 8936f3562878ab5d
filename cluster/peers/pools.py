"""Makes the handles of peers, and leases replicas of Ray Serve, or engines of this process, for them.

Only this module, app.py and deploy.py use Serve's interfaces. Serve chooses the replica and counts a lease as one
ongoing request; rounds do not pass through it. Engines of this process need neither Ray nor sockets.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

from dendro.calls import Deliver, DraftCall, DrafterPeer, Peer, VerifierPeer
from dendro.clock import Clock
from dendro.engine import Engine, LocalDrafter, LocalVerifier
from dendro.errors import Overloaded, PeerLost, one_line
from dendro.order import Missed
from dendro.state import StateStore
from dendro.tasks import BackgroundTasks
from dendro.text import Text

from cluster.checkpoints import ClusterFacts
from cluster.config import Config
from cluster.peers.drafter import DrafterHandle, DrafterHandles, SpeculationGate
from cluster.peers.opening import Leased, Pace, Pool
from cluster.peers.stream import DRAFTER, VERIFIER, PeerStream, RemoteDrafter, RemoteVerifier, Streams
from cluster.peers.verifier import PATIENCE_S, STEP_S, STEPS, VerifierHandle

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


log = logging.getLogger("dendro.peers")

LEASE_S = 10.0
"""Seconds that Serve may take to find a replica with room."""
MOST_HELD = 32
"""Leases that one request holds at most at replicas that it cannot reach: each takes a place there."""
UNREACHED_S = 30.0
"""Seconds for which a replica that could not be connected is avoided while another one is."""
PROBE_S = 3.0
"""Seconds that a replica may take to answer a check of its pool."""
REPLICA_POLL_S = 0.5
"""Seconds of pause after a call that found no replica."""

P = TypeVar("P", bound=Peer)
E = TypeVar("E", bound=Engine)


class ServePool(Generic[P]):
    """The replicas of one deployment. Not thread-safe: its streams are bound to one event loop."""

    def __init__(
        self,
        handle: DeploymentHandle[object],
        streams: Streams,
        far: Callable[[PeerStream], P],
        may_be_empty: bool = False,
    ) -> None:
        """may_be_empty: a lease waits for a replica while there is none"""
        self._handle = handle
        self._may_be_empty = may_be_empty
        self._lease = handle.options(stream=True).lease
        self._streams = streams
        self._far = far
        self._held = BackgroundTasks()
        self._reached: set[str] = set()  # addresses of the replicas that a stream was connected to
        self._unreached: dict[str, float] = {}  # loop time of the next try to connect, by the replica's address
        self.leases = 0

    async def fault(self) -> str:
        """Reason why the pool has no replica now; empty where it has one. Takes PROBE_S at most.

        A stream to a replica shows that it is there. Without one, Serve is asked for a replica, to which a stream is
        connected: later checks need no call of Serve, which lets calls wait while all replicas are full.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        self._forget_lost()
        if self._reached:
            return ""
        answer: Any = self._handle.addresses.remote()
        try:
            async with asyncio.timeout(PROBE_S):
                address = (await answer)["calls"]
                await self._streams.to(address)
        except TimeoutError:
            answer.cancel()
            return f"no replica answers within {PROBE_S:g} s"
        except (PeerLost, RayError, RayServeException) as error:
            return f"no replica answers: {one_line(str(error)) or type(error).__name__}"
        self._reached.add(address)
        return ""

    def _forget_lost(self) -> None:
        """Drop the addresses of replicas whose stream was lost: their successors have other addresses."""
        self._reached = {address for address in self._reached if self._streams.alive(address)}

    async def wait_for_replica(self) -> None:
        """Wait until a replica answers, however long that takes."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        while True:
            try:
                await self._handle.stats.remote()
                return
            except (RayError, RayServeException) as error:
                log.info("no replica answers yet: %s", type(error).__name__)
                await asyncio.sleep(REPLICA_POLL_S)

    async def _has_replica(self) -> bool:
        """Whether a replica runs, however full it is: a call of all replicas does not wait for room. Takes PROBE_S at
        most."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        self._forget_lost()
        if self._reached:
            return True
        try:
            answers: list[object] = await self._handle.broadcast("addresses").results_async(
                timeout_s=PROBE_S, return_exceptions=True
            )
        except (TimeoutError, RayError, RayServeException):
            return False
        return not all(isinstance(answer, BaseException) for answer in answers)

    async def lease(self) -> Leased[P]:
        """Lease a replica. Raises Overloaded where none has room, and PeerLost where none runs or the one that Serve
        chose does not answer. In a pool that may be empty, waits for a replica."""
        while True:
            try:
                return await self._lease_within()
            except TimeoutError:
                if await self._has_replica():
                    raise Overloaded(f"lease: no replica has room within {LEASE_S:g} s") from None
                if not self._may_be_empty:
                    raise PeerLost("lease: no replica runs; one may be loading") from None

    async def _lease_within(self) -> Leased[P]:
        """Lease a replica by streaming Serve calls. A call's first item has the replica's address and the lease's
        token; the call ends with the lease. Raises TimeoutError after LEASE_S, Overloaded or PeerLost.

        A lease at a replica that cannot be reached is held until another is taken, for Serve would grant it again
        where a replica without leases seems free.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import BackPressureError, RayServeException

        held: list[Any] = []
        try:
            async with asyncio.timeout(LEASE_S):
                while True:
                    answers = self._lease.remote()
                    held.append(answers)
                    granted: dict[str, str] = await anext(aiter(answers))
                    if (stream := await self._reach(granted["address"])) is not None:
                        break
                    if len(held) == MOST_HELD:
                        raise PeerLost(f"{granted['address']} cannot be reached, and no other replica has room")
        except BackPressureError as error:
            raise Overloaded(f"lease: {error}") from None
        except (PeerLost, RayError, RayServeException, StopAsyncIteration) as error:
            raise PeerLost(f"lease: {error or type(error).__name__}") from None
        else:
            held.remove(answers)
        finally:
            for each in held:
                each.cancel()
        self.leases += 1
        self._forget_lost()
        self._reached.add(granted["address"])
        self._held.start(self._hold(answers))
        return Leased(self._far(stream), stream.hello, granted["lease"], granted["address"])

    async def _reach(self, address: str) -> PeerStream | None:
        """The stream to a replica; None where it cannot be connected, or could not within the last UNREACHED_S, while
        another replica is. Raises PeerLost where none is."""
        loop = asyncio.get_running_loop()
        self._forget_lost()
        self._unreached = {each: until for each, until in self._unreached.items() if loop.time() < until}
        if self._reached and address in self._unreached and not self._streams.alive(address):
            return None
        try:
            return await self._streams.to(address)
        except PeerLost:
            self._unreached[address] = loop.time() + UNREACHED_S
            if not self._reached - {address}:
                raise
            return None

    async def _hold(self, answers: Any) -> None:
        """Read the call until the replica ends it: Serve cancels a call without a reference."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            async for _ in answers:
                pass
        except (RayError, RayServeException) as error:
            log.info("a leased replica is gone: %s", type(error).__name__)


class Peers:
    """Makes handles of a configuration's targets and drafters, each from its pool."""

    def __init__(
        self,
        config: Config,
        targets: Mapping[str, Pool[VerifierPeer]],
        drafters: Mapping[str, Pool[DrafterPeer]],
        patience_s: float = PATIENCE_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """patience_s: PATIENCE_S, or less; at most half of the request's time limit is used"""
        self._clock = clock
        self._config = config
        self._patience_s = min(patience_s, config.router.request_timeout_s / 2)
        self._targets = targets
        self._drafters = drafters
        self._facts: ClusterFacts | None = None
        self._paces = {target: Pace() for target in config.targets}
        self._verifiers: WeakKeyDictionary[Text, VerifierHandle] = WeakKeyDictionary()

    def expect(self, facts: ClusterFacts) -> None:
        """Use only replicas of these checkpoints from now on."""
        self._facts = facts

    def verifier(
        self, target: str, text: Text, beside: Text | None = None, plain_first: bool = False
    ) -> VerifierHandle:
        """Make the handle of a text's verifier. Lease and opening run in the background. beside, plain_first: see
        `PeersPort.verifier`"""
        facts = self._facts.targets[target] if self._facts is not None else None
        handle = VerifierHandle(
            text,
            self._targets[target],
            self._paces[target],
            self._patience_s,
            step_s=max(STEP_S, STEPS * self._config.targets[target].longest_step_s),
            facts=facts,
            clock=self._clock,
            beside=self._verifiers.get(beside) if beside is not None else None,
            plain_first=plain_first,
        )
        self._verifiers[text] = handle
        return handle

    def drafters(
        self, target: str, text: Text, gate: SpeculationGate, deadline_s: float = math.inf, adaptive: bool = True
    ) -> DrafterHandles:
        """The drafters for a text, each leased when its first tree is requested and `gate.speculates`. `verifier` must
        have been called with the text before: trees keep that handle's limits. Arguments: those of
        `PeersPort.drafters`."""
        verifier, facts = self._verifiers[text], self._facts

        def make(name: str) -> DrafterHandle:
            return DrafterHandle(
                name,
                self._drafters[name],
                self._paces[target],
                verifier,
                gate,
                longest_s=min(self._config.router.draft_timeout_ms / 1e3, deadline_s),
                adaptive=adaptive,
                facts=facts.drafters[name] if facts is not None else None,
                clock=self._clock,
                orders=self._config.router.ordered_trees,
            )

        return DrafterHandles(make)


class ServePeers(Peers):
    """Peers on Ray Serve. Not thread-safe: bound to one event loop."""

    def __init__(
        self,
        config: Config,
        targets: Mapping[str, DeploymentHandle[object]],
        drafters: Mapping[str, DeploymentHandle[object]],
    ) -> None:
        certificates = config.tls.peers.files("router") if config.tls.peers is not None else None
        self._verifier_streams = Streams(VERIFIER, certificates)
        self._drafter_streams = Streams(DRAFTER, certificates)
        self._target_pools = {
            name: ServePool(
                handle, self._verifier_streams, RemoteVerifier, may_be_empty=not config.targets[name].least_replicas
            )
            for name, handle in targets.items()
        }
        super().__init__(
            config,
            self._target_pools,
            {name: ServePool(handle, self._drafter_streams, RemoteDrafter) for name, handle in drafters.items()},
        )

    @property
    def faults(self) -> dict[str, Callable[[], Awaitable[str]]]:
        """A check of each target's pool; that of one which may be empty finds no fault."""
        pools, targets = self._target_pools, self._config.targets.items()
        return {name: pools[name].fault if target.least_replicas else _no_fault for name, target in targets}

    async def wait_for_targets(self) -> None:
        """Wait until every target has a replica, except those whose pool may be empty."""
        for name, target in self._config.targets.items():
            if target.least_replicas:
                await self._target_pools[name].wait_for_replica()


async def _no_fault() -> str:
    return ""


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
