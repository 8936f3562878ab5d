"""Mamba-2 targets by the runner for accelerators: the tokens of the CPU's runner, whatever is in a step.

Without an accelerator its kernels run in Triton's interpreter, and all but the capture of graphs is tested.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from dendro.engine import started
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.tree_walk import Walk
from tree_kernels.warp import Warp

from tests.support.launches import launches
from tests.support.recordings import RunAgain
from tests.support.routers import RoundByRound, guessing
from tests.support.tiny_hybrids import VOCABULARY, make_checkpoint

pytest.importorskip("triton", reason="triton is not installed")

from tests.support.device_runners import device_runner
from tests.support.joined_rows import joined_recurrent
from verifier_service.device import DeviceRunner
from verifier_service.device_states import folds_in_place
from verifier_service.engine import VerifierEngine
from verifier_service.models import load_target
from verifier_service.options import VerifierOptions
from verifier_service.recurrent import Arrangement, place_of, recurrent_rows
from verifier_service.rows import NO_ROWS, NOT_KEPT, FoldOf, RecurrentRows, text_rows
from verifier_service.shards import Bounds
from verifier_service.walk import Draw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_INTERPRETER = pytest.mark.long if DEVICE == "cpu" else pytest.mark.slow
COUNT = 24
PROMPTS = [list(range(3, 40)), [9, 8, 7], list(range(10, 76))]
LAWS = [Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=6)]
NEAR, DEPTH = 16, 6
ROWS = ("tokens", "positions", "slots", "homes", "near")


def engine_of(folder, by_kernels):
    options = VerifierOptions(
        name="tiny", dtype=torch.float32, device=DEVICE if by_kernels else "cpu", max_length=160, max_sessions=3,
        max_depth=DEPTH, prefill_chunk=128,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if by_kernels:
            patch.setattr("verifier_service.engine.runner_for", device_runner)
            if DEVICE == "cpu":  # a forward in the interpreter takes seconds, and the check runs one for each number
                patch.setattr("verifier_service.engine.buckets_up_to", lambda step_rows: (8, 32, step_rows))
        return VerifierEngine.load(folder, options)


@IN_INTERPRETER
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["mamba2", "bamba"])
async def test_trees_other_texts_and_cuts_change_no_token(family, tmp_path):
    make_checkpoint(tmp_path, family)
    engine, reference = (engine_of(tmp_path, by_kernels) for by_kernels in (True, False))
    assert isinstance(engine.runner, DeviceRunner)
    assert DEVICE != "cpu" or engine._hello.exactness == "bitwise"  # a GPU's float32 products depend on their rows
    ids = [(7 * at * at + 3 * at) % VOCABULARY for at in range(70)]
    tree = DraftTree.of([ids[-1], 5, 6, 7, 8], [-1, 0, 0, 1, 1])
    ours, theirs = engine.logits_of(ids, tree).cpu(), reference.logits_of(ids, tree)
    assert torch.allclose(ours, theirs, atol=2e-4 * float(theirs.abs().max()))
    asked = list(zip(PROMPTS, LAWS, strict=True))
    async with started(reference):
        plain = await asyncio.gather(*(RoundByRound(reference, *each, COUNT).finish() for each in asked))
    rng = np.random.default_rng(0)
    async with started(engine):
        assert [await RoundByRound(engine, *each, COUNT).finish() for each in asked] == plain
        routers = [RoundByRound(engine, *each, COUNT) for each in asked]
        trees = [guessing(rng, answer, VOCABULARY) for answer in plain]
        assert await asyncio.gather(*map(RoundByRound.finish, routers, trees)) == plain
        assert engine.stats()["guesses"] > 0


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mamba2")
    make_checkpoint(folder, "mamba2")
    target = load_target(folder, torch.float32, torch.device(DEVICE), (8, 40))
    bounds = Bounds(NEAR, 16, 4, 3, DEPTH, Arrangement.of(3, NEAR, DEPTH, 40))
    return device_runner(target, bounds, (8, 40), graphs=RunAgain())


def plan_of(runner, length, parents, committed=NO_ROWS, place=None):
    """A round of a text of so many tokens, and its place."""
    ids = [(5 * at * at + at) % VOCABULARY for at in range(length)]
    place = runner.arrangement.own_place() if place is None else place
    tree = DraftTree.of([ids[-1], *range(5, 4 + len(parents))], parents) if parents else None
    plan = text_rows(ids, committed, tree, range(1, 17), runner.pages.scratch, runner.near)
    rows = recurrent_rows(place, committed, length - 1, tree, runner.arrangement.scratch)
    wanted = np.arange(len(parents)) + len(committed)
    draws = [Draw(len(committed), 0, length, tree, Warp(), Sampling())] if tree is not None else []
    return replace(plan, wanted=wanted, draws=tuple(draws), recurrent=rows), place


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU records the steps themselves")
def test_no_step_waits_for_the_device_and_two_of_one_shape_launch_the_same(runner):
    found = []
    for length, parents in ((20, [-1, 0, 0, 1]), (33, [-1, 0, 1, 2, 3, 0]), (60, [-1])):
        plan, _ = plan_of(runner, length, parents)
        rows = plan.recurrent
        assert rows is not None
        shape = runner._shape_of(replace(plan, recurrent=replace(rows, folds=())))
        assert shape.alone
        inputs = runner._upload(plan, shape)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), launches(patch) as launched:
            runner._step(shape, inputs)
        found.append(launched)
    assert found[0] == found[1] == found[2]
    assert {"_conv", "_fold_and_weigh", "_scan", "_commit"} <= {name for name, _ in found[0]}


def test_rows_are_listed_once_beside_the_state_that_they_start_from(runner):
    """Two texts: one whose tree crosses a block and so begins and ends at a fold, and one with an older state."""
    old, _ = plan_of(runner, 60, [-1, 0, 0, 1])
    place = place_of(0, runner.arrangement.extent)
    place.folded = 1
    new, _ = plan_of(runner, 46, [-1, 0, 1, 2, 3], place=place)
    count = len(old.tokens)
    assert old.recurrent is not None and new.recurrent is not None
    rows = joined_recurrent([replace(old.recurrent, folds=(), sources=np.full(count, 7)), new.recurrent])
    assert len(rows.folds) == 1 and set(rows.sources[count:].tolist()) == {rows.folds[0].source, -1}
    merged = replace(
        old,
        **{name: np.concatenate([getattr(old, name), getattr(new, name)]) for name in ROWS},
        wanted=np.arange(count + len(new.tokens)),
        draws=(),
        recurrent=rows,
    )
    shape = runner._shape_of(merged)
    host = runner._upload(merged, shape).host
    target = rows.folds[0].target
    states = {row: int(item[1]) for item in host["states.items"] for row in item[2 : 2 + item[0]].tolist()}
    assert states == dict(enumerate(target if source < 0 else source for source in rows.sources.tolist()))
    assert shape.alone and host["states.fold_states"][0].tolist() == [rows.folds[0].source, target]
    assert host["states.chains"][0].tolist() == [0, 1] and not host["states.moved"].any()


def test_the_check_of_rows_at_start_fits_a_runner_of_one_text(tmp_path, monkeypatch):
    """Its shuffled rows start from more states than any rows of one served text."""
    make_checkpoint(tmp_path, "mamba2")
    target = load_target(tmp_path, torch.float32, torch.device(DEVICE), (8, 16, 160))
    bounds = Bounds(NEAR, 16, 11, 1, DEPTH, Arrangement.of(1, NEAR, DEPTH, 160))
    runner = device_runner(target, bounds, (8, 16, 160), graphs=RunAgain())
    states = []

    def listed(plan):
        items = runner._upload(plan, runner._shape_of(plan)).host["states.items"]
        assert sorted(row for item in items for row in item[2 : 2 + item[0]]) == list(range(len(plan.tokens)))
        states.append(len(set(plan.recurrent.sources.tolist())))
        return torch.zeros(len(plan.tokens), 1, device=DEVICE)

    monkeypatch.setattr(runner, "forward", listed)
    monkeypatch.setattr(runner, "keep", lambda kept: None)
    assert runner.check_rows() == []
    assert max(states[1:]) > 2 * len(runner.buckets)


def test_a_walk_on_the_host_keeps_its_accepted_guesses_alone(runner, monkeypatch):
    """The step has kept the certain rows. Copied again, one could replace another text's guess that came a whole ring
    after it."""
    plan, _ = plan_of(runner, 20, [-1, 0, 0, 1], committed=np.arange(10, 19))
    kept, scores = [], torch.zeros(4, VOCABULARY)
    monkeypatch.setattr(runner, "keep", kept.append)
    monkeypatch.setattr(runner.walker, "walk", lambda draw, logits: Walk((0, 1, 3), (5, 7, 9), (0, 0)))
    assert runner._walked_on_host(plan, {0: scores})[0].tokens == (5, 7, 9)
    first, scratch = plan.draws[0].first, runner.arrangement.scratch
    (slots,) = kept
    assert slots.inputs.tolist() == [scratch + first + 1, scratch + first + 3]
    assert slots.rings.tolist() == plan.recurrent.homes[[first + 1, first + 3]].tolist()
    assert slots.target.tolist() == plan.homes[[first + 1, first + 3]].tolist()
    monkeypatch.setattr(runner.walker, "walk", lambda draw, logits: Walk((0,), (5,), ()))
    runner._walked_on_host(plan, {0: scores})
    assert not len(kept[1].inputs) and not len(kept[1].source)


def fold(source, target):
    return FoldOf(source, np.arange(NEAR), target)


@pytest.mark.parametrize(
    "sources, folds, direct",
    [
        ([3, 3], [], True),
        ([3, -1], [fold(3, 4)], True),
        ([-1, -1], [fold(3, 4)], True),
        ([-1, -2], [fold(3, 4), fold(-1, 5)], True),
        ([3, -2], [fold(3, 4), fold(-1, 3)], False),  # a row starts from what was in slot 3
        ([5, -1], [fold(3, 5)], False),
        ([-2, -2], [fold(3, NOT_KEPT), fold(-1, 4)], False),
    ],
)
def test_a_fold_writes_no_checkpoint_that_the_step_starts_from(sources, folds, direct):
    count = len(sources)
    columns, own = np.zeros((count, 2 * NEAR), np.int64), np.zeros(count, np.int64)
    assert folds_in_place(RecurrentRows(columns, own, own, np.array(sources), tuple(folds))) is direct


@IN_INTERPRETER
@pytest.mark.timeout(300)
def test_a_prompt_in_one_step_has_the_logits_of_a_prompt_in_many(runner):
    """Folds of one step replace checkpoints that its first rows start from; of many steps, none does."""
    ids = [(5 * at * at + at) % VOCABULARY for at in range(40)]
    tree = DraftTree.root_only(ids[-1])
    runner._own_place, runner._own_text = runner.arrangement.own_place(), []
    whole = runner.tree_logits(ids, tree)
    runner._own_place, runner._own_text = runner.arrangement.own_place(), []
    for length in range(2, 41, 2):
        found = runner.tree_logits(ids[:length], DraftTree.root_only(ids[length - 1]))
    assert torch.equal(found, whole)
