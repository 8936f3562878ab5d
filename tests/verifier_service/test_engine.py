"""The verifier engine: with any trees, other texts, dropped verdicts and re-openings, tokens as in plain decoding."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dendro.calls import CloseCall, OpenCall, RequestParameters, TextUpdate, VerifyCall, new_opening
from dendro.errors import BadRequest, EngineFailed, NotFound, PeerLost
from dendro.text import Finish, Limits, Sampling, Tokens
from dendro.tree import DraftTree
from transformers import AutoModelForCausalLM

from tests.support.engines import running
from tests.support.exactness import announces_what_it_must
from tests.support.tiny_models import END, FAMILIES, VOCABULARY, make_checkpoint
from verifier_service.engine import VerifierEngine, _hello_of
from verifier_service.models import load_target
from verifier_service.options import VerifierOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT = [(7 * at * at + 3 * at) % 256 for at in range(75)]
WARM = Sampling(temperature=0.7, top_k=50, top_p=0.9, seed=2**63 + 5)
HOT = Sampling(temperature=1.0, seed=11, sample_index=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for seed, family in enumerate(FAMILIES):
        folder = tmp_path_factory.mktemp(family)
        made[family] = (folder, make_checkpoint(folder, family, seed))
    return made


@pytest.fixture(scope="module")
def loaded(folders):
    """One engine per family and dtype; the tests open and close what they need."""
    kept = {}

    def load(family="llama", dtype="fp32"):
        if (family, dtype) not in kept:
            kept[family, dtype] = VerifierEngine.load(
                folders[family][0], VerifierOptions(name="tiny", dtype=DTYPES[dtype], max_length=512, max_sessions=12)
            )
        return kept[family, dtype]

    return load


class TextRouter:
    """A text and the calls that a router makes for it."""

    def __init__(self, engine, prompt=PROMPT, sampling=None, limits=None):
        self.engine = engine
        self.text = Tokens()
        self.text.extend(prompt)
        self.parameters = RequestParameters(sampling or Sampling(), limits or Limits(400, ignore_end=True), "", ())
        self.opening = new_opening()
        self.known = 0

    def update(self, start=None):
        return TextUpdate.of(self.opening, self.text, self.known if start is None else start)

    async def open(self):
        self.opening, self.known = new_opening(), 0
        answer = await self.engine.open(OpenCall(self.update(), self.parameters))
        self.known = len(self.text)
        return answer

    async def verify(self, tree=None, start=None):
        tree = tree or DraftTree.root_only(self.text.ids[-1])
        verdict = await self.engine.verify(VerifyCall(self.update(start), tree))
        self.known = len(self.text)
        return verdict

    async def round(self, tree=None, keep=None):
        verdict = await self.verify(tree)
        self.text.extend(verdict.tokens[:keep])
        return verdict

    async def close(self):
        return await self.engine.close(CloseCall(self.update()))


async def plain(engine, count, prompt=PROMPT, sampling=None):
    """The answer by root-only rounds."""
    router = TextRouter(engine, prompt, sampling)
    await router.open()
    for _ in range(count):
        await router.round()
    await router.close()
    return router.text.ids[len(prompt) :]


def random_tree(rng, root, truth, depth=16, rows=40):
    """A tree with wrong guesses that has each next level of the true continuation with probability 0.85."""
    tokens, parents, level = [root], [-1], [0]
    right = 0
    for step in range(int(rng.integers(0, depth + 1))):
        below = []
        for parent in level:
            siblings = set(rng.integers(0, 256, int(rng.integers(0, 4))).tolist())
            if parent == right and step < len(truth) and rng.random() < 0.85:
                siblings.add(truth[step])
            for token in sorted(siblings, key=lambda token: (token * 7919) % 251):
                if len(tokens) < rows:
                    tokens.append(token)
                    parents.append(parent)
                    below.append(len(tokens) - 1)
        right = next((r for r in below if parents[r] == right and step < len(truth) and tokens[r] == truth[step]), -1)
        level = [row for row in below if row == right] + [row for row in below if row != right][:3]
    return DraftTree.of(tokens, parents)


async def by_trees(engine, truth, prompt=PROMPT, sampling=None, seed=0, count=None):
    """An answer as long as `truth`, by random trees; returns it with the number of rounds."""
    rng = np.random.default_rng(seed)
    router = TextRouter(engine, prompt, sampling)
    await router.open()
    rounds, count = 0, count or len(truth)
    while (done := len(router.text) - len(prompt)) < count:
        await router.round(random_tree(rng, router.text.ids[-1], truth[done:]))
        rounds += 1
    await router.close()
    return router.text.ids[len(prompt) :][:count], rounds


# The target


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_librarys_within_2e_3_and_argmax_equal(loaded, folders, family):
    engine, model = loaded(family), folders[family][1]
    rng = np.random.default_rng(1)
    for length in (1, 5, 64, 200):
        ids = rng.integers(0, 256, length).tolist()
        tree = random_tree(rng, ids[-1], rng.integers(0, 256, 16).tolist())
        ours = engine.logits_of(ids, tree)
        assert ours.shape == (tree.rows, VOCABULARY)
        for row in range(tree.rows):
            path = ids + tree.tokens[tree.path_to(row)[1:]].tolist()
            with torch.inference_mode():
                theirs = model(torch.tensor([path])).logits[0, -1, :VOCABULARY]
            assert (ours[row] - theirs).abs().max() < 2e-3
            assert ours[row].argmax() == theirs.argmax()


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_answers_are_the_librarys_generate(loaded, folders, family):
    folder, _ = folders[family]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([PROMPT])
    bad = list(range(VOCABULARY, 264))
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False, suppress_tokens=bad
    )[0, len(PROMPT) :].tolist()
    async with running(loaded(family)) as engine:
        assert await plain(engine, 80) == theirs
        answer, rounds = await by_trees(engine, theirs)
        assert answer == theirs
        assert rounds < 60


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_chunk_and_plain_forwards_have_the_same_bits(loaded, family, dtype):
    """Every row of a tree against the same path as committed text, whose prompt is cut into chunks elsewhere."""
    engine = loaded(family, dtype)
    rng = np.random.default_rng(4)
    for length in (1, 2, 16, 17, 64, 65, 200):
        ids = rng.integers(0, 256, length).tolist()
        tree = random_tree(rng, ids[-1], rng.integers(0, 256, 16).tolist())
        logits = engine.logits_of(ids, tree)
        for row in {0, tree.rows // 2, tree.rows - 1}:
            path = ids + tree.tokens[tree.path_to(row)[1:]].tolist()
            assert torch.equal(engine.logits_of(path, DraftTree.root_only(path[-1]))[0], logits[row])


async def test_start_check_announces_bitwise_wherever_products_have_forms(loaded):
    for family in FAMILIES:
        for dtype in DTYPES:
            hello = await loaded(family, dtype).hello()
            announces_what_it_must(loaded(family, dtype))
            assert (hello.vocabulary, hello.end_ids) == (VOCABULARY, (END,))


# Trees and other texts change no token


@pytest.mark.parametrize("sampling", [Sampling(), WARM, HOT], ids=["greedy", "warm", "hot"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_random_trees_answer_token_for_token_as_plain_decoding(loaded, dtype, sampling):
    async with running(loaded("llama", dtype)) as engine:
        truth = await plain(engine, 256, sampling=sampling)
        for seed in (1, 2):
            answer, rounds = await by_trees(engine, truth, sampling=sampling, seed=seed)
            assert answer == truth
            assert rounds < 200


async def test_many_sessions_at_once_answer_as_each_does_alone(loaded):
    prompts = [PROMPT[:length] for length in (1, 2, 15, 30, 60, 75)] + [PROMPT * 4, PROMPT[::-1]]
    async with running(loaded("llama", "bf16")) as engine:
        alone = [await plain(engine, 40, prompt, WARM) for prompt in prompts]
        together = await asyncio.gather(
            *(
                by_trees(engine, truth, prompt, WARM, seed)
                for seed, (truth, prompt) in enumerate(zip(alone, prompts, strict=True))
            )
        )
        assert [answer for answer, _ in together] == alone


async def test_seeds_and_sample_indices_give_other_answers(loaded):
    async with running(loaded()) as engine:
        answers = [
            await plain(engine, 20, sampling=sampling)
            for sampling in (Sampling(1.0, seed=1), Sampling(1.0, seed=2), Sampling(1.0, seed=1, sample_index=1))
        ]
        assert len(set(map(tuple, answers))) == 3


# What a router may do


async def test_part_of_a_verdict_may_be_dropped(loaded):
    async with running(loaded()) as engine:
        truth = await plain(engine, 40)
        router = TextRouter(engine)
        await router.open()
        kept = 0
        while kept < 24:
            tokens, parents = [router.text.ids[-1], *truth[kept : kept + 8]], list(range(-1, 8))
            verdict = await router.round(DraftTree.of(tokens, parents), keep=3)
            assert verdict.tokens == tuple(truth[kept : kept + 9])
            kept += 3
        await router.close()


async def test_text_that_was_not_drawn_may_follow_a_verdict(loaded):
    """The router owns the text: it may go on with other tokens than the verdict's, or from an older text."""
    async with running(loaded()) as engine:
        router = TextRouter(engine)
        await router.open()
        await router.round()
        forced = [9, 8, 7]
        router.text.extend(forced)
        for _ in range(3):
            await router.round()
        assert router.text.ids[76:][3:] == await plain(engine, 3, router.text.ids[:79])
        await router.close()


