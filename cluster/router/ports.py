"""What the router calls of its peers, as Protocols."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from dendro.calls import Hello, Opened
from dendro.logprobs import EchoedLogprobs
from dendro.text import Text

from cluster.arms import Arm
from cluster.checkpoints import ClusterFacts
from cluster.policies import RunningRequest
from cluster.router.rounds import Drafter, Verifier


class HandlePort(Protocol):
    """What the handles of drafters and verifiers have in common."""

    async def close(self, text: Text) -> None:
        """Release the lease; the peer saves its state of `text`. Never raises."""
        ...


class DrafterPort(Drafter, HandlePort, Protocol):
    """A request's drafters, each leased when it is prepared or its first tree is requested."""

    @property
    def openings(self) -> Mapping[str, Opened]:
        """Tokens and time of the first opening at each drafter that has opened the text, by its name."""
        ...

    def strike(self, arm: Arm) -> None:
        """Count a tree of this arm that the verifier refused. After some of them its drafter is asked for no more."""
        ...

    async def prepare(self, text: Text, arm: Arm) -> None:
        """Open the text at the arm's drafter in the background, where the request may speculate: a later round will
        likely ask for its tree. Returns when the opening has begun."""
        ...


class VerifierPort(Verifier, HandlePort, Protocol):
    """A verifier, leased for one request. `moves` counts its replacements; `hello` is that of the leased replica, None
    until there is one."""

    moves: int
    hello: Hello | None

    @property
    def opened(self) -> Opened | None:
        """Tokens and time of the first opening; None until a verifier has opened the text."""
        ...

    async def prompt_logprobs(self) -> EchoedLogprobs:
        """Wait until the text is open; the log-probabilities of its tokens from `Text.echo_from` on. Raises what ended
        the opening."""
        ...

    async def first_hello(self) -> Hello:
        """Wait for the first leased verifier's hello. Raises PeerLost or Overloaded where none is leased."""
        ...


class PeersPort(Protocol):
    """Makes handles, without waiting. A verifier's sends the text at once, a drafter's when a tree is first requested.
    `deadline_s` is the request's limit on the wait for a draft; it can only shorten the configured one. `adaptive`: the
    wait is also bounded by what drafts and rounds usually take (`Pace.deadline_s`). `beside`: a text that begins alike
    and has a verifier; this one is opened at the same replica, under the same lease, once that one is open.
    `plain_first`: the first round will have no tree; the verifier may verify the root with the text."""

    def drafters(
        self, target: str, text: Text, gate: RunningRequest, deadline_s: float = math.inf, adaptive: bool = True
    ) -> DrafterPort: ...
    def verifier(
        self, target: str, text: Text, beside: Text | None = None, plain_first: bool = False
    ) -> VerifierPort: ...

    def expect(self, facts: ClusterFacts) -> None:
        """From now on, use only replicas of these checkpoints."""
        ...
