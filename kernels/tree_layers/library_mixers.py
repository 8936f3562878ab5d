"""Projections and norms of transformers' mixers, used around a convolution and recurrence of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tree_layers.errors import CheckpointError
from tree_layers.tree_mixers import silu, softplus

PARTS = ("in_proj", "conv1d", "A_log", "D", "out_proj")


def is_mixer(module: nn.Module) -> bool:
    """True if a module is a mixer, of Mamba-1 or of Mamba-2."""
    return all(hasattr(module, part) for part in PARTS)


def is_mamba1(mixer: nn.Module) -> bool:
    return hasattr(mixer, "x_proj")


def check_activation(folder: Path, mixer: Any) -> None:
    """Raise CheckpointError for an activation of the convolution other than SiLU."""
    if mixer.activation not in ("silu", "swish"):
        raise CheckpointError(f"{folder}: its mixers' activation {mixer.activation!r} is not supported")


def convolution(conv: nn.Conv1d) -> tuple[Tensor, Tensor]:
    """Weight [W, C] and bias [C] of a depthwise convolution, float32."""
    weight = conv.weight[:, 0].t().float().contiguous()
    return weight, weight.new_zeros(weight.shape[1]) if conv.bias is None else conv.bias.float()


def project_mamba2(mixer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project hidden [..., d]. Returns gate [..., I], inputs of the convolution, dt [..., H] before softplus."""
    multiplier = getattr(mixer, "ssm_in_multiplier", 1)
    projected = mixer.in_proj(hidden if multiplier == 1 else hidden * multiplier)
    if hasattr(mixer, "mup_vector"):
        projected = projected * mixer.mup_vector
    gate, inputs, dt = projected.split((mixer.intermediate_size, mixer.conv_dim, mixer.num_heads), -1)
    return gate, inputs, dt


def gated_norm(norm: nn.Module, y: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    """Gate and norm, rounded to `dtype`; a model without this norm has only the gate."""
    if isinstance(norm, nn.Identity):
        return (y * silu(gate.float())).to(dtype)
    normed: Tensor = norm(y, gate, dtype=dtype) if hasattr(norm, "dendro_norm") else norm(y, gate).to(dtype)
    return normed


def select_mamba1(
    mixer: Any, x: Tensor, x_proj: Callable[[Tensor], Tensor], dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mamba-1's dt after softplus [..., I] float32, B and C [..., N], from the convolution's output x [..., I].

    x_proj: the mixer's, or its form among several workers   dt_bias [I] float32, which dt_proj no longer has
    """
    rank, size = mixer.time_step_rank, mixer.ssm_state_size
    dt, B, C = x_proj(x).split((rank, size, size), -1)
    if hasattr(mixer, "dt_layernorm"):
        dt, B, C = mixer.dt_layernorm(dt), mixer.b_layernorm(B), mixer.c_layernorm(C)
    return softplus(mixer.dt_proj(dt).float() + dt_bias), B, C


class GroupedNorm(nn.Module):
    """Mamba-2's gated norm of channels in groups of one size: the gate first, then an RMS norm of each group, as in
    mamba-ssm."""

    def __init__(self, weight: nn.Parameter, group_size: int, eps: float) -> None:
        """weight [channels]"""
        super().__init__()
        self.weight = weight
        self.group_size = group_size
        self.variance_epsilon = eps

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Gated norm of y, gate [..., channels], computed in float32. Returns [..., channels] in y's dtype."""
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