async def test_a_verdict_can_be_requested_again(loaded):
    async with running(loaded()) as engine:
        truth = await plain(engine, 12)
        router = TextRouter(engine)
        await router.open()
        tree = DraftTree.of([PROMPT[-1], *truth[:4]], range(-1, 4))
        first = await router.verify(tree)
        again = await router.verify(tree, start=len(PROMPT) - 5)
        assert first.tokens == again.tokens == tuple(truth[:5])
        assert (first.path, first.ranks, first.length) == (again.path, again.ranks, again.length)
        await router.close()


async def test_a_text_opened_again_midway_goes_on_with_the_same_tokens(loaded):
    async with running(loaded("llama", "bf16")) as engine:
        truth = await plain(engine, 30, sampling=WARM)
        router = TextRouter(engine, sampling=WARM)
        opened = await router.open()
        assert opened.restored + opened.processed == len(PROMPT) - 1
        while len(router.text) < len(PROMPT) + 30:
            done = len(router.text) - len(PROMPT)
            await router.round(
                DraftTree.of([router.text.ids[-1], *truth[done : done + 3]], range(-1, len(truth[done : done + 3])))
            )
            if done > 10 and done % 2:
                await router.close()
                opened = await router.open()
                assert opened.restored + opened.processed == len(router.text) - 1
        assert router.text.ids[len(PROMPT) :][:30] == truth
        await router.close()


