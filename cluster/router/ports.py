"""Ports through which the router calls its peers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from dendro.calls import Hello, Opened
from dendro.logprobs import EchoedLogprobs
from dendro.order import Order
from dendro.text import Text, Verdict

from cluster.arms import Arm
from cluster.checkpoints import ClusterFacts
from cluster.policies import RunningRequest
from cluster.router.rounds import Drafter, Verifier


class HandlePort(Protocol):
    """Common part of the handles of drafters and verifiers."""

    async def close(self, text: Text) -> None:
        """Called when the request ends. Releases the lease; the peer saves its state of `text`. Never raises."""
        ...


class DrafterPort(Drafter, HandlePort, Protocol):
    """A request's drafters, each leased when it is prepared or its first tree is requested."""

    @property
    def openings(self) -> Mapping[str, Opened]:
        """Tokens and time of the first opening at each drafter that has opened the text, by the drafter's name."""
        ...

    @property
    def fallbacks(self) -> Mapping[tuple[str, str], int]:
        """Rounds without the tree that was asked for, by drafter and reason."""
        ...

    def strike(self, arm: Arm) -> None:
        """Called after a round whose tree the verifier refused. After the third malformed tree of the arm's drafter,
        the request asks it for no more trees."""
        ...

    def order(self, text: Text, arm: Arm) -> Order | str:
        """Called with the arm of a later round before this round's call to the verifier. Returns the order of that
        round's tree, or why the tree must pass through the router."""
        ...

    def ordered(self, text: Text, arm: Arm, verdict: Verdict) -> None:
        """Called after a round whose tree was ordered. `text` has the verdict's tokens."""
        ...

    def prepare(self, text: Text, arm: Arm) -> None:
        """Called before a first round without a tree, if a later round will likely ask for one. Opens the text at the
        arm's drafter in the background, if the request may speculate."""
        ...


class VerifierPort(Verifier, HandlePort, Protocol):
    """A verifier, leased for one request."""

    moves: int  # number of replacements of the verifier
    reopened: int  # times that the text was opened again at the same verifier

    @property
    def hello(self) -> Hello:
        """The hello of the leased replica; known once `first_hello` has returned."""
        ...

    @property
    def opened(self) -> Opened | None:
        """Tokens and time of the first opening; None until a verifier has opened the text."""
        ...

    async def prompt_logprobs(self) -> EchoedLogprobs:
        """Wait until the text is open. Returns the log-probabilities of its tokens from `Text.echo_from` on. Raises the
        error that ended the opening."""
        ...

    async def first_hello(self) -> Hello:
        """Wait for the first leased verifier. Returns its hello. Raises PeerLost or Overloaded if none is leased."""
        ...


class PeersPort(Protocol):
    """Makes handles of a request's peers, without waiting."""

    def drafters(
        self, target: str, text: Text, gate: RunningRequest, deadline_s: float = math.inf, adaptive: bool = True
    ) -> DrafterPort:
        """Called once per request, after `verifier`. Returns a handle that sends the text when a tree is first
        requested, which is after `VerifierPort.first_hello` has returned.

        deadline_s: the request's limit on the wait for a draft; it can only shorten the configured one
        adaptive: True if the wait is also bounded by usual times of drafts and rounds (`Pace.deadline_s`)
        """
        ...

    def verifier(self, target: str, text: Text, beside: Text | None = None, plain_first: bool = False) -> VerifierPort:
        """Called once per request. Returns a handle that sends the text at once.

        beside: a text with the same prompt that has a verifier; this text is opened at that replica, under the same
        lease, once that one is open   plain_first: True if the first round has no tree, so that the verifier may verify
        the root together with the prompt
        """
        ...

    def expect(self, facts: ClusterFacts) -> None:
        """Called once, before any handle is made. Only replicas of these checkpoints are used from then on."""
        ...
