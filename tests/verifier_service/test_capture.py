"""A step on an accelerator can be recorded: nothing in it waits for the device, and two steps of one shape launch the
same on the same memory, so a recording of the first computes the second. Counted on a CPU, with a GPU's forms."""

from __future__ import annotations

import pytest
import torch
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.tree_attention import near_window
from tree_kernels.warp import Warp

from tests.support.device_forms import load_as_on_a_gpu
from tests.support.launches import WaitsForDevice, launches
from tests.support.lone_rounds import lone_round
from tests.support.tiny_models import make_checkpoint

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("a GPU records the steps themselves", allow_module_level=True)

from verifier_service.device import DeviceRunner
from verifier_service.recurrent import Arrangement
from verifier_service.shards import Bounds

BUCKETS = (8,)
DEPTH = 6
SHORT = [(7 * at * at + 3 * at) % 250 for at in range(20)]
LONG = [(5 * at * at + at) % 250 for at in range(150)]
DRAWS = {
    "greedy": (Warp(), Sampling(), Warp(), Sampling(seed=9)),
    "sampled": (Warp(1.0), Sampling(temperature=1.0), Warp(0.5), Sampling(temperature=0.5, seed=9)),
    "filtered": (Warp(1.0, 50, 0.9), Sampling(temperature=1.0), Warp(0.7, 3, 0.5), Sampling(temperature=0.7, seed=9)),
}
LAUNCHES_A_LAYER = {"llama": 10, "neox": 10}
"""Of a small step."""


@pytest.fixture(scope="module", params=["llama", "neox"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def runner(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(family)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    make_checkpoint(folder, family, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        target = load_as_on_a_gpu(folder, BUCKETS, patch)
        near = near_window(DEPTH)
        yield DeviceRunner(target, Bounds(near, 8, 4, 2, DEPTH, Arrangement.of(2, near, DEPTH, 8)), BUCKETS)


def step(runner, ids, parents, warp, sampling):
    """The launches of a step with a tree, whose plan is uploaded before."""
    tree = DraftTree.of([ids[-1], *range(5, 4 + len(parents))], parents)
    plan = lone_round(runner, ids, tree, warp, sampling)
    shape = runner._shape_of(plan)
    assert shape.alone
    inputs = runner._upload(plan, shape)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), launches(patch) as found:
        runner._step(shape, inputs)
    return found


@pytest.mark.slow  # loading each target takes seconds
@pytest.mark.parametrize("drawing", DRAWS)
def test_no_step_waits_for_the_device_and_two_of_one_shape_launch_the_same(runner, drawing):
    warp, sampling, other_warp, other_sampling = DRAWS[drawing]
    first = step(runner, SHORT, [-1, 0, 0, 1], warp, sampling)
    second = step(runner, LONG, [-1, 0, 1, 2, 3, 0, 5], other_warp, other_sampling)
    assert first == second
    kernels = {name for name, _ in first}
    assert {"_rotate_write", "_far", "_near"} <= kernels, "it has a GPU's forms"


@pytest.mark.slow
def test_a_layer_launches_no_more_than_it_did(runner, family):
    found = [name for name, _ in step(runner, SHORT, [-1, 0, 0, 1], *DRAWS["greedy"][:2])]
    first, second = (at for at, name in enumerate(found) if name == "_far")
    assert second - first <= LAUNCHES_A_LAYER[family]


WAITS = {
    "a number": lambda x: x[0].item(),
    "a condition": lambda x: bool(x[0]),
    "where it is true": lambda x: x.nonzero(),
    "torch.where alone": lambda x: torch.where(x > 0),
    "a mask": lambda x: x[x > 0],
    "writing by a mask": lambda x: x.index_put_((x > 0,), x[:1]),
    "a download": lambda x: x.cpu(),
    "a list": lambda x: x.tolist(),
    "an upload": lambda x: x + torch.tensor([1, 2, 3]),
    "unique": lambda x: x.unique(),
    "comparison": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_waits_for_the_device_is_found(what, monkeypatch):
    x = torch.arange(3)
    with pytest.raises(WaitsForDevice), torch.inference_mode(), launches(monkeypatch):
        WAITS[what](x)


def test_numbers_and_memory_of_the_host_tell_two_steps_apart(monkeypatch):
    """A recording would keep those of the first."""

    def found(number, given):
        with monkeypatch.context() as patch, torch.inference_mode(), launches(patch) as launched:
            made = given * number
            made + made
        return launched

    x = torch.arange(3)
    assert found(2, x) == found(2, x) and len(found(2, x)) == 2
    assert found(2, x) != found(3, x) and found(2, x) != found(2, x.clone())
    assert found(2, x) != found(2, torch.arange(4))
