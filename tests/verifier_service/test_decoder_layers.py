"""Which decoder layers get our forward: those that compute the same, and no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dendro.tree import DraftTree
from transformers.models.llama import modeling_llama
from tree_kernels.decoder_layer import why_not_compiled
from tree_kernels.products import library_digest

import verifier_service.models as models
from tests.support import tiny_models
from tests.support.made_once import made_once
from verifier_service.engine import VerifierEngine
from verifier_service.models import decoder_layers, load_target
from verifier_service.options import VerifierOptions

pytestmark = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = made_once(tmp_path_factory, lambda folder, family: tiny_models.make_checkpoint(folder, family))
    return lambda family: folders(family)[0]


def loaded(folder, dtype=torch.float32, threads=1):
    return load_target(folder, dtype, torch.device("cpu"), (8, 16), threads)


def stacked(target):
    """True if all layers run in one call."""
    return target.model.model.forward.__module__ == decoder_layers.__name__


def ours(target):
    """How many decoder layers have our forward, of how many."""
    layers = [
        module for module in target.model.modules() if hasattr(module, "self_attn") or hasattr(module, "attention")
    ]
    return sum("forward" in layer.__dict__ for layer in layers), len(layers)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_layers_of_a_llamas_form_are_ours_and_give_the_bits_that_they_did(
    family, dtype, threads, folder_of, monkeypatch
):
    options = VerifierOptions(
        name="tiny", max_length=256, max_sessions=1, prefill_chunk=128, dtype=dtype, threads=threads
    )
    engine = VerifierEngine.load(folder_of(family), options)
    replaced, layers = ours(engine.runner.target)
    assert replaced == layers > 0 and stacked(engine.runner.target)
    monkeypatch.setattr(models, "use_decoder_layers", lambda *_: None)
    single = VerifierEngine.load(folder_of(family), options)
    assert ours(single.runner.target)[0] == 0
    tokens, places = torch.arange(1, 101), torch.randperm(100)
    logits = [each.runner._whole_text(tokens[places].tolist()) for each in (engine, single)]
    assert torch.equal(*logits)
    own, library = (replace(each._hello, timed_steps=()) for each in (engine, single))
    # The library's layers depend on the processor's instructions, so states of one are not restored by the other.
    kind, _, _ = own.fingerprint.rpartition("-")  # cosines and sines of both are the library's
    assert library == replace(own, fingerprint=f"{kind}-{library_digest()}") != own


@pytest.mark.parametrize("threads", [1, 2])
def test_all_layers_in_one_call_give_the_bits_of_a_call_each(threads, folder_of, monkeypatch):
    options = VerifierOptions(
        name="tiny", max_length=256, max_sessions=1, prefill_chunk=128, dtype=torch.bfloat16, threads=threads
    )
    together = VerifierEngine.load(folder_of("llama"), options).runner
    monkeypatch.setattr(decoder_layers, "use_decoder_stack", lambda *_: None)
    single = VerifierEngine.load(folder_of("llama"), options).runner
    assert stacked(together.target) and not stacked(single.target)
    assert ours(single.target)[0] == ours(single.target)[1] > 1
    tokens = torch.arange(1, 101).tolist()
    tree = DraftTree.of([tokens[-1], 5, 6, 7, 8], [-1, 0, 0, 1, 3])
    for length in (100, 3, 40, 100):
        its_tree = replace(tree, tokens=np.array([tokens[length - 1], *tree.tokens[1:]]))
        assert torch.equal(*(runner.tree_logits(tokens[:length], its_tree) for runner in (together, single)))


def model_that(computes):
    """A Llama below its head, which computes something between its parts."""
    library = modeling_llama.LlamaModel.forward

    def forward(self, input_ids=None, position_ids=None, **named):
        if computes == "other embeddings":
            named["inputs_embeds"] = self.embed_tokens(input_ids) * 1
            return library(self, None, position_ids=position_ids, **named)
        if computes == "other positions":
            places = None if position_ids is None else position_ids * 1
            return library(self, input_ids, position_ids=places, **named)
        made = library(self, input_ids, position_ids=position_ids, **named)
        if computes == "other results":
            made.last_hidden_state = made.last_hidden_state * 1
        if computes == "results in place":
            made.last_hidden_state.mul_(0.5)
        if computes == "more results":
            made.hidden_states = (made.last_hidden_state,)
        return made

    return forward


@pytest.mark.parametrize(
    "computes",
    ["nothing", "other embeddings", "other positions", "other results", "results in place", "more results"],
)
def test_a_model_that_computes_something_between_its_parts_keeps_its_forward(computes, folder_of, monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", model_that(computes))
    target = loaded(folder_of("llama"))
    assert ours(target)[0] == ours(target)[1]
    assert stacked(target) == (computes == "nothing")


def test_layers_of_another_form_keep_their_forward(folder_of):
    assert ours(loaded(folder_of("neox")))[0] == 0


def test_layers_whose_residual_is_scaled_keep_their_forward(folder_of, monkeypatch):
    library = modeling_llama.LlamaDecoderLayer.forward

    def scaled(self, hidden_states, **named):
        return hidden_states + 0.5 * (library(self, hidden_states, **named) - hidden_states)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", scaled)
    assert ours(loaded(folder_of("llama")))[0] == 0


def test_layers_whose_mlp_computes_something_else_keep_their_forward(folder_of, monkeypatch):
    library = modeling_llama.LlamaMLP.forward

    def clamped(self, x):
        return library(self, x).clamp(-1e-3, 1e-3)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", clamped)
    assert ours(loaded(folder_of("llama")))[0] == 0


def limited_layer(place):
    """A Llama's layer that limits large numbers in one place."""

    def limit(x, here):
        return x.clamp(-300, 300) if here == place else x

    def forward(self, hidden_states, **named):
        normed = limit(self.input_layernorm(hidden_states), "attention's input")
        attended, _ = self.self_attn(hidden_states=normed, **named)
        middle = hidden_states + limit(attended, "attention")
        made = self.mlp(limit(self.post_attention_layernorm(middle), "mlp's input"))
        return limit(middle + limit(made, "mlp"), "residual")

    return forward


@pytest.mark.parametrize("place", ["", "attention's input", "attention", "mlp's input", "mlp", "residual"])
def test_layers_that_limit_large_numbers_anywhere_keep_their_forward(place, folder_of, monkeypatch):
    """No number of the recorded rows is near the limit."""
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", limited_layer(place))
    replaced, layers = ours(loaded(folder_of("llama")))
    assert replaced == (0 if place else layers)


def test_layers_whose_attention_reads_other_rows_than_the_norms_keep_their_forward(folder_of, monkeypatch):
    library = modeling_llama.LlamaAttention.forward

    def parallel(self, hidden_states, **named):
        return library(self, hidden_states + 1, **named)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", parallel)
    assert ours(loaded(folder_of("llama")))[0] == 0
