"""Proposers guess without a model, from earlier text. Proposals do not change which tokens are emitted."""

from __future__ import annotations

from cluster.proposers.lookup import Lookup
from cluster.proposers.suffix import Suffix

PROPOSERS = (Lookup.name, Suffix.name)

__all__ = ["PROPOSERS"]
