"""Which layers of a target on a GPU get our forward: those that compute the same, bit for bit.

Without a GPU its kernels run in Triton's interpreter, repaired.
"""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from dendro.text import Sampling
from dendro.tree import DraftTree
from torch import nn
from tree_kernels.tree_attention import near_window
from tree_kernels.warp import Warp
from tree_layers.linear import RowForms

from tests.support.device_forms import load_as_on_a_gpu
from tests.support.lone_rounds import lone_round
from tests.support.made_once import made_once
from tests.support.tiny_models import make_checkpoint

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("a GPU's forms are chosen as if on a GPU, on a CPU", allow_module_level=True)

from transformers import PreTrainedModel
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from verifier_service.device import DeviceRunner
from verifier_service.models.joined_products import JOINED, join_weights, joined_product
from verifier_service.recurrent import Arrangement
from verifier_service.shards import Bounds

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = ["llama", "neox"]
TREE = DraftTree.of([9, 5, 6, 7, 8], [-1, 0, 0, 1, 1])
IDS = [*((7 * at * at + 3 * at) % 250 for at in range(69)), 9]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = made_once(tmp_path_factory, lambda folder, family: make_checkpoint(folder, family, **SIZES))
    return lambda family: folders(family)[0]


def logits_of(target):
    """Logits of a tree after a text with far keys."""
    near = near_window(6)
    runner = DeviceRunner(target, Bounds(near, 8, 4, 2, 6, Arrangement.of(2, near, 6, 8)), (8,))
    for store in runner.pages.stores:
        generator = torch.Generator().manual_seed(0)
        store[:, 64:] = torch.randn(store[:, 64:].shape, generator=generator).to(store)
    with torch.inference_mode():
        return runner.forward(lone_round(runner, IDS, TREE, Warp(), Sampling()))


def ours(target):
    """How many attention layers have our forward, of how many."""
    return sum("forward" in vars(layer) for layer in attentions(target)), len(attentions(target))


def without_forward(module):
    """Give a module back the forward of its class."""
    module.forward = type(module).forward.__get__(module)


def attentions(target):
    return [module for module in target.model.modules() if type(module).__name__.endswith("Attention")]


def whole(target):
    """The model below the head."""
    (inner,) = (module for module in target.model.children() if isinstance(module, PreTrainedModel))
    return inner


def runs_as_a_whole(target):
    return not isinstance(whole(target).forward, MethodType)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_our_forward_give_the_bits_of_the_librarys(family, folder_of, monkeypatch):
    """All layers as a whole, layers of the library with our attention, and the library's attention."""
    target = load_as_on_a_gpu(folder_of(family), (8,), monkeypatch)
    assert ours(target) == (2, 2) and runs_as_a_whole(target)
    found = [logits_of(target)]
    without_forward(whole(target))
    found.append(logits_of(target))
    for layer in attentions(target):
        without_forward(layer)
    found.append(logits_of(target))
    assert found[0].abs().sum() > 0 and all(torch.equal(each, found[0]) for each in found)


def half_as_much(self, hidden_states, **named):
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)
    hidden_states = hidden_states + 0.5 * attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def clamped(self, hidden_states, **named):
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)
    hidden_states = (hidden_states + attended).clamp(-500, 500)
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


@pytest.mark.slow
@pytest.mark.parametrize("forward", [half_as_much, clamped])
def test_layers_that_compute_something_else_keep_their_forward(forward, folder_of, monkeypatch):
    """A clamp acts on none of the recorded rows, unless they are scaled."""
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    target = load_as_on_a_gpu(folder_of("llama"), (8,), monkeypatch)
    assert ours(target) == (2, 2) and not runs_as_a_whole(target)


@pytest.mark.slow
def test_an_mlp_that_limits_its_gates_keeps_its_forward(folder_of, monkeypatch):
    def limited(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=30) * self.up_proj(x))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", limited)
    target = load_as_on_a_gpu(folder_of("llama"), (8,), monkeypatch)
    assert not any("forward" in vars(layer.mlp) for layer in whole(target).layers)


@pytest.mark.slow
def test_layers_of_the_same_rows_have_one_weight_in_memory(folder_of, monkeypatch):
    target = load_as_on_a_gpu(folder_of("llama"), (8,), monkeypatch)
    for layer in whole(target).layers:
        for module, names in zip((layer.self_attn, layer.mlp), JOINED, strict=True):
            weights = [getattr(module, name).weight for name in names]
            assert len({each.untyped_storage().data_ptr() for each in weights}) == 1
            assert weights[0].untyped_storage().nbytes() == sum(each.nbytes for each in weights)
    assert target.linear.forms["plain, joined"] == 4


def test_a_joined_product_that_fails_the_check_of_rows_is_not_used(monkeypatch):
    """Or that passes it in another form than the products of its parts do."""
    monkeypatch.setattr("tree_layers.linear.why_not_packed", lambda: "planted")
    monkeypatch.setattr("tree_layers.linear.can_be_packed", lambda weight: False)
    kinds = {24: ["plain"], 48: []}

    def check(run, rows, buckets):
        return bool(kinds[run(rows).shape[-1]])

    monkeypatch.setattr("tree_layers.linear.rows_are_independent", check)
    module = nn.Module()
    module.gate_proj, module.up_proj = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
    expected = torch.cat([module.gate_proj.weight, module.up_proj.weight])
    join_weights(module)
    x = torch.randn(1, 8, 16)
    assert joined_product(module, "gate_proj", RowForms((8,))) is None
    kinds[48] = kinds[24]
    product = joined_product(module, "gate_proj", RowForms((8,)))
    assert torch.allclose(product(x), x @ expected.T, atol=1e-6)
    assert joined_product(module, "q_proj", RowForms((8,))) is None, "it has no such layers"


@pytest.mark.slow
@pytest.mark.parametrize("family, library", [("llama", modeling_llama), ("neox", modeling_gpt_neox)])
def test_layers_with_another_rotary_embedding_keep_their_forward(family, library, folder_of, monkeypatch):
    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        count = cos.shape[-1]

        def turn(x):
            turned = torch.stack((-x[..., 1:count:2], x[..., :count:2]), -1).flatten(-2)
            return torch.cat([x[..., :count] * cos[:, None] + turned * sin[:, None], x[..., count:]], -1)

        return turn(q), turn(k)

    monkeypatch.setattr(library, "apply_rotary_pos_emb", interleaved)
    assert ours(load_as_on_a_gpu(folder_of(family), (8,), monkeypatch)) == (0, 2)
