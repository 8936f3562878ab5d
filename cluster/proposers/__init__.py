"""Proposers guess without a model, from what was written before. What they propose changes no token."""

from __future__ import annotations

from cluster.proposers.lookup import Lookup
from cluster.proposers.suffix import Suffix

PROPOSERS = (Lookup.name, Suffix.name)

__all__ = ["PROPOSERS"]
