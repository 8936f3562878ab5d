"""Blocks of a Mamba-2 target on an accelerator: each residual is added by the norm after it, with the library's bits.

Loaded on a CPU with a GPU's forms; kernels run in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dendro.tree import DraftTree

from tests.support.device_forms import load_as_on_a_gpu
from tests.support.launches import launches
from tests.support.tiny_hybrids import VOCABULARY, make_checkpoint

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("a GPU has these forms itself", allow_module_level=True)

from verifier_service.device import GREEDY, DeviceRunner, StepShape
from verifier_service.models.device_blocks import use_device_blocks
from verifier_service.recurrent import Arrangement
from verifier_service.shards import Bounds

pytestmark = pytest.mark.slow  # loading a target takes seconds
BUCKETS, NEAR, DEPTH = (8, 40), 16, 6
LAUNCHES_A_LAYER = 7
"""Norm, product, convolution, folds and weights, scan, gated norm, product."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mamba2")
    make_checkpoint(folder, "mamba2")
    with pytest.MonkeyPatch.context() as patch:
        target = load_as_on_a_gpu(folder, BUCKETS, patch)
        bounds = Bounds(NEAR, 16, 4, 3, DEPTH, Arrangement.of(3, NEAR, DEPTH, BUCKETS[-1]))
        yield target, DeviceRunner(target, bounds, BUCKETS)


def test_blocks_give_the_librarys_bits_in_prompts_and_trees(loaded):
    target, runner = loaded
    ids = [(7 * at * at + 3 * at) % VOCABULARY for at in range(50)]
    tree = DraftTree.of([ids[-1], 5, 6, 7, 8], [-1, 0, 0, 1, 1])
    ours = runner.tree_logits(ids, tree).clone()
    block = target.model.backbone.layers[0]
    runs = []
    hook = block.register_forward_hook(lambda *_: runs.append(1))  # a traced model runs the library's forward
    runner._own_text, runner._own_place = [], runner.arrangement.own_place()
    library = runner.tree_logits(ids, tree)
    hook.remove()
    assert len(runs) == 3, "two steps of the prompt, one of the tree"
    assert torch.equal(ours, library) and ours.isfinite().all()


def test_a_layer_is_seven_launches(loaded, monkeypatch):
    _, runner = loaded
    shape = StepShape(8, 8, GREEDY, alone=True)
    with torch.inference_mode():
        inputs = runner._inputs_of(shape)
        inputs.upload()
        with launches(monkeypatch) as found:
            runner._step(shape, inputs)
    names = [name for name, _ in found]
    first, second = (at for at, name in enumerate(names) if name == "_scan")
    assert second - first == LAUNCHES_A_LAYER, names[first:second]


def other_sums(block):
    """A block whose residual is the normed row."""
    return lambda x, **named: block.norm(x.to(block.norm.weight.dtype)) + block.mixer(block.norm(x.bfloat16()), **named)


def other_inputs(block):
    """A block whose mixer is given half of the normed row."""
    return lambda x, **named: x.float() + block.mixer(block.norm(x.to(block.norm.weight.dtype)) / 2, **named)


@pytest.mark.parametrize("change", [other_sums, other_inputs])
def test_a_model_that_computes_anything_else_keeps_the_librarys_forward(loaded, change):
    target, _ = loaded
    block = target.model.backbone.layers[1]
    memory, target.run.recurrent, forward = target.run.recurrent, None, block.forward
    try:
        block.forward = change(block)
        assert not use_device_blocks(target.model, replace(target.run), VOCABULARY)
        block.forward = forward
        assert use_device_blocks(target.model, replace(target.run), VOCABULARY)
    finally:
        block.forward, target.run.recurrent = forward, memory
