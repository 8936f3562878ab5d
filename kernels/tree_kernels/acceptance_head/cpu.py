"""Calls the compiled acceptance head. A call holds no interpreter lock and uses one thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tree_kernels.acceptance_head import shapes
from tree_kernels.acceptance_head.reference import HeadWeights
from tree_kernels.kernel_cache import load_kernels, why_missing
from tree_kernels.mamba_level.cpu import Product, Table

if TYPE_CHECKING:
    from tree_kernels.machine_code import Kernels

Ints = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float32]
MODULE = "tree_kernels.acceptance_head.loops"
LEAST_ROOM = 64
"""Rows for which memory is allocated at first."""


def why_not_compiled() -> str:
    """Reason why the acceptance head cannot be compiled here; empty if it can."""
    return why_missing(MODULE)


def head_kernels() -> Kernels:
    """The kernel `chances`, called with the address of its words. Raises NoKernelsError."""
    return load_kernels(MODULE)


class HeadCalls:
    """The prepared arguments of a head, for the rows of one model. Used by one thread."""

    def __init__(self, weights: HeadWeights, candidates: int) -> None:
        """candidates: K of `reference.py`"""
        width, blocks = len(weights.bias), weights.blocks
        self._table = Table(1, shapes.CALL_WORDS)
        self._products = Table(max(len(blocks), 1), 1)
        step = 4 * width
        made: dict[int, Product] = {}  # tied blocks are packed once
        for number, (weight, bias) in enumerate(blocks):
            product = made.setdefault(id(weight), Product(weight, bias))
            self._products.put_product(number, 0, product)
            step = product.step
        self._step = step
        self._address = self._table.address
        self.words = self._table.words[0]
        """The words of the next call, its arguments (`shapes.py`)."""
        for word, tensor in (
            (shapes.HIDDEN_SCALE, weights.hidden_scale),
            (shapes.TOKEN_SCALE, weights.token_scale),
            (shapes.NUMBERS, weights.numbers),
            (shapes.BIAS, weights.bias),
            (shapes.OUTPUT, weights.output),
            (shapes.OUTPUT_BIAS, weights.output_bias),
            (shapes.CALIBRATION, weights.calibration),
            (shapes.SPARE, torch.zeros(max(width, 2))),
        ):
            self._table.put(0, word, tensor.float().contiguous())
        self.words[shapes.BLOCKS], self.words[shapes.BLOCK_TABLE] = len(blocks), self._products.address
        self.words[shapes.CALIBRATED], self.words[shapes.CANDIDATES] = len(weights.calibration), candidates
        self.words[shapes.STEP] = step
        self._rows = self._numbers = 0
        self.reserve(LEAST_ROOM, 1)

    @property
    def address(self) -> int:
        """The address of the call's words."""
        return self._address

    def reserve(self, rows: int, width: int) -> None:
        """Make room for the depths of this many rows, and for `width` chances of each."""
        if rows > self._rows:
            self._rows = max(2 * self._rows, rows)
            self._depths = np.zeros(self._rows, np.int64)
            self._scratch = torch.empty(2, self._rows, self._step // 4)
            self.words[shapes.DEPTHS] = self._depths.ctypes.data
            self.words[shapes.X], self.words[shapes.SUMS] = (part.data_ptr() for part in self._scratch)
        if rows * width > self._numbers:
            self._numbers = max(2 * self._numbers, rows * width)
            self._chances = np.zeros(self._numbers, np.float32)
            self.words[shapes.CHANCES] = self._chances.ctypes.data

    def set(self, model: int, ranked: int, groups: Sequence[int], depths: Sequence[int]) -> None:
        """Set what the next call reads.

        model, ranked: addresses of the words of the model and of the ranking, which the caller keeps alive
        groups: number of rows of each group   depths: depth of each group's rows
        """
        self.words[shapes.MODEL], self.words[shapes.RANKED] = model, ranked
        first = 0
        for count, depth in zip(groups, depths, strict=True):
            self._depths[first : first + count] = depth
            first += count

    def run(self) -> None:
        """Compute the chances of the rows that were set. For several levels `tree_levels` calls the kernel itself."""
        head_kernels().functions["chances"](self.address)

    def results(self, rows: int, width: int) -> Chances:
        """A copy of the chances [rows, width]."""
        return self._chances[: rows * width].reshape(rows, width).copy()
