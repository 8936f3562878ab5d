"""Which layers of a target on a GPU get our forward: those that compute the same, bit for bit.

Without a GPU its kernels run in Triton's interpreter, repaired.
"""

from __future__ import annotations

import pytest
import torch
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.tree_attention import near_window
from tree_kernels.warp import Warp

from tests.support.device_forms import load_as_on_a_gpu
from tests.support.lone_rounds import lone_round
from tests.support.made_once import made_once
from tests.support.tiny_models import make_checkpoint

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("a GPU's forms are chosen as if on a GPU, on a CPU", allow_module_level=True)

from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from verifier_service.device import DeviceRunner
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
    layers = [module for module in target.model.modules() if type(module).__name__.endswith("Attention")]
    return sum("forward" in layer.__dict__ for layer in layers), len(layers)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_with_our_forward_gives_the_librarys_bits(family, folder_of, monkeypatch):
    target = load_as_on_a_gpu(folder_of(family), (8,), monkeypatch)
    assert ours(target) == (2, 2)
    found = logits_of(target)
    for layer in target.model.modules():
        if type(layer).__name__.endswith("Attention"):
            del layer.forward
    assert torch.equal(found, logits_of(target))


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
