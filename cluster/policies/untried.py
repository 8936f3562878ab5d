"""Predicted tokens of arms that were not played yet, for texts with several drafters. So a drafter is judged by a few
rounds, and not each of its shapes by rounds of its own.

A drafter's trees report its ranks of the text's tokens, which determine what any of its static trees would have emitted
(`Prior.lengths_of`). A beam or dynamic tree, whose form depends on the values of guesses, counts as one round of HOPED
tokens more than the best arm of its drafter: it is played where that would pay, and then judged by its own rounds.

Where a target has one drafter, every arm is played instead: there are fewer of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dendro.text import Verdict
from dendro.tree import DraftTree

from cluster.arms import Arm, drafters_of
from cluster.policies.costs import EmittedLength
from cluster.policies.prior import Prior
from cluster.policies.replay import replayed

Lengths = dict[Arm, EmittedLength]

HOPED = 1.0
MOST_RANKED = 64.0
"""Ranked rounds of a drafter after which its arms are judged by their own rounds alone."""


class UntriedArms:
    """Of one request. Predicts again whenever a drafter's ranked rounds have doubled, up to MOST_RANKED."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = {
            drafter: [arm for arm in arms if arm.drafted and arm.maker == drafter] for drafter in drafters_of(arms)
        }
        self._notes = Prior()
        self._played: Counter[Arm] | None = None  # rounds of the arms that were unknown at first
        self._due = dict.fromkeys(self._arms, 1.0)  # by drafter: ranked rounds at which to predict next

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict, lengths: Lengths) -> None:
        """Predict the lengths of a drafter's unknown arms by the ranks that come with its tree, which are those of the
        text before this round. Called before the round is added to `lengths`, which this changes."""
        if self._played is None:
            self._played = Counter({each: 0 for each, length in lengths.items() if each.drafted and not length.rounds})
        self._notes.learn(arm, tree, verdict, None)
        ranks = self._notes.ranks.get(arm.maker)
        if ranks is not None and self._due[arm.maker] <= ranks[0].sum() <= MOST_RANKED:
            self._due[arm.maker] = 2 * float(ranks[0].sum())
            self._predict(arm.maker, lengths, self._played)
        if arm in self._played:
            self._played[arm] += 1

    def _predict(self, drafter: str, lengths: Lengths, played: Counter[Arm]) -> None:
        unknown = [arm for arm in self._arms[drafter] if arm in played]
        found = self._notes.lengths_of([arm for arm in unknown if replayed(arm.shape)])
        for arm, length in found.items():
            if played[arm] < length.rounds:
                lengths[arm] = length
        best = max((lengths[arm].mean for arm in self._arms[drafter] if lengths[arm].rounds), default=1.0)
        for arm in unknown:
            if arm not in found and not played[arm]:
                lengths[arm] = EmittedLength(min(best + HOPED, arm.depth + 1), 1.0)
