"""Cosines and sines of a rotary embedding, computed once for each position."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tree_kernels.taken_rows import take_rows
from tree_kernels.tree_attention import RowRotation

from verifier_service.models.scaled_rows import same_bits

MOST_POSITIONS = 1 << 15
"""Positions of a table; rows past them are computed anew."""
BLOCK = 64
"""Positions that are computed at once."""
NEAR = 8
"""Positions, across the end of the first block, whose rows must not depend on others in the call."""


class RotationTable:
    """The results of a module of transformers for single positions. Memory is taken as texts grow."""

    def __init__(self, rotate: nn.Module, x: Tensor, positions: int) -> None:
        """x [1, rows, D]: hidden rows, of which the module reads dtype and device   positions: that the model has"""
        self._rotate, self._like = rotate, x[:, :1]
        self.most = min(positions, MOST_POSITIONS) // BLOCK * BLOCK
        cos, _ = rotate(self._like, torch.zeros(1, 1, dtype=torch.int64))
        self._cos, self._sin = (torch.empty(self.most, cos.shape[-1], dtype=cos.dtype) for _ in range(2))
        self._filled = 0

    @property
    def fits(self) -> bool:
        """True if the module's rows are the table's: none depends on other positions of the call."""
        if self.most <= BLOCK:
            return False
        near = torch.arange(BLOCK - NEAR // 2, BLOCK + NEAR // 2)
        alone, found = self._rotate(self._like, near[None]), self.at(near, int(near[-1]))
        beside = [self._rotate(self._like, torch.cat([near, torch.tensor([far])])[None]) for far in (0, self.most - 1)]
        return all(
            same_bits(row[0], own) and all(same_bits(row, each[part][:, :NEAR]) for each in beside)
            for part, (row, own) in enumerate(zip(alone, (found.cos, found.sin), strict=True))
        )

    def at(self, positions: Tensor, furthest: int) -> RowRotation:
        """The rows [rows] of positions below `most`. furthest: the greatest of them"""
        while self._filled <= furthest:
            block = slice(self._filled, self._filled + BLOCK)
            cos, sin = self._rotate(self._like, torch.arange(block.start, block.stop)[None])
            self._cos[block], self._sin[block] = cos[0], sin[0]
            self._filled = block.stop
        cos, sin = (each.new_empty(len(positions), each.shape[1]) for each in (self._cos, self._sin))
        take_rows(positions, (self._cos, cos), (self._sin, sin))
        return RowRotation(cos, sin)