async def test_two_openings_of_one_text_are_independent(loaded):
    async with running(loaded()) as engine:
        routers = [TextRouter(engine, sampling=HOT) for _ in range(2)]
        await asyncio.gather(*(router.open() for router in routers))
        for _ in range(5):
            await asyncio.gather(*(router.round() for router in routers))
        await routers[0].close()
        await routers[1].round()
        assert routers[1].text.ids[:-1] == routers[0].text.ids
        await routers[1].close()


async def test_an_answer_ends_at_the_end_of_text_and_at_its_limit(loaded):
    async with running(loaded()) as engine:
        truth = await plain(engine, 12)
        limit = TextRouter(engine, limits=Limits(len(PROMPT) + 3, ignore_end=True))
        await limit.open()
        verdict = await limit.verify(DraftTree.of([PROMPT[-1], *truth[:8]], range(-1, 8)))
        assert (verdict.tokens, verdict.finish, verdict.length) == (tuple(truth[:3]), Finish.LENGTH, 9)
        await limit.close()
        hello = await engine.hello()
        assert hello.end_ids == (END,)


async def test_a_verdict_reports_its_times(loaded):
    async with running(loaded()) as engine:
        router = TextRouter(engine)
        assert (await router.open()).open_us > 0
        verdict = await router.verify()
        assert verdict.verify_us > 0
        assert verdict.queue_us >= 0
        await router.close()


