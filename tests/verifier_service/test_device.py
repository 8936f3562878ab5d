"""The runner for accelerators: its kernels give the same tokens, whatever is in a step, and its steps are recorded.

Without an accelerator its kernels run in Triton's interpreter, and all but the capture of graphs is tested.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest, EngineFailed
from dendro.grammars import TreeMasks, Unmasked
from dendro.logprobs import TokenLogprobs
from dendro.modes import VerificationMode, draft_seed
from dendro.text import Sampling
from dendro.tree import ChildLaw, DraftTree
from tree_kernels.noise import gumbel_noise
from tree_kernels.row_softmax import log_probabilities
from tree_kernels.sampled_walk import drawn_order, law_of_scores
from tree_kernels.tree_attention import PAGE, near_window
from tree_kernels.warp import History, Processors, Warp, processed, tokens_of
from tree_layers.step_buffers import StepBuffers

from tests.support.lone_rounds import lone_round
from tests.support.recordings import RunAgain
from tests.support.routers import LAWS, RoundByRound, alone, guessing
from tests.support.tiny_models import make_checkpoint

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.errors import OutOfResources

from tests.support.device_runners import device_runner
from tests.support.engines import running
from tests.support.joined_rows import joined
from verifier_service.device import GREEDY, Drawn, StepShape
from verifier_service.engine import VerifierEngine
from verifier_service.models import LoadedTarget, load_target
from verifier_service.options import VerifierOptions
from verifier_service.recurrent import Arrangement
from verifier_service.rows import NO_ROWS, text_rows
from verifier_service.shards import Bounds
from verifier_service.walk import Draw, Walker

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [list(range(3, 20)), [9, 8, 7], list(range(100, 166))]
COUNT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    return path


@pytest.fixture(scope="module")
def engine(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verifier_service.engine.runner_for", device_runner)
        if DEVICE == "cpu":  # a forward in the interpreter takes seconds, and the check runs one for each number
            patch.setattr("verifier_service.engine.buckets_up_to", lambda step_rows: (8, 32, step_rows))
        options = VerifierOptions(
            name="tiny",
            dtype=torch.float32,
            device=DEVICE,
            max_length=96,
            max_sessions=3,
            max_depth=6,
            prefill_chunk=128,
        )
        return VerifierEngine.load(folder, options)


IN_INTERPRETER = pytest.mark.long if DEVICE == "cpu" else pytest.mark.slow  # a minute there


@IN_INTERPRETER
@pytest.mark.timeout(300)  # it loads the fixture, and without a device the kernels run in an interpreter
def test_rows_are_independent_and_logits_the_references(engine, folder):
    assert engine._hello.exactness == "bitwise"
    reference = VerifierEngine.load(
        folder, VerifierOptions(name="tiny", dtype=torch.float32, max_length=96, max_sessions=3)
    )
    ids = [(7 * at * at + 3 * at) % 256 for at in range(40)]
    tree = DraftTree.of([ids[-1], 5, 6, 7, 8], [-1, 0, 0, 1, 1])
    ours, theirs = engine.logits_of(ids, tree).cpu(), reference.logits_of(ids, tree)
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert torch.equal(ours.argmax(1), theirs.argmax(1))


@IN_INTERPRETER
@pytest.mark.timeout(300)
async def test_trees_and_other_texts_change_no_token(engine, folder):
    rng = np.random.default_rng(0)
    async with running(engine) as ours:
        truths = await alone(ours, PROMPTS, LAWS, COUNT)
        routers = [RoundByRound(ours, prompt, law, COUNT) for prompt, law in zip(PROMPTS, LAWS, strict=True)]
        trees = [guessing(rng, truth) for truth in truths]
        assert await asyncio.gather(*map(RoundByRound.finish, routers, trees)) == truths
        assert ours.stats()["guesses"] > 0 and ours.stats()["pages_held"] == 0
    # In float32, where no two logits are close, the reference draws the same tokens.
    reference = VerifierEngine.load(
        folder, VerifierOptions(name="tiny", dtype=torch.float32, max_length=96, max_sessions=3)
    )
    async with running(reference) as theirs:
        assert await alone(theirs, PROMPTS, LAWS, COUNT) == truths


@IN_INTERPRETER
@pytest.mark.timeout(300)
async def test_log_probabilities_are_those_of_each_tokens_own_row(engine):
    """Of the prompt and of the answer, with penalties that change what is drawn and no log-probability."""
    prompt, rng = list(range(3, 20)), np.random.default_rng(3)
    sampling = Sampling(temperature=0.8, seed=2, frequency_penalty=3.0, banned_ids=tuple(range(100, 200)))
    async with running(engine) as ours:
        plain = await RoundByRound(ours, prompt, sampling, COUNT).finish()
        router, trees, found = RoundByRound(ours, prompt, sampling, COUNT), guessing(rng, plain), []
        router.parameters = replace(router.parameters, logprobs=3, echo_from=1)
        found += (await router.open()).logprobs
        while len(router.text) < router.end:
            found += (await router.round(trees(router))).logprobs
        await router.close()
        assert router.answer == plain
    for place, its in enumerate(found, 1):
        ids = router.text.ids[:place]
        logits = engine.logits_of(ids, DraftTree.root_only(ids[-1]))[0]
        values = log_probabilities(logits.to(DEVICE)[None], torch.arange(len(logits), device=DEVICE)).tolist()
        order = sorted(range(len(values)), key=lambda token: (-float(logits[token]), token))[:3]
        assert its == TokenLogprobs(values[router.text.ids[place]], tuple((each, values[each]) for each in order))
    assert len(found) == len(prompt) - 1 + COUNT


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need an accelerator")
async def test_steps_without_prompt_rows_are_replayed_from_graphs(engine):
    recorded = dict(engine.runner.recordings.made)
    assert {shape.rows for shape in recorded} == set(engine.runner.buckets)
    async with running(engine) as ours:
        await alone(ours, PROMPTS, LAWS, COUNT)
    assert engine.runner.recordings.made == recorded  # all were recorded when the engine was loaded


# Graphs, with a recorder that runs steps again and can fail

IDS = (5, 6, 7, 8)


def runner_of(folder, graphs):
    target = load_target(folder, torch.float32, torch.device(DEVICE), (8, 16))
    near = near_window(3)
    return device_runner(target, Bounds(near, 4, 2, 2, 3, Arrangement.of(2, near, 3, 16)), (8, 16), graphs=graphs)


def without_a_model(runner):
    """Replace the runner's step by one that computes nothing."""
    nothing = torch.zeros(2, 4, dtype=torch.int64)
    runner._step = lambda shape, inputs: Drawn(nothing)
    return runner


