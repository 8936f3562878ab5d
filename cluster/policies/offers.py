"""What is proposed for a round before its shape is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dendro.shapes import TreeShape
from dendro.tree import DraftTree

from cluster.router.rounds import Policy

Offer = Callable[[], DraftTree]
"""Tells what is proposed for the coming round without a model: rows with the chances that they are reached, the root
alone where nothing is. It takes some tenths of a millisecond, so it is asked only by who wants to know."""


class InformedPolicy(Policy, Protocol):
    """A policy of the loop that may be told what is proposed."""

    def choose(self, offer: Offer | None = None) -> TreeShape: ...
