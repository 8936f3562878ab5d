"""What the router needs of its peers, as Protocols."""

from __future__ import annotations

import math
from typing import Protocol

from dendro.calls import Hello, Opened
from dendro.text import Text

from cluster.checkpoints import ClusterFacts
from cluster.policies import RunningRequest
from cluster.router.rounds import Drafter, Verifier


class HandlePort(Protocol):
    """What both handles have besides their work."""

    @property
    def opened(self) -> Opened | None:
        """What opening took; None as long as the peer has not said."""
        ...

    async def close(self, text: Text) -> None:
        """Give the lease back, with the text so that the last state can be saved. Never raises."""
        ...


class DrafterPort(Drafter, HandlePort, Protocol):
    """A drafter, leased for one request when it first wants a tree."""


class VerifierPort(Verifier, HandlePort, Protocol):
    """A verifier, leased for one request; `moves` counts how often it had to be another one, `hello` is what it said
    of itself when it was leased."""

    moves: int
    hello: Hello | None

    async def meet(self) -> Hello:
        """The hello of the first verifier that is leased. Raises PeerLost or Overloaded where there is none."""
        ...


class PeersPort(Protocol):
    """Where texts can be opened. Taking a handle waits for nothing; a verifier's sends the text at once, a drafter's
    when a tree is wanted. `deadline_s` is the request's own bound on the wait for a draft; the shorter one holds.
    `adaptive` rounds wait no longer than a late draft may cost, others up to the bound."""

    def drafter(
        self, target: str, text: Text, gate: RunningRequest, deadline_s: float = math.inf, adaptive: bool = True
    ) -> DrafterPort: ...
    def verifier(self, target: str, text: Text) -> VerifierPort: ...

    def expect(self, facts: ClusterFacts) -> None:
        """From now on, use replicas of these checkpoints alone."""
        ...
