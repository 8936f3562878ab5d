"""Proposals for a round, available before its arm is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dendro.tree import DraftTree

from cluster.arms import Arm
from cluster.router.rounds import Policy

Offer = Callable[[], DraftTree]
"""Returns the proposers' tree for the coming round: rows with the chances that they are reached, or the root alone.
Takes some tenths of a millisecond, so policies that do not use it do not call it."""


class InformedPolicy(Policy, Protocol):
    """A policy whose choice may depend on the proposals for the round."""

    @property
    def stays_off(self) -> bool:
        """After a choice of `off`, whether the next choice is likely `off`, too."""
        ...

    def choose(self, offer: Offer | None = None) -> Arm: ...
