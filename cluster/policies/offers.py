"""Proposals that a policy may look at before it chooses a round's arm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.router.rounds import Policy

Offer = Callable[[float], DraftTree]
"""Takes the least chance of a first guess, in [0, 1]. Returns the tree for the next round of the proposer that promises
most, with the chances that its rows are reached; the root alone if no first guess has the least chance. A call takes
some tenths of a millisecond, less for the root alone. A policy without arms of proposals does not call it."""


class InformedPolicy(Policy, Protocol):
    """A policy that may look at the round's proposals before it chooses."""

    @property
    def next_arm(self) -> Arm | None:
        """Read after `choose`: the arm that will likely be chosen for the next round; None if the policy cannot tell.
        The verifier may then begin the next round before its call arrives: with the root alone for `off`, with a tree
        from the arm's drafter for a drafted arm."""
        ...

    def choose(self, offer: Offer | None = None) -> Arm:
        """Called once at the start of each round. Returns the round's arm. offer: None if the request has no
        proposers"""
        ...
