"""Training forwards of drafters: transformers' modules and parameters with our parallel scans.

Mamba forwards of transformers loop over time on a machine without CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Mamba2ForCausalLM, MambaForCausalLM, PreTrainedModel
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from drafter_service.training.scans import mamba1_scan, mamba2_scan


def causal_conv(x: Tensor, conv: nn.Conv1d) -> Tensor:
    """Depthwise causal convolution [R, L, D] -> [R, L, D], as shifted products, which torch.compile fuses."""
    weight, width = conv.weight, conv.weight.shape[-1]  # [D, 1, width], the last tap is the current position
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = sum(padded[:, tap : tap + x.shape[1]] * weight[:, 0, tap] for tap in range(width))
    assert isinstance(y, Tensor)
    return y if conv.bias is None else y + conv.bias


def _mamba1_mixer(mixer: MambaMixer, hidden: Tensor) -> Tensor:
    """Run a Mamba-1 mixer on whole rows: [R, L, width] -> [R, L, width] (docs/design/scan.md#mamba-1)."""
    x, gate = mixer.in_proj(hidden).chunk(2, dim=-1)
    x = F.silu(causal_conv(x.float(), mixer.conv1d))
    low_rank, B, C = mixer.x_proj(x).split([mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size], dim=-1)
    dt = F.softplus((low_rank.to(x.dtype) @ mixer.dt_proj.weight.T).float() + mixer.dt_proj.bias)
    y = mamba1_scan(x, dt, -torch.exp(mixer.A_log), B.float(), C.float()) + mixer.D * x
    out: Tensor = mixer.out_proj(y * F.silu(gate.float()))
    return out


def _mamba2_mixer(mixer: Mamba2Mixer, hidden: Tensor) -> Tensor:
    """Run a Mamba-2 mixer of one group on whole rows: [R, L, width] -> [R, L, width] (docs/design/scan.md#mamba-2)."""
    inner, states = mixer.intermediate_size, mixer.ssm_state_size
    gate, xBC, dt = mixer.in_proj(hidden).split([inner, mixer.conv_dim, mixer.num_heads], dim=-1)
    x, B, C = F.silu(causal_conv(xBC.float(), mixer.conv1d)).split([inner, states, states], dim=-1)
    x = x.unflatten(-1, (mixer.num_heads, mixer.head_dim))
    dt = F.softplus(dt.float() + mixer.dt_bias).clamp(*mixer.time_step_limit)
    with torch.autocast(hidden.device.type, enabled=False):  # states add up over a whole row
        y = mamba2_scan(x, dt, -torch.exp(mixer.A_log), B, C) + mixer.D[:, None] * x
    out: Tensor = mixer.out_proj(mixer.norm(y.flatten(-2), gate))
    return out


class StudentForward(nn.Module):
    """Training forward of a drafter: token ids [R, L] to hidden states [R, L, width] after the final norm."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        if isinstance(model, Mamba2ForCausalLM) and model.config.n_groups != 1:
            raise ValueError(f"the Mamba-2 training forward supports n_groups 1, not {model.config.n_groups}")
        if not isinstance(model, MambaForCausalLM | Mamba2ForCausalLM | LlamaForCausalLM):
            raise TypeError(f"no training forward for {type(model).__name__}")
        self.model = model

    def forward(self, token_ids: Tensor) -> Tensor:
        model = self.model
        if isinstance(model, LlamaForCausalLM):
            hidden: Tensor = model.model(token_ids, use_cache=False).last_hidden_state
            return hidden
        backbone: Any = model.backbone  # a ModuleList hides the types of its blocks
        mixer: Callable[[Any, Tensor], Tensor] = _mamba1_mixer
        if isinstance(model, Mamba2ForCausalLM):
            mixer = _mamba2_mixer
        hidden = backbone.embeddings(token_ids)
        for block in backbone.layers:
            hidden = hidden + mixer(block.mixer, block.norm(hidden))
        normed: Tensor = backbone.norm_f(hidden)
        return normed
