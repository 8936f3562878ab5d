"""The product in torch, in both orders of its sums."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_kernels.matmul.shapes import MATRIX_INPUTS


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product of x [rows, inputs] and weight [outputs, inputs], plus bias [outputs]: [rows, outputs] of x's dtype.

    sum = fma(x[k], weight[k], sum) for k = 0, 1, ... in float32, then the bias. Computed in float64, where the
    product of two float32 numbers is exact: each sum is rounded to float64 and then to float32, which differs from
    rounding once in about one of 2^29 sums. Numbers that are not normal in float32 count as zero.
    """
    return _finished(_sums(x, weight), x, bias)


def product_in_groups(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product like `product` of bfloat16 numbers, in the order in which matrix tiles add MATRIX_INPUTS inputs.

    sum = sum + (even + odd) for each group of inputs: even is the sum of its inputs 0, 2, ..., as `product` adds them,
    odd that of its inputs 1, 3, ...
    """
    sums = torch.zeros(len(x), len(weight))
    for own, its in zip(x.split(MATRIX_INPUTS, 1), weight.split(MATRIX_INPUTS, 1), strict=True):
        even, odd = (_sums(own[:, first::2], its[:, first::2]) for first in (0, 1))
        sums = _normal(sums + _normal(even + odd))
    return _finished(sums, x, bias)


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    sums = torch.zeros(len(x), len(weight))
    wide, columns = (_normal(each.float()).double().unbind(1) for each in (x, weight))
    for own, column in zip(wide, columns, strict=True):
        sums = _normal(torch.addcmul(sums.double(), own[:, None], column[None]).float())
    return sums


def _finished(sums: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


def _normal(numbers: Tensor) -> Tensor:
    return numbers.where(numbers.abs() >= torch.finfo(torch.float32).tiny, 0.0).where(~numbers.isnan(), numbers)