def test_every_step_without_prompt_rows_is_recorded_at_load_the_largest_first(folder):
    graphs = RunAgain()
    runner = without_a_model(runner_of(folder, graphs))
    runner.warm_up()
    assert [(shape.rows, shape.drawing) for shape in runner.recordings.made] == [
        (16, 2),
        (16, 1),
        (16, 0),
        (8, 2),
        (8, 1),
        (8, 0),
    ]
    assert {shape.rows for shape in runner._ran if not shape.alone} == {8, 16}
    assert not runner.run(lone_round(runner, IDS)).cold and graphs.attempts == 6


def test_a_disturbed_recording_is_tried_again(folder):
    graphs = RunAgain(fails={0})
    runner = without_a_model(runner_of(folder, graphs))
    runner.warm_up()
    assert len(runner.recordings.made) == 6 and graphs.attempts == 7


def test_a_step_that_cannot_be_recorded_runs_without_a_graph_and_others_keep_theirs(folder, caplog):
    graphs = RunAgain(fails=range(3, 9))  # those of 8 rows, both attempts at each
    runner = without_a_model(runner_of(folder, graphs))
    runner.warm_up()
    assert [shape.rows for shape in runner.recordings.made] == [16, 16, 16] and graphs.attempts == 9
    assert caplog.text.count("steps of 8 rows run without a graph") == 3
    caplog.clear()
    runner.run(lone_round(runner, IDS))
    assert graphs.attempts == 9, "it is not tried again while serving"
    assert not caplog.text, "nor reported with every step"


