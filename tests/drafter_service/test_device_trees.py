"""Trees of a known form by kernels of an accelerator, all levels at once, here in Triton's interpreter: the trees of
level after level, bit for bit, few launches, no waiting for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dendro.calls import DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.engine import Ticket
from dendro.shapes import TreeShape
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree
from tree_layers.states import SlotPool

from drafter_service import device_trees
from drafter_service.plan import Levels
from drafter_service.runner import DraftRunner
from drafter_service.scheduler import DraftScheduler
from tests.support.launches import launches
from tests.support.recordings import RunAgain
from tests.support.tiny_drafters import DEVICE, DEVICE_LAUNCHES, VOCABULARY

pytest.importorskip("triton", reason="triton is not installed")
from tree_kernels.rows_product import triton as products

TEXTS, NODES = 4, 64
SHAPES = "(1,1,1)", "nodes(3,2,0,1)", "(2,1,1)"
KERNELS = {"_few", "_tiles", "_mix", "_select", "_step", "_best_of_parts", "_best", "_embed"}


@pytest.fixture(autouse=True)
def inference(monkeypatch):
    """Products are by few programs, each of which takes the interpreter as long."""
    monkeypatch.setattr(products, "FEW_PROGRAMS", 1)
    with torch.inference_mode():
        yield


class OneText:
    """A text at a scheduler and a runner, used as the engine uses them."""

    def __init__(self, model, *, whole_trees, law, graphs):
        self.runner = DraftRunner(model, TEXTS, NODES, DEVICE, graphs=graphs, whole_trees=whole_trees)
        self.scheduler = DraftScheduler(
            "d", SlotPool(TEXTS), SlotPool(NODES), 1, 8, one_forward=self.runner.one_forward
        )
        self.text, self.opening = Tokens([5, 9, 2, 7, 1]), new_opening()
        call = OpenCall(self.update(), RequestParameters(law, Limits(64, ignore_end=True), "", ()))
        session = self.scheduler.open(Ticket(0.0), call, 0, VOCABULARY)
        self.runner.admit(session.number, law, VOCABULARY)
        self.plans = self.step()

    def update(self):
        return TextUpdate.of(self.opening, self.text, 0)

    def step(self):
        """Run all forwards until nothing waits. Returns their plans."""
        plans = []
        while True:
            step = self.scheduler.next()
            if step.folds:
                self.runner.fold(step.folds)
            if step.plan is None:
                return plans
            self.scheduler.apply(self.runner.run(step.plan))
            plans.append(step.plan)

    def draft(self, shape):
        self.scheduler.answers.clear()
        self.scheduler.draft(Ticket(0.0), DraftCall(self.update(), TreeShape.parse(shape)))
        self.plans = self.step()
        ((_, tree),) = self.scheduler.answers
        assert isinstance(tree, DraftTree)
        return tree

    def memory(self):
        session = next(iter(self.scheduler._sessions.values()))
        return self.runner.memory.save(session.slot, session.covers)


UNRECORDED = range(99)
GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=1.0, seed=4)


def whole_trees_of(model, law=GREEDY, graphs=None):
    return OneText(model, whole_trees=True, law=law, graphs=graphs or RunAgain())


def levels_of(model, law=GREEDY):
    return OneText(model, whole_trees=False, law=law, graphs=RunAgain(UNRECORDED))


def same(mine, other):
    pairs = zip(*((tree.tokens, tree.parents, tree.values) for tree in (mine, other)), strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


def test_whole_trees_are_those_of_level_after_level_bit_for_bit(device_model):
    """The text goes through a tree in part, is folded, and sometimes gets two more tokens, which a chain reads."""
    by_level, whole = levels_of(device_model, DRAWN), whole_trees_of(device_model, DRAWN, RunAgain(UNRECORDED))
    for number, shape in enumerate(SHAPES):
        trees = [each.draft(shape) for each in (by_level, whole)]
        assert same(*trees)
        (plan,) = whole.plans
        assert len(by_level.plans) > 1 and isinstance(plan.rows, Levels)
        assert plan.rows.text_rows == (2 if number == 2 else 0), "the last begins with a leaf and a token after it"
        last = trees[0].tokens[-1]  # a leaf of the last level, and the path to it
        path, row = [], len(trees[0].tokens) - 1
        while row:
            path, row = [int(trees[0].tokens[row]), *path], int(trees[0].parents[row])
        for each in (by_level, whole):
            each.text.extend([*path, *((3, int(last)) if number % 2 else ())])
    for name, array in by_level.memory().items():
        assert np.array_equal(array, whole.memory()[name]), name


@pytest.mark.skipif(DEVICE.type == "cuda", reason="launches are recorded on a CPU")
def test_a_tree_is_few_launches_and_two_of_one_size_launch_the_same_without_waiting_for_the_device(
    device_model, device_family, monkeypatch
):
    graphs = RunAgain()
    whole = whole_trees_of(device_model, DRAWN, graphs)
    found = []
    for shape in ("nodes(2,1,1)", "nodes(3,0,2,2)"):  # both have levels of one row and of two
        whole.draft(shape)
        with launches(monkeypatch) as launched:
            for step in graphs.steps:
                step()
        found.append(launched)
    assert found[0] == found[1] and graphs.recordings == 2, "one for each level"
    kernels = [name for name, _ in found[0] if name in KERNELS]
    assert len(kernels) == 2 * (DEVICE_LAUNCHES[device_family] * len(device_model.layers) + 4)
    assert [name for name, _ in found[0] if name not in KERNELS] == ["copy_", "copy_"], "an upload and a download"


def test_a_drafted_tree_downloads_once(device_model, monkeypatch):
    whole = whole_trees_of(device_model)
    whole.draft("(2,1)")
    downloads, copied = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: downloads.append(tensor) or copied(tensor))
    uploads, taken = [], torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: uploads.append(array) or taken(array))
    whole.draft("(2,1)")
    assert not downloads and not uploads, "the arrays go through memory that is pinned on a GPU"


@pytest.mark.parametrize("shape", ["(2)", "dynamic(2,1,2)"])
def test_a_tree_after_a_leaf_that_no_forward_has_read_is_one_forward_and_makes_no_arrays_of_its_own(
    device_model, shape, monkeypatch
):
    whole = whole_trees_of(device_model)
    for _ in range(2):  # each round after the first begins with the leaf of the one before
        whole.text.extend([int(whole.draft(shape).tokens[1]), 3])
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    monkeypatch.setattr(torch, "from_numpy", None)
    whole.draft(shape)
    (plan,) = whole.plans
    assert isinstance(plan.rows, Levels) and (plan.rows.text_rows, plan.rows.count) == (1, 2)


def test_a_tree_that_cannot_be_recorded_is_run(device_model):
    graphs = RunAgain(UNRECORDED)
    assert same(whole_trees_of(device_model, graphs=graphs).draft("(2,1)"), levels_of(device_model).draft("(2,1)"))
    assert graphs.recordings == 0


def test_of_many_sizes_the_oldest_recordings_are_dropped(device_model, monkeypatch):
    monkeypatch.setattr(device_trees, "MOST_SIZES", 1)
    monkeypatch.setattr(device_trees, "MOST_FORMS", 1)
    graphs = RunAgain()
    whole = whole_trees_of(device_model, DRAWN, graphs)
    first, _, again = (whole.draft(shape) for shape in ("(1,1)", "(2,1)", "(1,1)"))
    assert same(first, again) and graphs.recordings == 6 and len(whole.runner._trees.recordings.made) == 2


@pytest.mark.parametrize(
    "law", [Sampling(temperature=0.8, seed=2, top_k=3), Sampling(temperature=1.0, seed=2, logit_bias=((5, 2.0),))]
)
def test_laws_that_the_kernels_lack_grow_level_after_level(device_model, law):
    whole = whole_trees_of(device_model, law)
    assert same(whole.draft("(2,1)"), levels_of(device_model, law).draft("(2,1)"))
    assert not any(isinstance(plan.rows, Levels) for plan in whole.plans)


def test_padded_rows_write_no_node_of_another_tree(device_model):
    whole = whole_trees_of(device_model)
    whole.draft("(3,1)")
    memory, used = whole.runner.memory, whole.scheduler.nodes
    stores = (
        [each for layer in memory.nodes.layers for each in (layer.x, layer.B, layer.dt)]
        if hasattr(memory, "nodes")
        else [each[TEXTS:] for each in (*memory.states.recurrent, *memory.states.conv)]
    )
    before = [each.clone() for each in stores]
    session = next(iter(whole.scheduler._sessions.values()))
    whole.draft("(3,1)")
    others = [slot for slot in range(NODES) if slot not in session.kept.slots]
    assert used.free == NODES - 1 - 4 and len(others) == NODES - 4
    for store, old in zip(stores, before, strict=True):
        assert torch.equal(store[others].nan_to_num(), old[others].nan_to_num())
