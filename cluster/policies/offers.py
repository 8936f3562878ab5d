"""Proposals that a policy may look at before it chooses a round's arm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.router.rounds import Policy

Offer = Callable[[float], DraftTree]
"""Returns the proposers' tree for the next round, with the chances that its rows are reached; the root alone if they
propose nothing whose first guess has the given chance. A call takes some tenths of a millisecond, and less where that
chance is not reached; a policy without arms of proposals makes none."""


class InformedPolicy(Policy, Protocol):
    """A policy that may look at the round's proposals before it chooses."""

    @property
    def next_arm(self) -> Arm | None:
        """Read after `choose`: the arm that the next choice likely is; None if that is open. The verifier may then
        begin the next round ahead of its call: with the root alone for `off`, with a tree that it asks the arm's
        drafter for if the arm is drafted."""
        ...

    def choose(self, offer: Offer | None = None) -> Arm:
        """Called once at the start of each round. Returns the round's arm. offer: None if the request has no
        proposers"""
        ...
