"""Token ids of a drafter whose head has only some of its target's tokens (FR-Spec, d2t of EAGLE-3).

Inside the model the tokens of the head come first, in the order of their target ids. The target's other tokens follow
in the same order; they are read but never guessed. Texts, trees, masks and noise have target ids: plans are converted
where they enter the runner, and candidates where they leave it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from dendro.grammars import Bits
from dendro.tree import IntArray

from drafter_service.plan import Chains, DraftOutcome, DraftPlan, Level, Levels


class DraftIds:
    """Converts between target ids and the model's ids.

    N tokens are guessed, V are read. A model that guesses the target's tokens 2 and 5 of 6 has them as 0 and 1:

    >>> ids = DraftIds(np.array([2, 5]), size=6)
    >>> ids.inside(np.arange(6)).tolist()
    [2, 3, 0, 4, 5, 1]
    """

    def __init__(self, guessed: IntArray, size: int) -> None:
        """guessed [N]: target ids of the head's tokens, ascending   size: V"""
        self.guessed = guessed
        self.size = size
        others = np.setdiff1d(np.arange(size), guessed, assume_unique=True)
        self._inside = np.empty(size + 1, np.int64)  # the model's id of each target id
        self._inside[np.concatenate([guessed, others])] = np.arange(size)
        self._inside[size] = size  # all target ids from `size` on: past the model's embedding

    def below(self, vocabulary: int) -> IntArray:
        """Target ids of the guessed tokens that are below `vocabulary`; the model's ids of them are 0, 1, ..."""
        return self.guessed[: np.searchsorted(self.guessed, vocabulary)]

    def inside(self, tokens: IntArray) -> IntArray:
        """Convert target ids to the model's ids."""
        return self._inside[np.minimum(tokens, self.size)]

    def plan(self, plan: DraftPlan) -> DraftPlan:
        """Convert a plan to the model's ids."""
        return replace(plan, rows=self._rows(plan.rows), masks=[self._mask(mask) for mask in plan.masks])

    def _rows(self, rows: Chains | Level | Levels) -> Chains | Level | Levels:
        if isinstance(rows, Levels):
            return replace(rows, tokens=self.inside(np.array(rows.tokens)).tolist())
        return replace(rows, tokens=self.inside(rows.tokens))

    def _mask(self, mask: Bits | None) -> Bits | None:
        if mask is None:
            return None
        allowed = np.unpackbits(mask, count=self.size, bitorder="little")
        return np.packbits(allowed[self.guessed], bitorder="little")

    def outcome(self, outcome: DraftOutcome) -> DraftOutcome:
        """Convert an outcome to target ids."""
        return outcome._replace(candidates=self.guessed[outcome.candidates])
