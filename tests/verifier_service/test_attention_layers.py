"""Which attention layers get our forward: those that compute the same, and no others."""

from __future__ import annotations

import pytest
import torch
from transformers import OlmoConfig, OlmoForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama import modeling_llama
from tree_kernels.tree_attention import compiled
from tree_kernels.tree_attention.compiled import why_not_compiled

import verifier_service.models as models
from tests.support import tiny_models
from tests.support.made_once import made_once
from verifier_service.engine import VerifierEngine
from verifier_service.models import load_target
from verifier_service.options import VerifierOptions

pytestmark = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())

QWEN3 = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


def qwen3(folder):
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=tiny_models.PADDED, num_hidden_layers=2, eos_token_id=tiny_models.END, **QWEN3)
    )
    tiny_models.randomise(model, 0)
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)


def olmo(folder, limit):
    config = OlmoConfig(vocab_size=tiny_models.PADDED, num_hidden_layers=2, eos_token_id=1, clip_qkv=limit, **QWEN3)
    model = OlmoForCausalLM(config)
    tiny_models.randomise(model, 0)
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)


MAKERS = {
    "olmo": lambda folder: olmo(folder, None),
    "olmo-limited": lambda folder: olmo(folder, 50.0),
    "llama": lambda folder: tiny_models.make_checkpoint(folder, "llama"),
    "mistral": lambda folder: tiny_models.make_checkpoint(folder, "mistral"),
    "neox": lambda folder: tiny_models.make_checkpoint(folder, "neox"),
    "qwen3": qwen3,
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = made_once(tmp_path_factory, lambda folder, family: MAKERS[family](folder))
    return lambda family: folders(family)[0]


def loaded(folder, dtype=torch.float32):
    return load_target(folder, dtype, torch.device("cpu"), (8, 16))


def ours(target):
    """How many attention layers have our forward, of how many."""
    layers = [module for module in target.model.modules() if type(module).__name__.endswith("Attention")]
    return sum("forward" in layer.__dict__ for layer in layers), len(layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_layers_of_four_projections_are_ours_and_give_the_bits_that_they_did(family, dtype, folder_of, monkeypatch):
    options = VerifierOptions(name="tiny", max_length=256, max_sessions=1, prefill_chunk=128, dtype=dtype)
    engine = VerifierEngine.load(folder_of(family), options)
    replaced, layers = ours(engine.runner.target)
    assert replaced == layers > 0
    monkeypatch.setattr(models, "use_attention_layers", lambda *_: 0)
    plain = VerifierEngine.load(folder_of(family), options)
    assert ours(plain.runner.target)[0] == 0
    tokens, places = torch.arange(1, 17), torch.randperm(16)
    logits = [each.runner._whole_text(tokens[places].tolist()) for each in (engine, plain)]
    assert torch.equal(*logits)


def test_layers_with_one_projection_for_all_keep_their_forward(folder_of):
    assert ours(loaded(folder_of("neox"))) == (0, 3)


def test_layers_with_another_rotary_embedding_keep_their_forward(folder_of, monkeypatch):
    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        def turn(x):
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    assert ours(loaded(folder_of("llama")))[0] == 0


def test_layers_whose_results_are_changed_after_the_output_layer_keep_their_forward(folder_of, monkeypatch):
    library = modeling_llama.LlamaAttention.forward

    def doubled(self, *args, **named):
        made, weights = library(self, *args, **named)
        return 2 * made, weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", doubled)
    assert ours(loaded(folder_of("llama")))[0] == 0


def test_layers_that_limit_large_queries_and_keys_keep_their_forward(folder_of):
    """No query of the recorded rows is near the limit."""
    assert ours(loaded(folder_of("olmo"))) == (2, 2)
    assert ours(loaded(folder_of("olmo-limited"))) == (0, 2)


def test_layers_that_limit_large_results_keep_their_forward(folder_of, monkeypatch):
    library = modeling_llama.LlamaAttention.forward

    def limited(self, *args, **named):
        made, weights = library(self, *args, **named)
        return made.clamp(-50, 50), weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", limited)
    assert ours(loaded(folder_of("llama")))[0] == 0


def test_layers_that_scale_far_rows_keep_their_forward(folder_of, monkeypatch):
    """As some families scale queries past the length that they were first trained for."""
    library = modeling_llama.LlamaAttention.forward

    def scaled(self, *args, position_ids, **named):
        made, weights = library(self, *args, position_ids=position_ids, **named)
        return made * torch.where(position_ids > 200, 2.0, 1.0)[..., None], weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", scaled)
    assert ours(loaded(folder_of("llama")))[0] == 0


def test_without_compiled_kernels_the_librarys_products_attend_and_the_engine_says_why(folder_of, monkeypatch):
    options = VerifierOptions(name="tiny", max_length=256, max_sessions=1, prefill_chunk=128, dtype=torch.float32)
    ids = list(range(1, 65))
    with_kernels = VerifierEngine.load(folder_of("llama"), options)
    monkeypatch.setattr(compiled, "why_not_compiled", lambda: "numba is not installed")
    library = VerifierEngine.load(folder_of("llama"), options)
    assert with_kernels.kernels.endswith("attention: compiled")
    assert library.kernels.endswith("attention: the library's products, as numba is not installed")
    assert ours(library.runner.target)[0] == 0
    found, expected = (each.runner._whole_text(ids) for each in (with_kernels, library))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