def test_a_replayed_step_gives_the_walks_of_an_unrecorded_one(folder):
    graphs = RunAgain()
    runner = runner_of(folder, graphs)
    plain = runner_of(folder, None).run(lone_round(runner, IDS)).walks
    cold, warm = (runner.run(lone_round(runner, IDS)) for _ in range(2))
    assert cold.walks == warm.walks == plain
    assert cold.cold and not warm.cold and graphs.attempts == 1 and graphs.replays == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_with_a_history_runs_without_a_graph_and_each_row_has_its_own_path(folder, temperature):
    """The text has fewer tokens than its least length before its first guess, and the answer repeats tokens."""
    graphs, ids, sampling = RunAgain(), (5, 6, 7, 8), Sampling(temperature=temperature, seed=3)
    runner, warp = runner_of(folder, graphs), Warp(temperature)
    its = Processors(
        repetition_penalty=1.5,
        presence_penalty=1.0,
        frequency_penalty=2.0,
        ending=tuple(range(0, 200, 2)),
        min_length=5,
    )
    history = History(its, runner.target.vocabulary, 3)
    history.follow(ids, 0)

    def step(tree):
        return lone_round(runner, ids, tree, warp, sampling, history)

    def drawn(row, text):
        scores = processed(row, its, text, 3)[None]
        noise = gumbel_noise(3, [len(text)], len(row)) if temperature else None
        return int(tokens_of(scores, warp, noise)[0])

    with torch.inference_mode():
        first = drawn(runner.forward(step(DraftTree.root_only(8)))[0].cpu(), ids)
        tree = DraftTree.of([8, first, 8, first, first], [-1, 0, 0, 1, 2])
        logits = runner.forward(step(tree)).cpu()
    second, last = drawn(logits[1], (*ids, first)), drawn(logits[3], (*ids, first, first))
    walked = runner.run(step(tree)).walks[0]
    assert walked.tokens == ((first, second, last) if second == first else (first, second))
    assert not graphs.attempts


class FailingStructure:
    """Of which one call fails. It allows any token."""

    def __init__(self, part):
        self.part = part

    def masks(self, tree):
        if self.part == "masks":
            raise RuntimeError("planted")
        return TreeMasks(257, [Unmasked.COMPLETE] * tree.rows)

    def foresee(self, tokens):
        raise RuntimeError("planted")


def test_a_structure_that_raises_ends_its_draw_alone(folder):
    runner, ids, tree = runner_of(folder, RunAgain()), (5, 6, 7, 8), DraftTree.root_only(8)
    history = History(Processors(repetition_penalty=1.5), runner.target.vocabulary, 3)
    history.follow(ids, 0)

    def walks(structures):
        part = text_rows(ids, NO_ROWS, tree, runner.own_pages, runner.pages.scratch, runner.near)
        draws = [
            Draw(number, number, len(ids), tree, Warp(), Sampling(), history, structure=structure)
            for number, structure in enumerate(structures)
        ]
        plan = joined([part] * len(draws))
        return runner.run(replace(plan, wanted=np.arange(len(draws)), draws=tuple(draws))).walks

    alone, _ = walks([None, None])
    for part in ("masks", "foresee"):
        failed, other = walks([FailingStructure(part), None])
        assert isinstance(failed, EngineFailed) and "planted" in str(failed)
        assert other == alone


