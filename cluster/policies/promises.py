"""Worth of a round in its arm's mean: the tokens that its tree promised, corrected by how such promises came true.

    1 + min(r_k P, depth of the tree)    P = E[N - 1 | the tree], by its values
    r_k = (came_k + m r) / (promised_k + m)    r = (came + m) / (promised + m)    m = TRUSTED

Its mean is that of N, since r_k tends to what came over what was promised. But its variance is smaller: given the tree,
N varies four times as much as P does between trees (demo pair, temperature 1). So fewer rounds are needed to
distinguish arms. (The Rao-Blackwell theorem, with a learned law.)
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm

TRUSTED = 50.0
"""Weight of the prior belief about promises, in promised tokens."""
REMEMBERED = 4096.0
"""Tokens, promised or come, at which all counts are halved, since drafters learn."""


@dataclass(slots=True)
class Trust:
    """The share of promised tokens that came."""

    came: float = 0.0  # tokens besides the target's own
    promised: float = 0.0

    def learn(self, promised: float, came: int) -> None:
        if max(self.came, self.promised) >= REMEMBERED:
            self.came, self.promised = self.came / 2, self.promised / 2
        self.came += came
        self.promised += promised

    def share(self, before: float) -> float:
        """Expected tokens per promised token; `before` is the prior belief."""
        return (self.came + TRUSTED * before) / (self.promised + TRUSTED)


@dataclass(slots=True)
class Promises:
    """Trust in the trees of one tenant's requests at a target, by kind, which is a temperature class, and arm."""

    _trust: defaultdict[tuple[str, Arm | str], Trust] = field(default_factory=lambda: defaultdict(Trust))
    """In place of an arm a drafter's name stands for all its arms together."""

    def worth(self, kind: str, arm: Arm, tree: DraftTree, verdict: Verdict) -> float:
        """Tokens for which a round counts in its arm's mean.

        N itself where the tree has no values, where guesses of it were left out, and for trees of proposals alone,
        whose promises the policy uses when it chooses.
        """
        promised = _promised(arm, tree, verdict)
        if promised is None:
            return verdict.length
        nothing = Trust()  # looking up makes no entry: shapes that clients fix are judged but not kept
        together = self._trust.get((kind, arm.maker), nothing).share(1.0)
        share = self._trust.get((kind, arm), nothing).share(together)
        return 1 + min(promised * share, tree.depth)

    def learn(self, kind: str, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        """Compare what a round's tree promised with the tokens that came."""
        promised = _promised(arm, tree, verdict)
        if promised is not None:
            for each in (arm, arm.maker):
                self._trust[kind, each].learn(promised, verdict.length - 1)


def _promised(arm: Arm, tree: DraftTree, verdict: Verdict) -> float | None:
    """Accepted tokens that a round's tree promised; None where its promise is unknown or not for what was verified."""
    return tree.promised if arm.drafted and not verdict.trimmed else None
