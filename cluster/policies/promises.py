"""What a round says of its arm: what its tree promised, as far as such promises come true.

    1 + min(r_k P, depth of the tree)    P = E[N - 1 | the tree], by its values
    r_k = (came_k + m r) / (promised_k + m)    r = (came + m) / (promised + m)    m = TRUSTED

Its mean is that of N, as r_k tends to what came over what was promised. But N hangs on luck besides: given the tree it
varies four times as much as P does from tree to tree (demo pair, temperature 1). So a few rounds tell arms apart that
many would not. (Rao and Blackwell's theorem, on a law that is learned.)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from dendro.shapes import TreeShape
from dendro.text import Verdict
from dendro.tree import DraftTree

TRUSTED = 50.0
"""What is believed of promises before any were kept, in promised tokens."""
REMEMBERED = 4096.0
"""Tokens, promised or come, after which all of them weigh half: drafters learn."""


@dataclass(slots=True)
class Trust:
    """How much of what trees promise comes true."""

    came: float = 0.0  # tokens besides the target's own
    promised: float = 0.0

    def learn(self, promised: float, came: int) -> None:
        if max(self.came, self.promised) >= REMEMBERED:
            self.came, self.promised = self.came / 2, self.promised / 2
        self.came += came
        self.promised += promised

    def share(self, before: float) -> float:
        """Tokens that come for each that is promised; `before` is what is believed without these."""
        return (self.came + TRUSTED * before) / (self.promised + TRUSTED)


@dataclass(slots=True)
class Promises:
    """Those of one (target, drafter) pair's trees, by kind: a class of temperatures, whose requests accept alike."""

    _trust: defaultdict[tuple[str, TreeShape | None], Trust] = field(default_factory=lambda: defaultdict(Trust))
    """By kind and arm; None: all arms together."""

    def worth(self, kind: str, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> float:
        """Tokens by which a round speaks for its arm.

        N itself where the tree promises nothing, where guesses of it were left out, and for trees of proposals alone,
        whose promises their policy knows.
        """
        promised = _promised(shape, tree, verdict)
        if promised is None:
            return verdict.length
        nothing = Trust()  # asking makes no entry: a shape that a client fixed is judged and not remembered
        together = self._trust.get((kind, None), nothing).share(1.0)
        share = self._trust.get((kind, shape), nothing).share(together)
        return 1 + min(promised * share, float(tree.depths.max()))

    def learn(self, kind: str, shape: TreeShape, tree: DraftTree, verdict: Verdict) -> None:
        """Hold a round's tree against what came of it."""
        promised = _promised(shape, tree, verdict)
        if promised is not None:
            for arm in (shape, None):
                self._trust[kind, arm].learn(promised, verdict.length - 1)


def _promised(shape: TreeShape, tree: DraftTree, verdict: Verdict) -> float | None:
    """What a round's tree promised of what was verified; None where nothing is known of that."""
    return tree.promised if shape.drafted and not verdict.trimmed else None
