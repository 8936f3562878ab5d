"""Levels of a drafter by kernels of an accelerator, here in Triton's interpreter: the guesses of PyTorch's operations,
few launches, no waiting for the device. The kernels are tested in `tests/kernels/test_drafter_kernels.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dendro.text import Sampling

from drafter_service import device_levels
from drafter_service.device_levels import DeviceLevels, layers_of
from drafter_service.plan import EMPTY_TEXT, Chains, DraftPlan
from drafter_service.runner import DraftRunner
from tests.drafter_service.test_memory import compare_rounds
from tests.support.launches import launches
from tests.support.recordings import RunAgain
from tests.support.text_cases import TextCase, ints, level_of
from tests.support.tiny_drafters import DEVICE, DEVICE_LAUNCHES, VOCABULARY

pytest.importorskip("triton", reason="triton is not installed")
from tree_kernels.rows_product import triton as products

TEXTS, NODES = 4, 64
KERNELS = {"_few", "_tiles", "_mix", "_select", "_step", "_best_of_parts", "_best", "_embed"}


@pytest.fixture(autouse=True)
def inference(monkeypatch):
    """Products are by few programs, each of which takes the interpreter as long."""
    monkeypatch.setattr(products, "FEW_PROGRAMS", 1)
    with torch.inference_mode():
        yield


LAWS = Sampling(temperature=0.0), Sampling(temperature=1.0, seed=4)


def runner_of(model, graphs=None, laws=LAWS):
    runner = DraftRunner(model, TEXTS, NODES, DEVICE, graphs=graphs or RunAgain(), kernels=graphs is not None)
    for session, law in enumerate(laws):
        runner.admit(session, law, runner.vocabulary)
    return runner


def grown(rng, runner, levels):
    """Two texts of three tokens, which a chain has read, and the plans of so many levels of their trees."""
    cases = [TextCase(slot, rng.integers(0, VOCABULARY, 4).tolist(), covers=3) for slot in (1, 2)]
    tokens = np.array([case.ids[:3] for case in cases])
    runner.memory.chain(Chains(tokens, ints(3, 3), ints(0, 0), ints(EMPTY_TEXT, EMPTY_TEXT), ints(1, 2), ints()))
    free = list(range(1, NODES))
    for _ in range(levels):
        for case in cases:
            case.grow(rng, free, VOCABULARY)
        level = level_of(cases)
        yield DraftPlan(level, None, tuple(level.counts), (0, 1), tuple(3 + depth for depth in level.depths), 5)


def same(ours, theirs):
    finite = np.isfinite(theirs.scores)
    assert (ours.candidates == theirs.candidates)[finite].all() and (np.isfinite(ours.scores) == finite).all()
    assert np.allclose(ours.scores[finite], theirs.scores[finite], atol=1e-4)


def test_every_node_equals_one_chain_over_its_text(device_model):
    if DEVICE.type == "cuda":
        pytest.skip("chains of the test are on the CPU")
    graphs = RunAgain()

    def levels_of(memory, nodes):
        return DeviceLevels(device_model, layers_of(device_model, memory), nodes, graphs).hidden

    compare_rounds(device_model, 0, 4, levels_of)
    assert graphs.replays > graphs.recordings > 0


def test_guesses_are_those_of_pytorchs_operations(device_model):
    graphs = RunAgain()
    ours, theirs = runner_of(device_model, graphs), runner_of(device_model)
    plans = [grown(np.random.default_rng(5), runner, 5) for runner in (ours, theirs)]
    for plan, _ in zip(*plans, strict=True):
        same(ours.run(plan), theirs.run(plan))
    assert graphs.replays > 0


def test_scored_rows_may_be_some_of_a_levels_and_rows_of_a_chain_are_ranked_too(device_model):
    ours, theirs = runner_of(device_model, RunAgain()), runner_of(device_model)
    for plan, _ in zip(*(grown(np.random.default_rng(1), runner, 4) for runner in (ours, theirs)), strict=True):
        some = np.arange(plan.rows.count)[::2]
        part = replace(plan, scored=some, groups=(len(some),), sessions=(1,), positions=(7,))
        same(ours.run(part), theirs.run(part))
    chain = Chains(np.array([[5, 6, 7]]), ints(3), ints(0), ints(EMPTY_TEXT), ints(3), ints())
    plan = DraftPlan(chain, np.array([2]), (1,), (1,), (3,), 4)
    same(ours.run(plan), theirs.run(plan))


def test_short_chains_run_as_levels_and_leave_the_texts_as_pytorchs_chains(device_model, monkeypatch):
    """Each of two texts goes on from its own memory, one of them into another slot, with another number of tokens."""
    rng, found = np.random.default_rng(6), []
    tokens, lengths = rng.integers(0, VOCABULARY, (2, 4)), ints(2, 4)
    orders = (0, 0, 1, 1, 1, 1)
    for runner in (runner_of(device_model, RunAgain()), runner_of(device_model)):
        for _ in grown(np.random.default_rng(5), runner, 0):
            pass
        chains = Chains(tokens, lengths, ints(3, 3), ints(1, 2), ints(1, 3), ints())
        plan = DraftPlan(chains, ints(0, 1, 4, 5, 6, 7), [1] * 6, orders, (4, 5, 4, 5, 6, 7), 5)
        if not found:
            monkeypatch.setattr(runner.memory, "chain", None)
            monkeypatch.setattr(device_levels, "CHAIN_NODES", 4)  # one chain at a time
        outcome = runner.run(plan)
        found.append((outcome, [runner.memory.save(slot, 3 + length) for slot, length in ((1, 2), (3, 4), (2, 0))]))
    (mine, memories), (theirs, expected) = found
    same(mine, theirs)
    for mine, theirs in zip(memories, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert np.allclose(mine[name], theirs[name], atol=1e-4), name


@pytest.mark.parametrize(
    "law", [Sampling(temperature=0.8, seed=2, top_k=3), Sampling(temperature=1.0, seed=2, logit_bias=((5, 2.0),))]
)
def test_laws_that_the_kernels_lack_are_ranked_by_pytorch_after_the_same_levels(device_model, law):
    laws = Sampling(temperature=0.0), law
    ours, theirs = runner_of(device_model, RunAgain(), laws), runner_of(device_model, laws=laws)
    for plan, _ in zip(*(grown(np.random.default_rng(2), runner, 3) for runner in (ours, theirs)), strict=True):
        same(ours.run(plan), theirs.run(plan))
    assert ours.prepare(1, range(30, 32))


def test_the_processor_prepares_no_noise_for_rows_that_the_device_ranks(device_model):
    assert not runner_of(device_model, RunAgain()).prepare(1, range(3, 5))
    assert runner_of(device_model).prepare(1, range(3, 5))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="launches are recorded on a CPU")
def test_a_layer_takes_few_launches_and_no_level_waits_for_the_device(device_model, device_family, monkeypatch):
    graphs = RunAgain()
    runner = runner_of(device_model, graphs)
    for plan in grown(np.random.default_rng(0), runner, 2):
        runner.run(plan)
    with launches(monkeypatch) as launched:
        graphs.steps[-1]()
    kernels = [name for name, _ in launched if name in KERNELS]
    assert len(launched) == len(kernels) == DEVICE_LAUNCHES[device_family] * len(device_model.layers) + 4


def test_padded_rows_write_no_node_of_a_tree(device_model):
    runner = runner_of(device_model, RunAgain())
    for plan in grown(np.random.default_rng(3), runner, 3):
        runner.run(plan)
    level = plan.rows
    stores = (
        [each for layer in runner.memory.nodes.layers for each in (layer.x, layer.B, layer.dt)]
        if hasattr(runner.memory, "nodes")
        else [each[TEXTS:] for each in (*runner.memory.states.recurrent, *runner.memory.states.conv)]
    )
    before = [each.clone() for each in stores]
    runner.run(plan)
    others = [slot for slot in range(NODES) if slot not in level.slots]
    for store, old in zip(stores, before, strict=True):
        assert torch.equal(store[others].nan_to_num(), old[others].nan_to_num())


def test_ancestors_are_in_order_of_depth():
    case = TextCase(1, [1], tokens=[0] * 5, slots=[9, 4, 7, 5, 6], parents=[-1, 0, 1, 2, 1], level=[3, 4])
    assert level_of([case]).ancestors(4).tolist() == [[0, 9, 4, 7], [0, 0, 9, 4]]
