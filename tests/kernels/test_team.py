"""Threads that share the products of a drafter's call: the same bits for any number of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.shapes import TreeShape
from dendro.state import NoStates
from tree_kernels.matmul.cpu import helpers
from tree_kernels.noise import gumbel_noise
from tree_kernels.ranking import Orders

import drafter_service.models
from drafter_service.engine import DrafterEngine
from drafter_service.grow import fixed_form
from drafter_service.models import load_model
from drafter_service.models.fused import FUSED, FusedEnds
from drafter_service.models.memory import FusedMemory
from drafter_service.options import DrafterOptions
from drafter_service.plan import EMPTY_TEXT, Chains, Levels, Nodes
from tests.support.text_cases import ints
from tests.support.tiny_mamba import Family, make_checkpoint, tiny_config

ROWS, WIDTH, TOKENS = 3001, 4, 50
CALLS, MOST_CALLS = 30, 3000
"""Calls that are compared; more until a helper has joined, which on a busy machine may not get a processor for long."""
LARGE = {
    "mamba": {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3},
    "mamba2": {"hidden_size": 192, "num_heads": 6, "head_dim": 64, "n_groups": 2, "num_hidden_layers": 3},
}
FORM = fixed_form(TreeShape.parse("(3,2,1)"))

pytestmark = pytest.mark.parametrize("family", ["mamba", "mamba2"])


def checkpoint(folder: Path, family: Family) -> Path:
    make_checkpoint(folder, family, config=tiny_config(family, ROWS, **LARGE[family]))
    return folder


def model_of(folder: Path, dtype: torch.dtype, threads: int) -> FusedEnds:
    model, _ = load_model(folder, dtype, torch.device("cpu"), form="fused", threads=threads)
    assert isinstance(model, FusedEnds)
    return model


@torch.inference_mode()
def computed(model: FusedEnds, memory: FusedMemory) -> tuple[list[np.ndarray], int]:
    """Hidden rows of a prompt; the guesses of a tree below it; its logits, computed apart. And how often helpers have
    joined."""
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, (1, TOKENS))
    hidden = memory.chain(Chains(tokens, ints(TOKENS), ints(0), ints(EMPTY_TEXT), ints(1), ints()))[0]
    slots = list(range(1, 1 + len(FORM.above)))
    joined = model.team.joined
    known = model.vocabulary
    noise = list(gumbel_noise(5, range(1, 1 + len(FORM.counts)), known))
    orders = Orders([0.7] * len(noise), noise, [known] * len(noise))
    rows = Levels([7], 1, 1, 0, 0, Nodes(slots, FORM.above), FORM.counts, FORM.ranks)
    ids, scores, _ = memory.guesses(rows, rows.groups, range(len(FORM.counts)), orders, WIDTH)
    joined += model.team.joined
    return [hidden.numpy(), ids, scores, model.logits(hidden).numpy()], joined


def memory_of(model: FusedEnds) -> FusedMemory:
    memory = model.memory(2, 40)  # type: ignore[attr-defined]
    assert isinstance(memory, FusedMemory)
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 6])
def test_trees_and_logits_have_the_same_bits_with_any_number_of_threads(tmp_path, family, dtype, threads):
    """Also with more threads than processors, many times over: helpers then join late."""
    folder = checkpoint(tmp_path, family)
    alone, shared = (model_of(folder, dtype, count) for count in (1, threads))
    (wanted, none), memory, joined = computed(alone, memory_of(alone)), memory_of(shared), 0
    for call in range(MOST_CALLS):
        if call >= CALLS and joined:
            break
        found, times = computed(shared, memory)
        joined += times
        assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert joined, "no helper has joined any product"
    assert not none


def test_a_call_runs_alone_while_another_has_the_helpers(tmp_path, family):
    folder = checkpoint(tmp_path, family)
    alone, shared = (model_of(folder, torch.float32, count) for count in (1, 2))
    wanted, _ = computed(alone, memory_of(alone))
    with helpers().lock:
        found, joined = computed(shared, memory_of(shared))
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert not joined


def test_an_engine_has_the_threads_of_its_options(tmp_path, family, monkeypatch):
    made = list[int]()

    def note(model: object, threads: int) -> object:
        made.append(threads)
        return FUSED[family](model, threads)

    monkeypatch.setattr(drafter_service.models, "FUSED", {family: note})
    DrafterEngine.load(checkpoint(tmp_path, family), DrafterOptions(name="tiny", threads=3), states=NoStates())
    assert made == [3]