# What is refused

BAD_TREES = {
    "another root": ([PROMPT[-1] + 1], [-1], "tree.tokens: begins with"),
    "past the vocabulary": ([PROMPT[-1], VOCABULARY], [-1, 0], "tree.tokens: a token lies outside"),
    "too deep": ([PROMPT[-1], *range(17)], range(-1, 17), "tree.parents: depth 17"),
    "too many rows": ([PROMPT[-1], *range(40)], [-1] + [0] * 40, "tree.tokens: 41 rows"),
}


async def test_bad_trees_are_refused_and_the_opening_stays_open(folders):
    engine = VerifierEngine.load(folders["llama"][0], VerifierOptions(name="t", dtype=torch.float32, max_rows=40))
    async with running(engine) as engine:
        truth = await plain(engine, 8)
        router = TextRouter(engine)
        await router.open()
        for at, (tokens, parents, message) in enumerate(BAD_TREES.values()):
            root = router.text.ids[-1]
            shifted = [(root + 1) % 256 if at == 0 else root, *tokens[1:]]
            with pytest.raises(BadRequest, match=message):
                await router.engine.verify(VerifyCall(router.update(), DraftTree.of(shifted, parents)))
            await router.round()
        assert router.text.ids[len(PROMPT) :] == truth[: len(BAD_TREES)]
        await router.close()


async def test_unknown_openings_and_differing_texts_are_not_found(loaded):
    async with running(loaded()) as engine:
        router = TextRouter(engine)
        with pytest.raises(NotFound, match="opening"):
            await router.verify()
        with pytest.raises(NotFound, match="opening"):
            await router.close()
        await router.open()
        update = router.update()
        wrong = TextUpdate(update.opening, update.base, update.digest ^ 1, update.start, update.tokens)
        with pytest.raises(NotFound, match="digest"):
            await engine.verify(VerifyCall(wrong, DraftTree.root_only(PROMPT[-1])))
        ahead = TextUpdate(update.opening, update.base + 9, update.digest, update.base + 9, ())
        with pytest.raises(NotFound):
            await engine.verify(VerifyCall(ahead, DraftTree.root_only(PROMPT[-1])))
        assert (await router.verify()).tokens
        await router.close()


@pytest.mark.parametrize(
    ("prompt", "limits", "message"),
    [
        ([], Limits(10), "text: is empty"),
        ([1] * 600, Limits(700), "text: has 600 tokens"),
        ([1, VOCABULARY], Limits(10), "text: has a token outside"),
        ([1], Limits(513), "limits.max_length: 513 tokens"),
        ([1, 2, 3], Limits(3), "limits.max_length: 3 tokens leave no room"),
    ],
)
async def test_texts_that_cannot_be_served_are_refused_with_the_numbers(loaded, prompt, limits, message):
    async with running(loaded()) as engine:
        with pytest.raises(BadRequest, match=message):
            await TextRouter(engine, prompt, limits=limits).open()


async def test_a_caller_that_goes_away_frees_its_place(loaded, monkeypatch):
    async with running(loaded()) as engine:
        truth = await plain(engine, 3)
        router = TextRouter(engine)
        await router.open()
        steps, run, stuck, goes_on = [], engine.runner.run, threading.Event(), threading.Event()

        def held(plan):
            """Keep the first step, so that no call is answered before all of them are cancelled."""
            steps.append(plan)
            stuck.set()
            assert goes_on.wait(60)
            return run(plan)

        monkeypatch.setattr(engine.runner, "run", held)
        gone = [asyncio.ensure_future(TextRouter(engine, PROMPT * 5).open()) for _ in range(6)]
        waiting = asyncio.ensure_future(router.verify())
        await asyncio.to_thread(stuck.wait, 60)  # the first step has some of the texts, the others wait
        for task in (*gone, waiting):
            task.cancel()
        await asyncio.gather(*gone, waiting, return_exceptions=True)
        assert all(task.cancelled() for task in (*gone, waiting)) and len(steps) == 1
        goes_on.set()
        for _ in range(3):
            await router.round()
        assert router.text.ids[len(PROMPT) :] == truth
        await router.close()
        assert not engine.scheduler.sessions


