"""A constant shape: `off`, a shape that the client fixed, or a baseline."""

from __future__ import annotations

from dendro.shapes import TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.policies.offers import Offer


class Static:
    """Chooses the same shape every round."""

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape

    def choose(self, offer: Offer | None = None) -> TreeShape:
        return self.shape

    def learn(self, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        """Does nothing."""
