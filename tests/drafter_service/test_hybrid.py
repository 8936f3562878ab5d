"""Drafters that are transformers' own model: hybrids of every family, and Transformers without a form of their own.

Logits equal those of transformers over the whole text, and what is not supported is refused with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from dendro.errors import BadRequest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafter_service.models import HYBRIDS, load_model
from drafter_service.plan import EMPTY_TEXT, Chains
from tests.support import tiny_hybrids
from tests.support.tiny_hybrids import PADDED, PUBLISHED, VOCABULARY
from tests.support.tiny_mamba import randomise, write_tokenizer

CPU = torch.device("cpu")
# A variant of each family beside the one of `tiny_hybrids`.
VARIANTS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_groups": 1, "mamba_conv_bias": False, "attn_layer_indices": [0, 2], "mamba_proj_bias": True},
    "falcon_h1": {
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "lm_head_multiplier": 0.6,
        "embedding_multiplier": 1.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_out_multiplier": 0.9,
        "mlp_multipliers": [1.1, 0.7],
    },
    "granitemoehybrid": {"mamba_n_groups": 1, "time_step_limit": [0.02, 2.0], "attention_bias": True},
    "jamba": {"num_experts": 1, "attn_layer_period": 2, "mamba_conv_bias": False, "mamba_proj_bias": True},
    "nemotron_h": {
        "n_groups": 1,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 32,
        "use_bias": True,
    },
    "zamba2": {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "use_mem_rope": True, "mamba_ngroups": 1},
}
COMMON = {"vocab_size": PADDED, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
COMMON |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.3}
TRANSFORMERS: dict[str, dict[str, Any]] = {"Granite": GRANITE, "Mistral": {"sliding_window": None}, "Olmo2": {}}


def has_the_librarys_logits(folder: Path, library: PreTrainedModel) -> None:
    """Assert it of a text in chunks shorter and longer than a mixer's chunk, with float32 weights."""
    model, _ = load_model(folder, torch.float32, CPU)
    text = torch.randint(0, VOCABULARY, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    memory, found = model.memory(texts=2, nodes=1), []
    with torch.inference_mode():
        expected = library(torch.tensor([text]), use_cache=False).logits[0, :, :VOCABULARY]
        for start, stop in ((0, 1), (1, 70), (70, 134), (134, 135), (135, 200)):
            lengths, starts, sources, targets = np.array([[stop - start], [start], [1 if start else EMPTY_TEXT], [1]])
            rows = Chains(np.array([text[start:stop]]), lengths, starts, sources, targets, np.zeros(0, np.int64))
            found.append(model.logits(memory.chain(rows)[0]))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_in_chunks_equal_those_of_transformers_under_published_granite_configurations(tmp_path, name):
    has_the_librarys_logits(tmp_path, tiny_hybrids.make_published(tmp_path, name))


@pytest.mark.parametrize("variant", [False, True], ids=["plain", "variant"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_in_chunks_equal_those_of_transformers_for_each_hybrid_family(tmp_path, family, variant):
    library: Any = tiny_hybrids.make_checkpoint(tmp_path, family, **VARIANTS[family] if variant else {})
    with torch.no_grad():
        library.get_output_embeddings().weight *= 0.4  # logits then have the spread of those in `test_llama.py`
    library.save_pretrained(tmp_path)
    has_the_librarys_logits(tmp_path, library)


def make_transformer(folder: Path, name: str, **changes: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**COMMON | TRANSFORMERS[name] | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, 0)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_logits_in_chunks_equal_those_of_transformers_for_granite_mistral_and_olmo2(tmp_path, name):
    has_the_librarys_logits(tmp_path, make_transformer(tmp_path, name))


def test_a_sliding_window_is_refused(tmp_path):
    make_transformer(tmp_path, "Mistral", sliding_window=64)
    with pytest.raises(BadRequest, match="MistralAttention: attention with sliding_window is not supported"):
        load_model(tmp_path, torch.float32, CPU)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        (
            {"position_embedding_type": "rope", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "type dynamic depend",
        ),
        ({"mamba_n_heads": 5}, "mamba_n_heads must divide"),
        ({"mamba_d_state": 16}, r"conv1d.bias has shape \[80\], not \[96\]"),
        ({"layer_types": ["mamba"] * 5}, "there is no tensor"),
    ],
    ids=["activation", "rope", "heads", "state", "layers"],
)
def test_an_unsupported_hybrid_is_refused_with_the_reason(tmp_path, changed, reason):
    tiny_hybrids.make_published(tmp_path, "granite-4.0-h-350m")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(BadRequest, match=reason):
        load_model(tmp_path, torch.float32, CPU)


def test_a_model_without_attention_is_refused(tmp_path):
    tiny_hybrids.make_published(tmp_path, "granite-4.0-h-350m", layer_types=["mamba"] * 5)
    with pytest.raises(BadRequest, match="layers that attend must be at least one"):
        load_model(tmp_path, torch.float32, CPU)


def test_a_missing_tensor_of_a_hybrid_is_named(tmp_path):
    tiny_hybrids.make_published(tmp_path, "granite-4.0-h-350m")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mamba.A_log"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadRequest, match=r"there is no tensor model.layers.1.mamba.A_log"):
        load_model(tmp_path, torch.float32, CPU)


def test_ids_past_the_embedding_are_fed_as_one_fixed_id(tmp_path):
    tiny_hybrids.make_published(tmp_path, "granite-4.0-h-350m")
    model, _ = load_model(tmp_path, torch.float32, CPU)
    one = np.ones(1, np.int64)
    hidden = []
    for foreign in (0, PADDED, 1 << 20):
        rows = Chains(np.array([[3, foreign, 4]]), 3 * one, 0 * one, 0 * one, one, one[:0])
        with torch.inference_mode():
            hidden.append(model.memory(texts=2, nodes=1).chain(rows))
    assert torch.equal(hidden[0], hidden[1]) and torch.equal(hidden[0], hidden[2])


def test_saved_arrays_of_a_hybrid_are_checked(tmp_path):
    tiny_hybrids.make_published(tmp_path, "granite-4.0-h-350m")
    model, _ = load_model(tmp_path, torch.float32, CPU)
    memory, one = model.memory(texts=2, nodes=1), np.ones(1, np.int64)
    with torch.inference_mode():
        memory.chain(Chains(np.array([[1, 2, 3]]), 3 * one, 0 * one, 0 * one, one, one[:0]))
    saved = memory.save(1, 3)
    memory.check(saved, 3)
    for broken in (
        {name: array for name, array in saved.items() if name != "keys"},
        {name: array for name, array in saved.items() if name != "conv.1"},
        saved | {"more": saved["keys"]},
        saved | {"recurrent.0": np.full_like(saved["recurrent.0"], np.nan)},
    ):
        with pytest.raises(ValueError, match="arrays are|not finite"):
            memory.check(broken, 3)
    with pytest.raises(ValueError, match="the arrays are"):
        memory.check(saved, 4)


def test_a_hybrids_slots_have_the_bytes_of_keys_and_of_states(tmp_path):
    """Two layers attend with 2 heads of 8 channels; three mixers have 4 heads of 16 channels and 8 numbers each."""
    tiny_hybrids.make_published(tmp_path, "granite-4.0-h-350m", max_position_embeddings=2048)
    memory = load_model(tmp_path, torch.float32, CPU)[0].memory(texts=2, nodes=1)
    keys, mixed = 2 * 2 * 2 * 8 * 4, 4 * 16 + 2 * 8
    assert memory.node_bytes == keys + 3 * 4 * (mixed + 4 * 16 + 8 + 4)
    assert memory.text_bytes(100) == 128 * keys + 3 * 4 * (4 * 16 * 8 + 3 * mixed)
    assert memory.text_bytes(1 << 30) == 2048 * keys + 3 * 4 * (4 * 16 * 8 + 3 * mixed)
