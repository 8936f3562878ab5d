"""The formulas, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] of one dtype -> [..., D]"""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [..., D] of one dtype -> [..., D]"""
    return F.silu(gate) * up
