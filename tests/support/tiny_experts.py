"""Tiny checkpoints of families with experts, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_models import END, PADDED, randomise, write_tokenizer

COMMON: dict[str, Any] = {
    "vocab_size": PADDED,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),  # six logits leave a tail
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen2_moe": (  # a shared expert, whose gate is one number
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 36,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (  # biases, transposed weights, interleaved gates, sinks, sliding windows
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 70, "rope_parameters": None},
    ),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
}
FAMILIES = tuple(SETTINGS)


def make_checkpoint(folder: Path, family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint into `folder` and return the library's model of it, in float32."""
    name, settings = SETTINGS[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.eval()
