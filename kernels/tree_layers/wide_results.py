"""Products of bfloat16 or float16 rows and weights on a GPU with float32 results, the type in which tensor cores
add."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

WIDENING = {"cuda"}
"""Kinds of devices whose library has products of narrow numbers with float32 results."""


def may_widen(weight: Tensor) -> bool:
    """True if a product with this weight may have wide results; it may still fail the check of rows."""
    return weight.device.type in WIDENING and weight.dtype in (torch.bfloat16, torch.float16)


def widening(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x [..., rows, inputs] in the weight's dtype -> [..., rows, outputs] float32"""
    turned = weight.t()
    wide_bias = None if bias is None else bias.float()

    def run(x: Tensor) -> Tensor:
        made = torch.mm(x.reshape(-1, x.shape[-1]), turned, out_dtype=torch.float32)
        return (made if wide_bias is None else made + wide_bias).view(*x.shape[:-1], -1)

    return run
