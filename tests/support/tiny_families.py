"""Makes a tiny checkpoint of any causal family of the installed transformers, from the family's default configuration.

Widths, layers, experts and vocabulary are shrunk by rules on their keys; all other values stay the defaults. The first
layer of every kind is kept, so that every kind occurs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.tiny_models import byte_tokenizer

VOCABULARY = 64
WINDOW = 24
"""The window of every layer that has one."""

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
MOST_LAYERS = 4


def _at_most(bound: int) -> Callable[[int], int]:
    return lambda default: min(default, bound)


# The first rule whose pattern matches the whole key computes the value from the default, which is positive.
RULES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r".*vocab_size.*|.*_vocab", _at_most(VOCABULARY)),
    (r".*_token_id|.*_token_index", _at_most(1)),
    (r"type_vocab_size|entity_emb_size", _at_most(2)),
    (r"qk_head_dim", _at_most(24)),
    (r"qk_rope_head_dim|rotary_dim", _at_most(8)),
    (r".*head_dim|kv_channels|d_kv|.*_d_head|head_size|.*head_width", _at_most(16)),
    (r".*kv_heads|.*key_value_heads|num_query_groups|kv_n_heads|linear_num_key_heads", _at_most(2)),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", _at_most(8)),
    (r"(num_|n_|.*_)?(attention_)?heads?", _at_most(4)),
    (r".*experts_per_tok(en)?|.*top_?k(_experts)?|moe_topk|num_selected_experts", _at_most(2)),
    (r"topk_group", _at_most(1)),
    (r"n_group|num_expert_group|n_groups|mamba_n(_)?groups", _at_most(2)),
    (r".*shared_experts?", _at_most(1)),
    (r".*num_experts|n_routed_experts|num_local_experts|moe_num_experts|.*num_.*experts", _at_most(4)),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", _at_most(1)),
    (
        r"moe_.*intermediate_size|.*expert.*intermediate_size|expert_ffn_hidden_size|shared_intermediate_size",
        _at_most(32),
    ),
    (r".*intermediate_size.*|.*ffn_(hidden_)?(dim|size)|n_inner|d_?ff|d_inner|inner_dim|.*ffn_dim", _at_most(96)),
    (r"time_step_rank|mamba_dt_rank", _at_most(4)),
    (r".*lora_rank|.*_rank|adapter_rank", _at_most(16)),
    (r"(mamba_)?d_state|state_size|ssm_state_size", _at_most(8)),
    (r".*chunk_size|block_size", _at_most(16)),
    (r".*sliding_window|window_size|local_attention|.*window.*size|attention_window", _at_most(WINDOW)),
    (r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_sequence_length|model_max_length", _at_most(512)),
    (r"attention_hidden_size", _at_most(128)),
    (
        r"(.*_)?hidden_size(_global)?|n_embd|d_model|dim_model|embedding_size|word_embed_proj_dim|.*embed_dim|d_embed|lru_width|embedding_dim",
        _at_most(64),
    ),
)
EQUAL = (
    (("num_key_value_heads", "linear_num_key_heads", "swa_num_key_value_heads"), "num_attention_heads"),
    (("head_dim",), "qk_rope_head_dim"),
    (("linear_num_key_heads",), "linear_num_value_heads"),
)
"""Keys whose defaults are equal stay equal, such as the numbers of heads and of key-value heads."""

DEFAULT_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
SHARED_KEYS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 30}
LEFT_OPEN: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **ASSISTANT}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **ASSISTANT}},
}
"""Arguments of configurations that cannot be made without arguments."""
QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": None, "sliding_attention": DEFAULT_ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2, "norm_topk_prob": True},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": {"per_layer_config": None, "head_dim": 24}},
    "dots3_note_text": {"per_layer_config": None, "head_dim": 24},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n": SHARED_KEYS,
    "gemma3n_text": SHARED_KEYS,
    "gemma4_assistant": {"text_config": {"num_kv_shared_layers": 4}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 4}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1},
    "lfm2": {"full_attn_idxs": None, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 48]},
    "xlm": {"emb_dim": 64},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {
        "mamba_headdim": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
    },
}
"""Values that the default configuration lacks, or has in a form that no rule can shrink."""

SHRUNK = tuple((re.compile(pattern), rule) for pattern, rule in RULES)


def tiny_config(family: str) -> PretrainedConfig:
    """The family's default configuration, small."""
    small = _over(shrink(default_config(family).to_dict()), OVERRIDES.get(family, {}))
    made: PretrainedConfig = CONFIG_MAPPING[family](**small)
    return made


