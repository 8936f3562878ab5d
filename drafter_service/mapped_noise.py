"""Shared noise for a drafter whose token ids are not the target's: each drafter id gets the noise of a target id."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from dendro.tree import IntArray
from torch import Tensor
from tree_kernels.noise import NoiseRows


class MappedNoise:
    """Rows of noise by drafter id, each kept until its position is committed, like those of `NoiseRows`.

    An id that must not be guessed has minus infinity. Without `rows`, as at temperature 0, all other ids have zero.
    """

    def __init__(self, rows: NoiseRows | None, ids: IntArray) -> None:
        """rows: noise by target id   ids [drafter's vocabulary]: target id whose noise each drafter id gets; -1: never
        guessed

        Raises ValueError if no id may be guessed.
        """
        if not (ids >= 0).any():
            raise ValueError("no token of the drafter may be guessed")
        self._rows = rows
        self._ids = torch.from_numpy(ids.clip(0))
        self._masked = torch.from_numpy(ids < 0)
        self._mask = torch.zeros(len(ids)).masked_fill_(self._masked, -math.inf)
        self._made: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._made)

    def row(self, position: int) -> Tensor:
        """Noise [drafter's vocabulary] of the token at a position of the target's text. Must not be written to."""
        if self._rows is None:
            return self._mask
        if position not in self._made:
            row = self._rows.row(position)[self._ids]
            self._made[position] = row.masked_fill_(self._masked, -math.inf)
            self._rows.forget_before(position + 1)
        return self._made[position]

    def prepare(self, positions: Iterable[int]) -> None:
        """Compute the rows of these positions."""
        for position in positions:
            self.row(position)

    def forget_before(self, position: int) -> None:
        """Drop the rows of all positions below this one."""
        self._made = {kept: row for kept, row in self._made.items() if kept >= position}
