"""Mamba-2's gated norm: the gate first, then an RMS norm of each group of channels, as in mamba-ssm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from tree_layers.tree_mixers import silu


class GroupedNorm(nn.Module):
    """The gated norm of channels in groups of one size."""

    def __init__(self, weight: nn.Parameter, group_size: int, eps: float) -> None:
        """weight [channels]"""
        super().__init__()
        self.weight = weight
        self.group_size = group_size
        self.variance_epsilon = eps

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate [..., channels]; returns the same in y's dtype, computed in float32."""
        gated = y.float() * silu(gate.float())
        groups: Tensor = gated.unflatten(-1, (-1, self.group_size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.flatten(-2).to(y.dtype)


def group_norms(model: nn.Module) -> None:
    """Give each mixer of several groups a norm by groups, where the library's norm takes all channels as one group: in
    transformers 5.17 those of mamba2, bamba and granitemoehybrid."""
    mixer: Any
    for mixer in model.modules():
        norm: Any = getattr(mixer, "norm", None)
        groups = getattr(mixer, "n_groups", 1)
        if groups > 1 and hasattr(norm, "variance_epsilon") and not vars(norm).keys() & {"group_size", "n_groups"}:
            mixer.norm = GroupedNorm(norm.weight, mixer.intermediate_size // groups, norm.variance_epsilon)