def default_config(family: str) -> PretrainedConfig:
    """The family's default configuration."""
    made: PretrainedConfig = CONFIG_MAPPING[family](**LEFT_OPEN.get(family, {}))
    return made


def _over(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration with these changes; a change that is a configuration is merged with the one inside."""
    merged = {
        key: _over(config[key], value) if isinstance(value, dict) and isinstance(config.get(key), dict) else value
        for key, value in changes.items()
    }
    return config | merged


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with smaller numbers, also in the configurations inside it."""
    count = next((config[key] for key in LAYER_COUNTS if isinstance(config.get(key), int)), None)
    layers = _kept_layers(config, count) if count else []
    small: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("id2label", "label2id", "transformers_version", "architectures", "_name_or_path"):
            continue
        if key == "is_decoder":
            small[key] = True
        elif key in (*LAYER_COUNTS, "encoder_layers"):
            small[key] = len(layers) or value
        elif key == "per_layer_config" and isinstance(value, dict):
            small[key] = {
                str(place): shrink(value[name])
                for place, layer in enumerate(layers)
                for name in value
                if int(name) == layer
            }
        elif isinstance(value, dict):
            small[key] = value if "rope" in key else shrink(value)
        elif isinstance(value, (list, tuple)) and len(value) == count and value:
            small[key] = [_smaller(key, value[layer]) for layer in layers]
        elif isinstance(value, (list, tuple)) and re.fullmatch(r".*(layers|layer_ids|indices)", key):
            small[key] = [each for each in value if not isinstance(each, int) or each < len(layers)]
        elif isinstance(value, (list, tuple)) and key.endswith("_token_id"):
            small[key] = [1]
        else:
            small[key] = _smaller(key, value)
    for key in ("head_dim", "qk_head_dim"):  # where a head is the sum of a rotary part and another
        parts = ("qk_nope_head_dim", "qk_rope_head_dim")
        if all(config.get(part) for part in parts) and config.get(key) == sum(config[part] for part in parts):
            small[key] = sum(small[part] for part in parts)
    for keys, other in EQUAL:
        for key in keys:
            if key in config and config[key] is not None and config[key] == config.get(other):
                small[key] = small[other]
    return small


def _smaller(key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    for pattern, rule in SHRUNK:
        if pattern.fullmatch(key):
            return rule(value)
    return value


def _kept_layers(config: dict[str, Any], count: int) -> list[int]:
    """The first layer of every kind, by the lists with an entry for each layer; then others up to MOST_LAYERS."""
    lists = [
        value
        for key, value in sorted(config.items())
        if isinstance(value, (list, tuple)) and len(value) == count and "layer" in key and "theta" not in key
    ]
    kinds = [tuple(str(value[layer]) for value in lists) for layer in range(count)]
    first = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    others = [layer for layer in range(count) if layer not in first]
    return sorted(first + others[: max(min(count, MOST_LAYERS) - len(first), 0)])


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Set every parameter at random, also norms and biases. Vectors stay near their initial values, as a recurrence may
    be unstable with others; `tiny_models.randomise` replaces them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)


def make_checkpoint(folder: Path, family: str, seed: int = 0) -> bool:
    """Write a checkpoint with random weights and a tokenizer of VOCABULARY tokens into `folder`.

    False where transformers makes no model of the family: then the folder has the default configuration and no weights.
    """
    byte_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    try:
        model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    except Exception:  # constructors raise errors of every kind
        default_config(family).save_pretrained(folder)
        save_file({}, folder / "model.safetensors")
        return False
    randomise(model, seed)
    model.save_pretrained(folder)
    return True