@pytest.mark.parametrize("mode", [VerificationMode.MULTI_STEP, VerificationMode.BLOCK])
def test_drawn_guesses_are_walked_on_the_host_and_their_keys_are_kept(folder, mode):
    """A drafter of the target's own law, of which the likeliest 32 tokens are left by top-k: guesses are accepted."""
    graphs, ids = RunAgain(), (5, 6, 7, 8)
    runner, walker, warp = runner_of(folder, graphs), Walker(257), Warp(1.0, top_k=8)
    sampling = Sampling(temperature=1.0, top_k=8, seed=3, mode=mode)

    def step(tree, sampling):
        return lone_round(runner, ids, tree, warp, sampling)

    def law_after(tree):
        with torch.inference_mode():
            logits = runner.forward(step(tree, sampling))[-1].cpu()
        best = logits.topk(8)
        return law_of_scores(best.indices.numpy(), best.values.double().numpy())

    tree, laws = DraftTree.root_only(8), []
    for row in range(2):
        law = law_after(tree)
        token = law.ids[drawn_order(law, draft_seed(3), len(ids), row)[0]]
        laws.append(ChildLaw(row, law.ids, law.probabilities))
        tree = DraftTree.of([*tree.tokens, token], range(-1, row + 1))
    tree = replace(tree, laws=tuple(laws))
    with torch.inference_mode():
        logits = runner.forward(step(tree, sampling)).cpu()
    expected = walker.walk(step(tree, sampling).draws[0], lambda row: logits[row : row + 1])
    plan = step(tree, sampling)
    walked = runner.run(plan).walks[0]
    assert walked == expected and len(walked.tokens) == 3 and not graphs.attempts
    for store in runner.pages.stores:
        kept, scratch = store[:, plan.homes[1:]], store[:, plan.slots[1:]]
        assert torch.equal(kept, scratch) and kept.abs().sum() > 0


def test_rows_that_only_pad_write_to_the_zero_page_alone(folder):
    runner = runner_of(folder, None)
    with torch.inference_mode():
        runner._warm(StepShape(8, 8, GREEDY, alone=True))
    assert not runner.pages.stores[0][:, PAGE:].any()


def test_a_target_whose_kernels_do_not_fit_on_the_device_is_refused_with_the_reason(folder, monkeypatch):
    def raising(*given):
        raise OutOfResources(147_456, 101_376, "shared memory")

    runner = runner_of(folder, RunAgain())
    monkeypatch.setattr(runner, "_whole_text", raising)
    reason = "checkpoint: a kernel for its sizes needs 147456 bytes of shared memory; .* has 101376"
    with pytest.raises(BadRequest, match=reason):
        runner.check_rows()


def test_checks_multiply_as_many_rows_by_the_head_as_steps_do(folder, monkeypatch):
    """On a CPU the head's rows are multiplied in blocks. A DeviceRunner's steps multiply them at once, and so do its
    checks."""
    runner = runner_of(folder, None)
    monkeypatch.setattr("verifier_service.runner.HEAD_ROWS", 8)
    asked = []
    logits = LoadedTarget.logits
    monkeypatch.setattr(LoadedTarget, "logits", lambda self, *rows: asked.append(len(rows[2])) or logits(self, *rows))
    runner.tree_logits([5, 6, 7], DraftTree.of([7, *range(9, 20)], [-1, *range(11)]))
    assert asked[-1] == 16


class Copying:
    """An event: the upload is being read until `synchronize` is called."""

    def __init__(self):
        self.inputs, self.waited, self.reading = None, [], None

    def record(self):
        self.reading = self.inputs.host["a"].copy()

    def synchronize(self):
        if self.reading is not None:
            self.waited.append(np.array_equal(self.inputs.host["a"], self.reading))
            self.reading = None


def test_host_arrays_are_not_rewritten_before_the_device_has_read_them():
    copied = Copying()
    inputs = copied.inputs = StepBuffers({"a": (3,)}, torch.int64, torch.device("cpu"), copied)
    inputs.clear()
    inputs.host["a"][:] = 7
    inputs.upload()
    inputs.clear()
    assert copied.waited == [True] and not inputs.host["a"].any()
    assert inputs.device["a"].tolist() == [7, 7, 7]
