"""The token ids of a drafter whose head has some of its target's tokens (FR-Spec, d2t of EAGLE-3).

Inside its model these are the first ids, in the order of the target's; the target's other tokens follow, in that order
too, and are read but never guessed. All else, texts, trees, masks and noise, has the target's ids: plans are converted
where they enter the runner, and candidates where they leave it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from dendro.grammars import Bits
from dendro.tree import IntArray

from drafter_service.plan import Chains, DraftOutcome, DraftPlan, Level, Levels


class DraftIds:
    """Converts ids. N tokens that are guessed, V that are read."""

    def __init__(self, guessed: IntArray, size: int) -> None:
        """guessed: [N] ascending, the target's ids of the tokens that the head has   size: V"""
        self.guessed = guessed
        self.size = size
        others = np.setdiff1d(np.arange(size), guessed, assume_unique=True)
        self._inside = np.empty(size + 1, np.int64)  # the model's id of each of the target's
        self._inside[np.concatenate([guessed, others])] = np.arange(size)
        self._inside[size] = size  # past the embedding, as all of the target's ids from there on

    def below(self, vocabulary: int) -> IntArray:
        """The target's ids, below `vocabulary`, of tokens that are guessed; the model's own are 0, 1, ..."""
        return self.guessed[: np.searchsorted(self.guessed, vocabulary)]

    def inside(self, tokens: IntArray) -> IntArray:
        """The model's ids of any ids of the target."""
        return self._inside[np.minimum(tokens, self.size)]

    def plan(self, plan: DraftPlan) -> DraftPlan:
        """The plan in the model's ids."""
        return replace(plan, rows=self._rows(plan.rows), masks=[self._mask(mask) for mask in plan.masks])

    def _rows(self, rows: Chains | Level | Levels) -> Chains | Level | Levels:
        if isinstance(rows, Levels):
            return replace(rows, first=replace(rows.first, tokens=self.inside(rows.first.tokens)))
        return replace(rows, tokens=self.inside(rows.tokens))

    def _mask(self, mask: Bits | None) -> Bits | None:
        if mask is None:
            return None
        allowed = np.unpackbits(mask, count=self.size, bitorder="little")
        return np.packbits(allowed[self.guessed], bitorder="little")

    def outcome(self, outcome: DraftOutcome) -> DraftOutcome:
        """The outcome in the target's ids."""
        return replace(outcome, candidates=self.guessed[outcome.candidates])
