"""A target's forward by its parts, without the library's code around them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers.models.llama import modeling_llama
from tree_kernels.decoder_layer import why_not_compiled

from tests.support import tiny_models
from tests.support.made_once import made_once
from verifier_service.models import decoder_layers, load_target
from verifier_service.models.comparing import by_our_seats

pytestmark = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = made_once(tmp_path_factory, lambda folder, family: tiny_models.make_checkpoint(folder, family))
    return lambda family: folders(family)[0]


def loaded(folder, dtype=torch.bfloat16):
    return load_target(folder, dtype, torch.device("cpu"), (8, 16), threads=2)


MOST, FEW = [5, 0, 7, 7, 1, 15, 2, 3, 4, 6, 8, 9, 0, 0], [5, 0, 15, 5]
"""Wanted rows, of 16. For FEW the last layer's output projection and MLP run on the wanted rows alone."""


@pytest.mark.parametrize("rows", [MOST, FEW], ids=["most", "few"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_logits_by_the_parts_have_the_bits_of_the_librarys_forward(family, dtype, rows, folder_of, monkeypatch):
    target = loaded(folder_of(family), dtype)
    tokens, order = torch.arange(3, 19), torch.randperm(16, generator=torch.Generator().manual_seed(1))
    wanted = torch.tensor(rows)
    step = partial(by_our_seats, target.model, target.run, (), tokens, order)
    found = []

    def both(step_tokens, positions):
        with torch.inference_mode():
            library = target._forward(step_tokens, positions, wanted).logits[0]
            assert library.shape == (len(wanted), target.vocabulary)
            with monkeypatch.context() as only:
                only.setattr(type(target), "_forward", None)
                found.append(torch.equal(target.logits(step_tokens, positions, wanted), library))
        return torch.zeros(len(tokens), 1)

    step(both)
    assert found == [True]


def test_rows_past_the_table_of_positions_are_rotated_as_the_library_does(tmp_path):
    """The model's positions are no multiple of a block, and a text may reach the last one."""
    tiny_models.make_checkpoint(tmp_path, "llama", max_position_embeddings=200)
    direct = loaded(tmp_path).direct
    assert direct is not None and direct._rotations is not None and direct._rotations.most == 192
    for its in ([190, 191], [191, 192], [150, 199], [199]):
        x, positions = torch.zeros(1, len(its), 64, dtype=torch.bfloat16), torch.tensor(its)
        with torch.inference_mode():
            ours, library = direct._rotation(x, positions), direct._stack.rotation(x, positions[None])
        assert torch.equal(ours.cos, library.cos) and torch.equal(ours.sin, library.sin)


def model_that(computes):
    """A Llama that computes something around the product of its head."""
    library = modeling_llama.LlamaForCausalLM.forward

    def forward(self, *args, **named):
        made = library(self, *args, **named)
        if computes == "a limit":
            made.logits = made.logits.clamp(-500, 500)
        if computes == "a scale":
            made.logits = made.logits * 0.5
        return made

    return forward


@pytest.mark.parametrize("computes", ["nothing", "a scale", "a limit"])
def test_a_model_that_changes_its_logits_keeps_the_librarys_forward(computes, folder_of, monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", model_that(computes))
    assert (loaded(folder_of("llama")).direct is not None) == (computes == "nothing")


def test_a_last_layer_that_computes_other_bits_for_few_rows_is_not_run_by_parts(folder_of, monkeypatch):
    norm = decoder_layers.CompiledStack.normed_rows

    def other(self, x, rotation, wanted):
        found = norm(self, x, rotation, wanted)
        return found if len(wanted) == x.shape[1] else found + 1

    monkeypatch.setattr(decoder_layers.CompiledStack, "normed_rows", other)
    assert loaded(folder_of("llama")).direct is None


def test_layers_of_another_form_run_in_the_librarys_forward(folder_of):
    assert loaded(folder_of("neox")).direct is None
