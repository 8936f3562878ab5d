"""The formula, in torch, with the kernel's order of sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels.norm.form import GATE_FIRST, GATE_LAST, HALVED_TO, RowNorm, padded_width


def norm(x: Tensor, form: RowNorm, gate: Tensor | None = None) -> Tensor:
    """Norm x [..., groups * width], gated by `gate` of the same shape if there is one.

    In float32 with the kernel's bits, up to those of the gate's exponential; float64 rows in float64.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    silu = None if gate is None else F.silu(gate.to(wide.dtype))
    if form.gate == GATE_FIRST and silu is not None:
        wide = wide * silu
    groups = wide.unflatten(-1, (form.groups, -1))
    width = groups.shape[-1]
    if form.centred:
        groups = groups - (row_sum(groups) / width)[..., None]
    variance = row_sum(groups * groups) / width
    root = (variance + form.eps).double().sqrt().to(wide.dtype)  # torch's of float32 is not the nearest
    normed = (groups * (1.0 / root)[..., None]).flatten(-2)
    if form.rounded:
        normed = normed.to(x.dtype).to(wide.dtype)
    if form.weight is not None:
        normed = normed * form.weight.to(wide.dtype)
    if form.bias is not None:
        normed = normed + form.bias.to(wide.dtype)
    if form.gate == GATE_LAST and silu is not None:
        normed = normed * silu
    made: Tensor = normed.to(form.result_type(x.dtype))
    return made


def row_sum(x: Tensor) -> Tensor:
    """x [..., width] -> [...]: halves are added down to HALVED_TO numbers, then neighbours."""
    x = F.pad(x, (0, padded_width(x.shape[-1]) - x.shape[-1]))
    while (count := x.shape[-1]) > 1:
        x = x.unflatten(-1, (2, -1)).sum(-2) if count > HALVED_TO else x.unflatten(-1, (-1, 2)).sum(-1)
    return x[..., 0]
