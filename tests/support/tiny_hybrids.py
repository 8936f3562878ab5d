"""Tiny checkpoints of every state-space and hybrid family that is served, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from dendro.tree import DraftTree
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from tree_layers.checkpoint import CONFIG

from tests.support import mamba_in_llama
from tests.support.tiny_mamba import FAMILIES as DRAFTING
from tests.support.tiny_mamba import PADDED, VOCABULARY, randomise, tiny_config, write_tokenizer

COMMON: dict[str, Any] = {"vocab_size": PADDED, "hidden_size": 32, "max_position_embeddings": 4096}
ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
MOE: dict[str, Any] = {"num_experts_per_tok": 2}

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_mamba": ("FalconMamba", {"num_hidden_layers": 2, "state_size": 8}),
    "bamba": ("Bamba", {**ATTENTION, **MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1",
        {
            **ATTENTION,
            **MAMBA2,
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "ssm_in_multiplier": 1.3,
            "ssm_multipliers": [0.7, 1.2, 0.9, 1.1, 0.8],
            "key_multiplier": 1.5,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "mamba_expand": 2,
            "use_shared_attention_adapter": False,
            "adapter_rank": 4,
            "chunk_size": 16,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **ATTENTION,
            **MAMBA2,
            **MOE,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "shared_intermediate_size": 48,
        },
    ),
    "jamba": (
        "Jamba",
        {
            **ATTENTION,
            **MOE,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
}
# Published configurations with smaller widths and depths.
GRANITE_H_350M: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "embedding_multiplier": 12,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.1,
    "intermediate_size": 48,
    "layer_types": ["mamba", "mamba", "attention", "mamba", "attention"],
    "logits_scaling": 3,
    "mamba_chunk_size": 16,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "mamba_proj_bias": False,
    "max_position_embeddings": 32768,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 4,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "num_local_experts": 0,
    "output_router_logits": False,
    "pad_token_id": 0,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.246,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 48,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": PADDED,
}
GRANITE_H_TINY: dict[str, Any] = GRANITE_H_350M | {
    "attention_multiplier": 0.0078125,
    "intermediate_size": 16,
    "logits_scaling": 6,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "residual_multiplier": 0.22,
}
GRANITE_350M: dict[str, Any] = GRANITE_H_350M | {
    "layer_types": ["attention"] * 5,
    "position_embedding_type": "rope",
    "rope_theta": 10000000,
}
PUBLISHED = {
    "granite-4.0-h-350m": GRANITE_H_350M,
    "granite-4.0-h-tiny": GRANITE_H_TINY,
    "granite-4.0-350m": GRANITE_350M,
}
FAMILIES = (*DRAFTING, *SETTINGS, "mamba_in_llama")


def make_checkpoint(folder: Path, family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint into `folder` and return the library's model of it, in float32; for Mamba-in-Llama, the oracle
    of `mamba_in_llama.py`."""
    if family == "mamba_in_llama":
        return make_mamba_in_llama(folder, seed, **changes)
    if family in DRAFTING:
        config = tiny_config(family, **changes)
    else:
        name, settings = SETTINGS[family]
        config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def make_published(folder: Path, name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint of one of PUBLISHED with exactly this `config.json` and float32 weights, and return the
    library's model of it."""
    (folder / CONFIG).write_text(json.dumps(PUBLISHED[name] | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(folder)
    (folder / CONFIG).write_text(json.dumps(PUBLISHED[name] | changes))
    write_tokenizer(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def make_mamba_in_llama(
    folder: Path,
    seed: int = 0,
    attn_layers: tuple[int, ...] = (1,),
    ssm: dict[str, Any] | None = None,
    mixers: dict[str, Any] | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Write and return a Llama with mixers in all layers but `attn_layers`; their four heads share two x and B.

    ssm: more fields of `ssm_cfg`   mixers: of `mamba_config.json`   changes: of Llama's configuration
    """
    config = LlamaConfig(**{**COMMON, **ATTENTION, "num_hidden_layers": 3, "eos_token_id": None, **changes})
    fields = mamba_in_llama.describe(config, list(attn_layers), ssm or {}) | (mixers or {})
    model = mamba_in_llama.make_oracle(config, fields)
    randomise(model, seed)
    mamba_in_llama.save(folder, model, fields)
    write_tokenizer(folder)
    return model


def tree_below(root: int) -> DraftTree:
    """A tree of two branches."""
    return DraftTree.of([root, 3, 4, 5, 6], [-1, 0, 0, 1, 3])


def paths_below(ids: list[int]) -> list[list[int]]:
    """The texts that the rows of `tree_below` end."""
    return [ids, [*ids, 3], [*ids, 4], [*ids, 3, 5], [*ids, 3, 5, 6]]


def oracle(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """The library's logits after these tokens: its forward of the full sequence, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, -1, :VOCABULARY]


__all__ = ["FAMILIES", "PADDED", "VOCABULARY", "make_checkpoint", "oracle", "paths_below", "tree_below"]
