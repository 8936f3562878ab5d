"""The product in torch, one input after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product of x [rows, inputs] and weight [outputs, inputs], plus bias [outputs]: [rows, outputs] of x's dtype.

    sum = fma(x[k], weight[k], sum) for k = 0, 1, ... in float32, then the bias. Computed in float64, where the
    product of two float32 numbers is exact: each sum is rounded to float64 and then to float32, which differs from
    rounding once in about one of 2^29 sums. Numbers that are not normal in float32 count as zero.
    """
    sums = torch.zeros(len(x), len(weight))
    wide, columns = (_normal(each.float()).double().unbind(1) for each in (x, weight))
    for own, column in zip(wide, columns, strict=True):
        sums = _normal(torch.addcmul(sums.double(), own[:, None], column[None]).float())
    if bias is not None:
        sums = sums + bias.float()
    return sums.to(x.dtype)


def _normal(numbers: Tensor) -> Tensor:
    return numbers.where(numbers.abs() >= torch.finfo(torch.float32).tiny, 0.0).where(~numbers.isnan(), numbers)
