"""A target whose pages are in its dtype: its rows are independent, and its recorded steps read each step's own items.

Without an accelerator the kernels run in Triton's interpreter, repaired.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE, near_window

from tests.support.lone_rounds import lone_round
from tests.support.recordings import RunAgain
from tests.support.tensor_core_products import multiply_as_tensor_cores
from tests.support.tiny_models import make_checkpoint

pytest.importorskip("triton", reason="triton is not installed")

from verifier_service.device import DeviceRunner
from verifier_service.models import load_target
from verifier_service.models.device_pages import attention_on_device, device_layouts
from verifier_service.models.seats import ProbedLayer
from verifier_service.recurrent import Arrangement
from verifier_service.shards import Bounds

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IDS = [(7 * at * at + 3 * at) % 256 for at in range(60)]


@pytest.fixture(autouse=True)
def repaired(monkeypatch):
    if DEVICE.type == "cpu":
        multiply_as_tensor_cores(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    make_checkpoint(path, **sizes, num_attention_heads=2, num_key_value_heads=1)
    return path


def runner_of(folder, narrow=True, graphs=None, buckets=(8, 48)):
    target = load_target(folder, torch.bfloat16, DEVICE, buckets)
    layouts = device_layouts(target.run.probed) if narrow else tuple(layer.layout for layer in target.run.probed)
    near = near_window(6)
    bounds = Bounds(near, 4, 2, 2, 6, Arrangement.of(2, near, 6, buckets[-1]))
    return DeviceRunner(replace(target, layouts=layouts), bounds, buckets, graphs=graphs)


def test_pages_are_in_the_dtype_of_keys_that_tensor_cores_attend_and_in_float32_for_others(folder):
    runner = runner_of(folder)
    (store,) = runner.pages.stores
    assert store.dtype == torch.bfloat16 and store.nbytes * 2 < runner_of(folder, narrow=False).pages.nbytes
    (layer,) = runner.target.run.probed
    others = [replace(layer, group=17), replace(layer, dtypes=(torch.float32,) * 3)]
    assert isinstance(layer, ProbedLayer) and layer.group == 2
    assert [each.dtype for each in device_layouts([layer, *others])] == [torch.bfloat16, *[torch.float32] * 2]
    assert attention_on_device([layer]) == "on tensor cores, pages in bfloat16"
    mixed = attention_on_device([layer, *others])
    assert mixed == "on tensor cores in 1 layers, from float32 pages in 2, as 17 heads share a key"


def test_rows_have_the_same_bits_in_steps_of_any_number_of_rows_and_nearly_the_logits_of_float32_pages(folder):
    runner = runner_of(folder)
    assert runner.check_rows() == []
    tree = DraftTree.of([IDS[-1], 5, 6, 7, 8], [-1, 0, 0, 1, 1])
    ours, theirs = (each.tree_logits(IDS, tree).cpu() for each in (runner, runner_of(folder, narrow=False)))
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


def test_a_recorded_step_reads_the_items_of_each_plan(folder):
    """It is recorded with a text that has no far keys."""
    graphs = RunAgain()
    runner, plain = runner_of(folder, graphs=graphs), runner_of(folder)
    for each in (runner, plain):
        generator = torch.Generator().manual_seed(0)
        for store in each.pages.stores:
            store[:, PAGE:] = torch.randn(store[:, PAGE:].shape, generator=generator).to(store)

    def walked(runner, ids):
        return runner.run(lone_round(runner, ids)).walks

    answers = [[walked(each, [*IDS, *range(count)]) for count in range(0, 40, 13)] for each in (runner, plain)]
    assert walked(runner, IDS[:4]) == walked(plain, IDS[:4])
    assert answers[0] == answers[1] and len({walks[0].tokens for walks in answers[1]}) > 1
    assert graphs.replays == 5