async def test_a_step_that_fails_loses_its_texts_and_no_others(loaded, monkeypatch):
    async with running(loaded()) as engine:
        lost, kept = TextRouter(engine), TextRouter(engine)
        await lost.open()
        await kept.open()
        run = engine.runner.run

        def broken(plan):
            raise RuntimeError("the device is on fire")

        monkeypatch.setattr(engine.runner, "run", broken)
        with pytest.raises(EngineFailed, match="on fire"):
            await lost.verify()
        monkeypatch.setattr(engine.runner, "run", run)
        with pytest.raises(NotFound):
            await lost.verify()
        assert (await kept.verify()).tokens
        await kept.close()


@pytest.mark.parametrize("method", ["next", "apply"])
async def test_a_fault_of_the_scheduler_ends_its_texts_and_not_the_replica(loaded, monkeypatch, method):
    async with running(loaded()) as engine:
        lost, later = TextRouter(engine), TextRouter(engine)
        await lost.open()

        def broken(*_):
            monkeypatch.undo()
            raise RuntimeError("a fault of ours")

        monkeypatch.setattr(engine.scheduler, method, broken)
        with pytest.raises(EngineFailed, match="a fault of ours"):
            await lost.verify()
        await later.open()
        assert (await later.verify()).tokens
        await later.close()


async def test_an_engine_whose_thread_has_ended_reports_a_fault_and_fails_its_calls(loaded, monkeypatch):
    """Serve then replaces the replica."""
    async with running(loaded()) as engine:

        def broken(*_):
            raise RuntimeError("a fault of ours")

        router = TextRouter(engine)
        await router.open()
        assert engine.fault() == ""
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "next", broken)
            patch.setattr(engine._thread, "_end_texts", broken)
            with pytest.raises(PeerLost, match="its thread has ended"):
                await router.verify()
            async with asyncio.timeout(5):
                assert await engine.lost() == engine.fault() == "its thread has ended"
        engine.scheduler.give_up(PeerLost("the end of the test"))


async def test_calls_pending_at_stop_fail_with_peer_lost(loaded, monkeypatch):
    async with running(loaded()) as engine:
        router = TextRouter(engine)
        await router.open()
        run, goes_on = engine.runner.run, threading.Event()
        monkeypatch.setattr(engine.runner, "run", lambda plan: goes_on.wait(60) and run(plan))
        waiting = asyncio.ensure_future(router.verify())
        await asyncio.sleep(0)  # the call is in the engine's inbox
        stopping = asyncio.ensure_future(engine.stop())
        with pytest.raises(PeerLost, match="stopped"):
            await waiting
        goes_on.set()
        await stopping
        with pytest.raises(PeerLost, match="stopped"):
            await router.verify()


# Checkpoints


def broken(folder, copy, **changes):
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba9"}, "state-space mixer of a kind that is not supported"),
        ({"model_type": "plamo", "mamba_d_state": 8}, "state-space mixer"),
        ({"layer_types": ["linear_attention"] * 3}, "linear attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rotary embeddings .*type longrope"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rotary embeddings .*type dynamic"),
        ({"model_type": "no-such-model"}, "no-such-model has no causal language model"),
        ({"num_hidden_layers": 4}, "tensors are missing"),
    ],
)
def test_unsupported_checkpoints_are_refused_with_the_reason(folders, tmp_path, changes, message):
    with pytest.raises(BadRequest, match=f"checkpoint: .*{message}"):
        load_target(broken(folders["llama"][0], tmp_path / "c", **changes), torch.float32, torch.device("cpu"), [8])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folders, tmp_path, name):
    folder = broken(folders["llama"][0], tmp_path / "c")
    (folder / name).unlink()
    with pytest.raises(BadRequest, match=f"checkpoint: .*{name}"):
        load_target(folder, torch.float32, torch.device("cpu"), [8])


