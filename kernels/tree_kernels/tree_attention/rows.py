"""The pool, the rows of a step and the keys that they attend to: what all forms of the attention share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PAGE = 64
"""Positions of a page; the far keys of a page are multiplied at once."""

NEAR_CHOICES = (16, 32, 64)

LOG2_E = 1 / math.log(2)
"""Scores are in units of log 2: exp2 is ten times faster than exp where its result is zero or close to it."""


def near_window(max_depth: int) -> int:
    """The smallest block of near positions that holds a tree of this depth."""
    for near in NEAR_CHOICES:
        if max_depth <= near:
            return near
    raise ValueError(f"max_depth: at most {NEAR_CHOICES[-1]}, got {max_depth}")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in large pages, which numpy asks for and torch does not."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The numbers in one slot of a layer: a key, a value and, in float32, at least one 1, up to a multiple of 16
    numbers; and the order of slots in memory."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32  # narrower: for tensor cores and compiled kernels, which widen what they read
    by_head: bool = False  # the slots of one kv head are neighbours; else the kv heads of one slot are

    @property
    def width(self) -> int:
        ones = int(self.dtype == torch.float32)
        return -(-(self.key_dim + self.value_dim + ones) // 16) * 16

    @property
    def token_bytes(self) -> int:
        """Bytes of one slot."""
        return self.kv_heads * self.width * self.dtype.itemsize

    def pool(self, slots: int, device: torch.device) -> Tensor:
        """Allocate pages [slots, kv_heads, width] of zeros, as one of `pools`."""
        return self.pools(1, slots, device)[0]

    def pools(self, layers: int, slots: int, device: torch.device) -> Tensor:
        """Allocate pages [layers, slots, kv_heads, width] of zeros. On a CPU they take no memory until they are
        written, and lie in large pages of the system if it has them."""
        if not self.by_head:
            return _zeros((layers, slots, self.kv_heads, self.width), self.dtype, device)
        return _zeros((layers, self.kv_heads, slots, self.width), self.dtype, device).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class FarRows:
    """Rows [start, stop) of a step, all of one text, and its pages that are far for any of them, in order."""

    start: int
    stop: int
    pages: tuple[int, ...]
    first: int = 0  # index in the text of the first of these pages; earlier ones are outside every row's window


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of a step: their positions, and the keys that they attend to. All layers share it.

    positions [rows] int64, in any order
    slots     [rows] int64   where each row's own key and value are written
    near      [rows, 2 * near] int64   slots of the keys at positions near * (p // near - 1) + column; 0: no key
    far       each row that has far keys is in exactly one of these
    padded    rows of the step's matrices: at least the number of rows
    """

    positions: Tensor
    slots: Tensor
    near: Tensor
    far: Sequence[FarRows]
    padded: int


@dataclass(frozen=True, slots=True)
class RowRotation:
    """A step's rotary embedding: cosines and sines [padded, rotated] by which leading numbers of queries and keys turn.

    x * cos + turned(x) * sin, where x's second half turned is its first, and its first half the second, negated; each
    product and sum is rounded to the dtype of x.
    """

    cos: Tensor
    sin: Tensor

    def fits(self, rows: int, dtype: torch.dtype, key_dim: int) -> bool:
        """True if it turns `rows` rows of this dtype, whose keys have `key_dim` numbers."""
        cos, sin = self.cos, self.sin
        turned = cos.shape[1]
        return (
            cos.dtype == sin.dtype == dtype
            and cos.shape == sin.shape == (rows, turned)
            and turned <= key_dim
            and not turned % 2
        )
