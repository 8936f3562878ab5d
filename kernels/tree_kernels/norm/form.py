"""Which norm a row gets: what the kernel and its reference are both given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WIDEST = 1 << 14
"""The most numbers of a group that the kernel norms: a row is in the registers of one program."""
HALVED_TO = 1024
"""Count of numbers at which a row's sum changes from adding halves to adding neighbours (README.md in this folder)."""

NO_GATE, GATE_FIRST, GATE_LAST = range(3)
"""Place of a gate, whose SiLU multiplies a row: none, before the norm, or after the norm."""


@dataclass(frozen=True, slots=True, eq=False)
class RowNorm:
    """A norm of rows of `groups` groups of one width, each normed alone.

    x is a group of a row, m the mean of x where the norm is centred, else 0:

        y = weight * (x - m) / sqrt(mean((x - m)^2) + eps) + bias
    """

    eps: float
    weight: Tensor | None = None  # [groups * width] of any floating type; one group's is every row's
    bias: Tensor | None = None  # shaped like `weight`
    groups: int = 1
    centred: bool = False  # a LayerNorm
    rounded: bool = False  # the normed row is rounded to the rows' type before the weight, as in Llama
    gate: int = NO_GATE

    def __post_init__(self) -> None:
        for each in (self.weight, self.bias):
            assert each is None or each.is_contiguous()
        assert self.groups == 1 or self.weight is not None

    def result_type(self, rows: torch.dtype) -> torch.dtype:
        """Type of results for rows of this type. A rounded row times a wider weight is as wide as the weight."""
        if self.rounded and self.weight is not None:
            return torch.promote_types(rows, self.weight.dtype)
        return rows


def padded_width(width: int) -> int:
    """The power of two from `width` on."""
    return 1 << (width - 1).bit_length()