def test_damaged_weights_are_refused(folders, tmp_path):
    folder = broken(folders["llama"][0], tmp_path / "c")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadRequest, match="checkpoint: .*cannot be loaded"):
        load_target(folder, torch.float32, torch.device("cpu"), [8])


async def test_an_answer_does_not_continue_on_another_kind_of_device(loaded, monkeypatch):
    """Its bits are others there, whether or not both run this project's arithmetic."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    engine = loaded()
    target, options = engine.runner.target, VerifierOptions(name="tiny", dtype=torch.float32)
    at_gpu = replace(target, model=SimpleNamespace(device=torch.device("cuda", 1)))
    there = _hello_of(options, at_gpu, "bitwise", ())
    here = _hello_of(options, target, "bitwise", ())
    assert here.target == replace(await engine.hello(), exactness="bitwise").target
    assert there.target != here.target
    assert there.target == _hello_of(options, at_gpu, "bitwise", (8,)).target
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "another GPU")
    assert there.target != _hello_of(options, at_gpu, "bitwise", ()).target


def test_fingerprints_name_the_arithmetic_and_the_forms_of_the_products(loaded, monkeypatch):
    """No text, answer or state goes on where the bits are others."""
    runner = loaded("llama", "bf16").runner
    options, target = VerifierOptions(name="t"), runner.target
    here = _hello_of(options, target, "bitwise", ())
    others = replace(target, linear=replace(target.linear, forms={"another form": 1}))
    assert _hello_of(options, others, "bitwise", ()).fingerprint != here.fingerprint
    monkeypatch.setattr("verifier_service.engine.ARITHMETIC", -1)
    assert _hello_of(options, target, "bitwise", ()).fingerprint != here.fingerprint


@pytest.mark.parametrize("by_parts", [False, True])
def test_fingerprints_tell_the_librarys_arithmetic_unless_all_parts_are_our_own(loaded, monkeypatch, by_parts):
    """A router's softmax has other bits with AVX2 than with AVX-512; so may a norm or an activation of the library."""
    target = loaded().runner.target
    assert target.direct is not None
    target = target if by_parts else replace(target, direct=None)
    here = _hello_of(VerifierOptions(name="t"), target, "bitwise", ()).fingerprint
    monkeypatch.setattr("verifier_service.models.library_digest", lambda: "elsewhere")
    assert (_hello_of(VerifierOptions(name="t"), target, "bitwise", ()).fingerprint == here) is by_parts


def test_fingerprints_tell_the_cosines_of_rotary_embeddings(loaded, monkeypatch):
    """They are torch's in every target."""
    target = loaded().runner.target
    here = _hello_of(VerifierOptions(name="t"), target, "bitwise", ()).fingerprint
    monkeypatch.setattr(target.direct, "rotation_digest", "elsewhere")
    assert _hello_of(VerifierOptions(name="t"), target, "bitwise", ()).fingerprint != here


def test_the_fingerprint_of_a_sharded_target_tells_the_arithmetic_of_every_worker(loaded):
    target, options = loaded().runner.target, VerifierOptions(name="t", tensor_parallel=3)
    own, here = target.arithmetic, _hello_of(options, target, "bitwise", ()).fingerprint
    others = [[own, own], ["elsewhere", own], [own, "elsewhere"]]
    found = [_hello_of(options, target, "bitwise", (), each).fingerprint for each in others]
    assert found[0] == here and len(set(found)) == 3


def test_fingerprints_identify_weights_and_tokenizer(loaded, folders, tmp_path):
    first = load_target(folders["llama"][0], torch.float32, torch.device("cpu"), [8])
    make_checkpoint(tmp_path, "llama", seed=9)
    other = load_target(tmp_path, torch.float32, torch.device("cpu"), [8])
    assert first.fingerprint != other.fingerprint
    assert first.facts.tokenizer == other.facts.tokenizer
    assert first.fingerprint == loaded("llama", "bf16").runner.target.fingerprint
