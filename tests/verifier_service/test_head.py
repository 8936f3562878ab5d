"""The head computes logits for the rows that a walk visits, in blocks, and holds one block of them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dendro.tree import DraftTree
from torch import nn

from tests.support import tiny_hybrids, tiny_models
from tests.support.engines import engine_of
from tests.support.routers import RoundByRound
from verifier_service.models import _float_head
from verifier_service.models.head import HEAD_ROWS, Logits

ROWS = 2 * HEAD_ROWS + 8


class CountedHead:
    """A head that records which blocks it was given and how many of its logits are still alive."""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.alive_before: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        gc.collect()
        self.alive_before.append(sum(each() is not None for each in self.made))
        self.firsts.append(int(hidden[0, 0]))
        logits = hidden * 10.0
        self.made.append(weakref.ref(logits))
        return logits


def test_a_block_is_computed_only_when_one_of_its_rows_is_needed():
    head, hidden = CountedHead(), torch.arange(float(ROWS))[:, None]
    logits = Logits(hidden, head)
    assert head.firsts == []
    assert [float(logits.row(row)) for row in (0, 7, ROWS - 1)] == [0.0, 70.0, 10.0 * (ROWS - 1)]
    assert head.firsts == [0, 2 * HEAD_ROWS]
    assert torch.equal(logits.all(), hidden * 10.0)


def test_one_block_is_held_at_a_time():
    head = CountedHead()
    logits = Logits(torch.arange(float(ROWS))[:, None], head)
    for row in range(ROWS):
        logits.row(row)
    assert head.firsts == [0, HEAD_ROWS, 2 * HEAD_ROWS]
    assert head.alive_before == [0, 0, 0]


def test_logits_that_exist_are_not_computed_again():
    there = torch.arange(float(ROWS))[:, None]
    logits = Logits.made(there)
    assert [float(logits.row(row)) for row in (0, ROWS - 1)] == [0.0, ROWS - 1.0]
    assert torch.equal(logits.all(), there) and logits.took_s == 0


@pytest.mark.parametrize("guesses, together, calls", [(24, False, 1), (63, False, 3), (63, True, 1)])
def test_a_step_of_one_block_and_a_head_that_workers_share_take_one_call_of_the_model(
    guesses, together, calls, tmp_path
):
    """Workers would wait for each other in every further call, and cannot predict which rows the walks visit."""
    tiny_models.make_checkpoint(tmp_path, "neox")
    engine, tree = engine_of(tmp_path), DraftTree.of([5, *range(guesses)], [-1] + [0] * guesses)
    engine.runner.target.head.together = together
    made = []
    engine.runner.target.model.register_forward_hook(lambda *_: made.append(1))
    assert len(engine.logits_of([1, 2, 5], tree)) == guesses + 1
    assert len(made) == 1 + calls, "one for the text; layers and two blocks are three"


def big_tree(root: int, without: int) -> DraftTree:
    """64 rows: the root and 63 children, none of which is the token `without`."""
    tokens = [token for token in range(64) if token != without][:63]
    return DraftTree.of([root, *tokens], [-1] + [0] * 63)


SCALED: dict[str, dict[str, Any]] = {
    "falcon_h1": {"lm_head_multiplier": 0.25},
    "granitemoehybrid": {"logits_scaling": 4.0},
}


@pytest.mark.parametrize("held", [21, 24, 30])
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_past_the_tokens_fill_a_multiple_and_are_dropped(held, biased):
    """held: rows of a checkpoint with 21 tokens"""
    head = nn.Linear(6, held, bias=biased)
    asked = []

    class Forms:
        def in_float32(self, weight, bias):
            asked.append((len(weight), None if bias is None else len(bias)))
            return lambda hidden: F.linear(hidden, weight, bias)

    hidden = torch.randn(1, 5, 6)
    found = _float_head(head, 21, Forms(), 8)(hidden)
    assert asked == [(24, 24 if biased else None)]
    assert torch.allclose(found, head(hidden)[..., :21], atol=1e-6) and found.shape == (1, 5, 21)


@pytest.mark.parametrize("family", SCALED)
def test_a_familys_scaling_of_logits_after_the_product_is_applied(family, tmp_path):
    model = tiny_hybrids.make_checkpoint(tmp_path, family, **SCALED[family])
    ids = np.random.default_rng(0).integers(0, 64, 40).tolist()
    found = engine_of(tmp_path).logits_of(ids, tiny_hybrids.tree_below(ids[-1]))
    truth = torch.stack([tiny_hybrids.oracle(model, path) for path in tiny_hybrids.paths_below(ids)])
    assert (found - truth).abs().max() < 1e-4 < 0.01 * truth.abs().max()
    blocks = engine_of(tmp_path).logits_of(ids, big_tree(ids[-1], 0))
    for row, path in ((0, ids), (1, [*ids, 1])):
        assert (blocks[row] - tiny_hybrids.oracle(model, path)).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "mamba2", *SCALED])
def test_a_rows_logits_have_the_same_bits_in_every_block(family, tmp_path):
    made = tiny_models if family == "llama" else tiny_hybrids
    made.make_checkpoint(tmp_path, family, **SCALED.get(family, {}))
    engine = engine_of(tmp_path)
    target, taken = engine.runner.target, list[torch.Tensor]()
    take = target.head.take

    def noted(run):
        taken.append(take(run))
        return taken[-1]

    target.head.take = noted
    ids = np.random.default_rng(0).integers(0, 64, 40).tolist()
    found = engine.logits_of(ids, big_tree(ids[-1], 0))
    with torch.inference_mode():
        whole = target.head.logits(taken[-1])
        assert torch.equal(found, whole[:64]) and found.dtype == torch.float32
        for rows in (8, 16, 24):
            assert torch.equal(target.logits_of(taken[-1][:rows]), whole[:rows])
        assert torch.equal(target.logits_of(taken[-1][48:56]), whole[48:56])


@pytest.mark.parametrize("family", ["mamba2", "bamba"])
async def test_a_walk_that_ends_at_the_root_computes_one_block(family, tmp_path):
    tiny_hybrids.make_checkpoint(tmp_path, family)
    engine = engine_of(tmp_path)
    prompt, blocks, head = list(range(40)), list[int](), engine.runner.target.head.logits

    def counted(hidden):
        blocks.append(len(hidden))
        return head(hidden)

    await engine.start()
    try:
        plain, guessing = RoundByRound(engine, prompt), RoundByRound(engine, prompt)
        for router in (plain, guessing):
            await router.open()
        answer = (await plain.round()).tokens[0]
        engine.runner.target.head.logits = counted
        verdict = await guessing.round(big_tree(prompt[-1], answer))
        assert verdict.tokens == (answer,) and blocks == [HEAD_ROWS]
    finally:
        await engine.stop()
