"""Mamba-in-Llama by its definition: transformers' Llama with mixers that process one token after another.

It has none of our code, so it is the oracle of this family, for which transformers has no class.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


class Mixer(nn.Module):
    """Weights under a checkpoint's names, and the recurrence in float32."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.shared, self.state = fields["d_inner"], fields["d_xb"], fields["ssm_cfg"]["d_state"]
        self.heads = fields["ssm_cfg"]["ngroups"]
        self.dt_limit = fields["ssm_cfg"].get("dt_limit", (0.0, float("inf")))
        channels = 2 * self.shared + self.inner
        self.in_proj = nn.Linear(fields["d_model"], self.inner + channels + self.heads, bias=False)
        taps = fields["ssm_cfg"].get("d_conv", 4)
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, padding=taps - 1)
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.D = nn.Parameter(torch.zeros(self.heads))
        self.norm = LlamaRMSNorm(self.inner)  # only its weight is used
        self.out_proj = nn.Linear(self.inner, fields["d_model"], bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [1, tokens, d_model]"""
        tokens = hidden.shape[1]
        z, xBC, dt = self.in_proj(hidden[0]).split((self.inner, self.inner + 2 * self.shared, self.heads), 1)
        xBC = F.silu(self.conv1d(xBC.t()[None])[0, :, :tokens].t())
        x, B, C = xBC.split((self.shared, self.shared, self.inner), 1)
        repeats = self.inner // self.shared
        x, B = (each.reshape(tokens, -1, self.state).repeat_interleave(repeats, 1) for each in (x, B))
        C = C.reshape(tokens, self.heads, self.state)
        dt = F.softplus(dt + self.dt_bias).clamp(*self.dt_limit)
        state = torch.zeros(self.heads, self.state, self.state)
        rows = []
        for token in range(tokens):
            step = dt[token][:, None, None]
            state = torch.exp(-step * self.A_log.exp()[:, None, None]) * state
            state = state + step * x[token][:, :, None] * B[token][:, None, :]
            rows.append((state * C[token][:, None, :]).sum(-1) + self.D[:, None] * x[token])
        y = torch.stack(rows) * F.silu(z).view(tokens, self.heads, self.state)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)  # a group of the norm is a head
        return self.out_proj(y.flatten(1) * self.norm.weight)[None]


class ReferenceMambaInLlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig, fields: dict[str, Any]) -> None:
        super().__init__()
        self.mamba = Mixer(fields)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, fields["rms_norm_eps"])
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, fields["rms_norm_eps"])

    def forward(self, hidden: Tensor, **ignored: Any) -> Tensor:
        hidden = hidden + self.mamba(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def make_oracle(config: LlamaConfig, fields: dict[str, Any]) -> LlamaForCausalLM:
    """The model of a Llama's configuration and the fields of `mamba_config.json`."""
    model = LlamaForCausalLM(config)
    for place in set(range(config.num_hidden_layers)) - set(fields["attn_layers"]):
        model.model.layers[place] = ReferenceMambaInLlamaLayer(config, fields)
    return model.eval()


def describe(config: LlamaConfig, attn_layers: list[int], ssm: dict[str, Any]) -> dict[str, Any]:
    """The fields of `mamba_config.json` for mixers with as many heads as the attention has."""
    return {
        "d_model": config.hidden_size,
        "ssm_cfg": {"expand": 1, "ngroups": config.num_attention_heads, "d_state": config.head_dim, **ssm},
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "d_inner": config.num_attention_heads * config.head_dim,
        "d_xb": config.num_key_value_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
        "n_layer": config.num_hidden_layers,
        "attn_layers": attn_layers,
    }


def save(folder: Path, model: LlamaForCausalLM, fields: dict[str, Any]) -> None:
    """Write a checkpoint without a tokenizer."""
    model.save_pretrained(folder)
    (folder / "mamba_config.json").write_text(json.dumps(fields))
