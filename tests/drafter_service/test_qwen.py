"""Drafters with published configurations of Qwen2.5, Qwen3 and Llama: their logits equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drafter_service.models import load_model
from drafter_service.plan import EMPTY_TEXT, Chains
from tests.support.tiny_mamba import VOCABULARY, write_tokenizer
from tests.support.tiny_models import randomise

CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 104}
# Published configurations with smaller widths and depths.
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    **SMALL,
}
QWEN3 = {
    **{key: value for key, value in QWEN25.items() if key != "use_mrope"},
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "model_type": "qwen3",
    "rope_scaling": None,
    "sliding_window": None,
}
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": [0, 1],
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    **SMALL,
}
LLAMA68M = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 4,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    **SMALL,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512, "type": "yarn"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2.5": QWEN25,
    "qwen2.5-7b": QWEN25 | {"tie_word_embeddings": False},
    "qwen2.5-yarn": QWEN25 | {"rope_scaling": YARN},
    "qwen3": QWEN3,
    "qwen3-8b": QWEN3 | {"tie_word_embeddings": False},
    "qwen3-rope-parameters": {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling")}
    | {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}},
    "llama-3.2": LLAMA32,
    "llama-68m": LLAMA68M,
}


def make(folder: Path, config: dict[str, Any]) -> PreTrainedModel:
    """Write a checkpoint with exactly this `config.json`, and load it with transformers in float32."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    dtype = getattr(torch, config["torch_dtype"])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    randomise(model, 0)
    model.to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", PUBLISHED)
@torch.inference_mode()
def test_logits_in_chunks_equal_those_of_transformers_under_published_configurations(tmp_path, name):
    library = make(tmp_path / "made", PUBLISHED[name])
    model, _ = load_model(tmp_path / "made", torch.float32, CPU)
    text = torch.randint(0, VOCABULARY, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = library(torch.tensor([text])).logits[0, :, :VOCABULARY]
    memory, found = model.memory(texts=2, nodes=1), []
    for start, stop in ((0, 1), (1, 70), (70, 150)):
        lengths, starts, sources, targets = np.array([[stop - start], [start], [1 if start else EMPTY_TEXT], [1]])
        found.append(
            memory.chain(
                Chains(np.array([text[start:stop]]), lengths, starts, sources, targets, np.zeros(0, np.int64))
            )[0]
        )
    torch.testing.assert_close(model.logits(torch.cat(found)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "changed", "reason"),
    [
        (QWEN25, {"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window True is not supported"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layers of type sliding_attention"),
        (QWEN3, {"attention_bias": True}, "attention_bias True is not supported"),
        (QWEN25, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type dynamic depend on"),
        (QWEN25, {"rope_scaling": {"rope_type": "proportional"}}, "rope_parameters .* are not supported"),
        (LLAMA32, {"partial_rotary_factor": 0.5}, "rope_parameters .* are not supported"),
    ],
    ids=["window", "sliding-layers", "biases", "dynamic", "unknown-rope", "partial-rope"],
)
def test_an_unsupported_configuration_is_refused_with_the_reason(tmp_path, config, changed, reason):
    make(tmp_path / "made", config)
    (tmp_path / "made" / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(BadRequest, match=reason):
        load_model(tmp_path / "made", torch.float32, CPU)


@pytest.mark.parametrize(
    ("config", "tensor"),
    [(QWEN25, "model.layers.1.self_attn.k_proj.bias"), (QWEN3, "model.layers.0.self_attn.q_norm.weight")],
    ids=["qwen2", "qwen3"],
)
def test_a_missing_bias_or_norm_is_named(tmp_path, config, tensor):
    from safetensors.torch import load_file, save_file

    make(tmp_path / "made", config)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    with pytest.raises(BadRequest, match=f"there is no tensor {tensor}"):
        load_model(tmp_path / "made", torch.float32, CPU)
