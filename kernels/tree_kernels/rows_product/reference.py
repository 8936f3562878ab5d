"""Few rows times a weight, with a norm before and a sum after it, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    groups: int = 1,
    added: Tensor | None = None,
) -> Tensor:
    """x [rows, inputs], weight [inputs, outputs], bias [outputs], norm [inputs], added [rows, outputs].

    Each group of a row's adjacent inputs is divided by the root of its mean square. Returns [rows, outputs] float64.
    """
    x = x.double()
    if norm is not None:
        parts = x.unflatten(1, (groups, -1))
        mean = (parts * parts).mean(2, keepdim=True)
        x = (parts / torch.sqrt(mean + eps)).flatten(1) * norm.double()
    y = x @ weight.double()
    if bias is not None:
        y = y + bias.double()
    return y if added is None else added.double() + y
