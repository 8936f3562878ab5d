"""Trees that a drafter prepares before they are asked for: a call gets the tree that it gets without, and whatever
becomes of a text, nothing that was prepared for it stays."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dendro.calls import PreparedTree
from dendro.errors import NotFound
from dendro.shapes import BeamShape, DynamicShape, LevelShape, NodeShape
from dendro.state import MemoryStates
from dendro.text import Sampling, Tokens
from dendro.tree import DraftTree

from drafter_service import prepared
from drafter_service.confidence import Calibration
from drafter_service.engine import DrafterEngine
from drafter_service.grow import growth_of
from drafter_service.plan import OneForward
from drafter_service.prepared import LONGEST_REST, MISSES, MOST, Outcome, Preparations, likely_outcomes
from drafter_service.runner import DraftRunner
from tests.support.opened_texts import OpenedText, drafter_of
from tests.support.tiny_drafters import FAMILIES, VOCABULARY, make_drafter

CHAIN, TREE = LevelShape((1, 1, 1)), LevelShape((3, 2, 1))
SHAPES = TREE, CHAIN, NodeShape((3, 2, 0, 1, 0, 2, 1)), BeamShape(4, 3), DynamicShape(3, 4, 7)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, seed=99, sample_index=1)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


@pytest.fixture(autouse=True)
def every_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare trees for unlikely outcomes, too: those of untrained drafters are all unlikely."""
    monkeypatch.setattr(prepared, "LEAST", 0.0)


class Idle:
    """Says when an engine's thread has nothing left to do: neither calls nor noise nor trees to prepare."""

    def __init__(self, engine: DrafterEngine) -> None:
        self._waits = threading.Event()
        self._thread, self._step = engine._thread, engine._thread._step
        engine._thread._step = self._watched

    def _watched(self) -> float | None:
        wait_s = self._step()
        if wait_s is None:
            self._waits.set()
        return wait_s

    async def __call__(self) -> None:
        """Wait for a step that leaves nothing to do and begins after all calls before this one, also those that were
        answered without a step."""
        await asyncio.to_thread(self._thread.run, self._waits.clear)
        await asyncio.to_thread(self._waits.wait)


@asynccontextmanager
async def both_of(path: Path, **options: Any) -> AsyncIterator[tuple[DrafterEngine, DrafterEngine, Idle]]:
    """A drafter that prepares trees, one that does not, and how to wait until the first has prepared all it will. At
    the end both have saved the same memories of the texts that were closed."""
    stores = MemoryStates(), MemoryStates()
    async with (
        drafter_of(path, stores[0], draft_ahead=True, **options) as ahead,
        drafter_of(path, stores[1], **options) as plain,
    ):
        yield ahead, plain, Idle(ahead)
    stats = ahead.stats()
    assert stats["prepared"] == stats["prepared_used"] + stats["prepared_dropped"]
    assert stats["prepared_us"] >= stats["prepared_used_us"] > 0
    assert stores[0].blobs == stores[1].blobs and stores[0].blobs


def outcomes_of(engine: DrafterEngine, text: OpenedText) -> list[list[int]]:
    """The tokens that a text may get for which the idle engine has prepared trees."""
    scheduler = engine._scheduler
    return [list(each.guessed) for each in scheduler.prepared_of(scheduler._sessions[text.opening])]


async def test_a_call_gets_its_prepared_tree_though_the_next_forward_never_ends(tmp_path, monkeypatch):
    make_drafter(tmp_path, "mamba2")
    gate = threading.Event()
    async with drafter_of(tmp_path, draft_ahead=True, closed=False) as engine:
        text, idle = OpenedText(engine, prompt_of(12, 0)), Idle(engine)
        await text.open()
        await text.draft(CHAIN)
        await idle()
        text.ids += outcomes_of(engine, text)[0]
        run = engine._runner.run
        monkeypatch.setattr(engine._runner, "run", lambda plan: gate.wait(60) and run(plan))
        try:
            async with asyncio.timeout(20):
                assert (await text.draft(CHAIN)).guesses == CHAIN.depth
        finally:
            gate.set()
        assert engine.stats()["prepared_used"] == 1


def check_same(one: DraftTree, other: DraftTree) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.parents.tolist() == other.parents.tolist()
    np.testing.assert_array_equal(one.values, other.values)
    assert one.trace.tolist() == other.trace.tolist()


async def abandon(text: OpenedText) -> None:
    text.engine.forget(text.opening)
    with pytest.raises(NotFound):
        await text.draft(LevelShape((1,)))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("form", ["auto", "eager"])
async def test_prepared_trees_and_the_texts_memory_are_those_of_drafting_after_the_call(path, sampling, form):
    rng = random.Random(5)
    rounds = 2 if "hybrid" in str(path) else 4
    async with both_of(path, form=form) as (ahead, plain, idle):
        for seed, shape in enumerate(SHAPES):
            texts = [OpenedText(engine, prompt_of(1 + 6 * seed, seed), sampling) for engine in (ahead, plain)]
            for text in texts:
                await text.open()
            for _ in range(rounds):
                check_same(*[await text.draft(shape) for text in texts])
                await idle()
                found = outcomes_of(ahead, texts[0])
                assert len(found) == MOST
                tokens = rng.choice(found)
                for text in texts:
                    text.ids.extend(tokens)
            for text in texts:
                await text.close()
        assert ahead.stats()["prepared_used"] == len(SHAPES) * (rounds - 1)
        assert plain.stats()["prepared"] == 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_trees_sent_before_their_calls_are_those_of_the_calls_and_named_by_their_texts(path, sampling):
    rng, sent = random.Random(7), list[PreparedTree]()
    async with both_of(path) as (ahead, plain, idle):
        texts = [OpenedText(engine, prompt_of(9, 3), sampling) for engine in (ahead, plain)]
        for text in texts:
            await text.open()
        for _ in range(4):
            trees = [
                await texts[0].draft(TREE, prepared_from=1e-9, take_prepared=sent.append),
                await texts[1].draft(TREE),
            ]
            check_same(*trees)
            await idle()
            outcomes = outcomes_of(ahead, texts[0])
            assert len(sent) == len(outcomes) == MOST
            chosen = rng.randrange(MOST)
            for text in texts:
                text.ids.extend(outcomes[chosen])
            found, digest = sent[chosen], Tokens(texts[0].ids).digest()
            assert (found.opening, found.base, found.digest) == (texts[0].opening, len(texts[0].ids), digest)
            trees = [await text.draft(TREE) for text in texts]
            check_same(*trees)
            check_same(found.tree, trees[0])
            sent.clear()
            await idle()
            assert not sent, "the last call did not say that its caller takes any"
            token = rng.randrange(VOCABULARY)
            for text in texts:
                text.ids.append(token)
        for text in texts:
            await text.close()
        assert ahead.stats()["prepared_sent"] == 4 * MOST


async def test_only_trees_of_outcomes_as_likely_as_the_call_says_are_sent_before_theirs(paths):
    sent = list[PreparedTree]()
    async with drafter_of(paths["mamba2"], draft_ahead=True) as engine:
        idle, text = Idle(engine), OpenedText(engine, prompt_of(9, 3))
        await text.open()
        (session,) = engine._scheduler._sessions.values()
        least = 1e-9
        for turn in range(3):
            await text.draft(TREE, prepared_from=least, take_prepared=sent.append)
            await idle()
            chances = [each.outcome.chance for each in engine._scheduler.prepared_of(session)]
            assert len(sent) == sum(chance >= least for chance in chances) and len(chances) == MOST
            sent.clear()
            text.ids.append(5 + turn)
            least = sorted(chances)[MOST // 2]
        for none in (0.0, math.nan, 2.0):
            await text.draft(TREE, prepared_from=none, take_prepared=sent.append)
            await idle()
            assert not sent
            text.ids.append(5)
        await text.close()


@pytest.mark.parametrize("longest_chain", [0, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_to_texts_in_little_memory_trees_and_memories_are_those_without_preparing(
    paths, seed, longest_chain, monkeypatch
):
    """Texts go on by a prepared outcome or otherwise, before or after all is prepared; are drafted with another shape,
    cut, closed and abandoned. Two or four text slots are left by two texts at times, and node slots for few trees.
    Chains of up to `longest_chain` tokens end before their roots."""
    if longest_chain:
        changed = OneForward(levels=False, longest_chain=longest_chain)
        monkeypatch.setattr(DraftRunner, "one_forward", lambda runner, session: changed)
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    async with both_of(paths[family], max_sessions=2 + seed % 2, max_rows=8) as (ahead, plain, idle):
        texts: list[list[OpenedText]] = []
        for step in range(60):
            if len(texts) < 2 and (not texts or rng.random() < 0.3):
                sampling = rng.choice([GREEDY, SAMPLED])
                prompt = prompt_of(rng.randint(1, 20), step)
                opened = [OpenedText(engine, list(prompt), sampling) for engine in (ahead, plain)]
                for text in opened:
                    await text.open()
                texts.append(opened)
            pair = rng.choice(texts)
            shape = rng.choice([*[LevelShape((2, 1))] * 4, DynamicShape(2, 3, 5)])
            check_same(*[await text.draft(shape) for text in pair])
            if rng.random() < 0.8:
                await idle()
            found = outcomes_of(ahead, pair[0])
            known, ends, place = rng.random() < 0.8, rng.random(), rng.randrange(MOST)
            tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))]
            if known and found:
                tokens = found[place % len(found)]
            for text in pair:
                if ends < 0.1:
                    text.ids[len(text.ids) // 2 + 1 :] = []
                    text.held = min(text.held, len(text.ids))
                text.ids.extend(tokens)
                if 0.1 < ends < 0.2:
                    await text.close()
                elif 0.2 < ends < 0.25:
                    await abandon(text)
            if 0.1 < ends < 0.25:
                texts.remove(pair)
        for pair in texts:
            for text in pair:
                await text.close()
        assert ahead.stats()["prepared_used"] >= 1


async def test_a_tree_is_prepared_again_with_the_chances_that_other_texts_have_taught_since(paths):
    async with both_of(paths["mamba2"]) as (ahead, plain, idle):
        for shape in SHAPES:
            before = ahead.stats()["prepared_used"]
            firsts, others = ([OpenedText(engine, prompt_of(9, n)) for engine in (ahead, plain)] for n in (1, 2))
            for text in (*firsts, *others):
                await text.open()
            check_same(*[await text.draft(shape) for text in firsts])
            await idle()
            tokens = outcomes_of(ahead, firsts[0])[-1]
            for count in range(3):  # teaches the calibration
                for text in others:
                    text.ids.extend([count, 5])
                check_same(*[await text.draft(TREE) for text in others])
            for text in firsts:
                text.ids.extend(tokens)
            check_same(*[await text.draft(shape) for text in firsts])
            if shape.levels if isinstance(shape, LevelShape) else isinstance(shape, NodeShape):
                assert ahead.stats()["prepared_used"] == before + 1  # another form cannot follow from other chances
            for text in (*firsts, *others):
                await text.close()


async def test_no_tree_is_prepared_for_a_text_whose_keys_take_long_to_copy(tmp_path, monkeypatch):
    """A prepared text is a fork: where a drafter attends, the keys of the whole text are copied for each."""
    make_drafter(tmp_path, "llama")
    monkeypatch.setattr("drafter_service.engine.MOST_FORKED", 100 * 256)  # the keys of 100 tokens
    async with drafter_of(tmp_path, draft_ahead=True) as engine:
        idle = Idle(engine)
        for length in (12, 200):
            text = OpenedText(engine, prompt_of(length, 0))
            await text.open()
            await text.draft(CHAIN)
            await idle()
            assert bool(outcomes_of(engine, text)) is (length == 12)
            await text.close()


async def test_a_prepared_forward_that_fails_ends_no_text_and_leaves_nothing(paths, monkeypatch):
    async with drafter_of(paths["mamba2"], draft_ahead=True) as engine:
        idle, text = Idle(engine), OpenedText(engine, prompt_of(9, 1))
        await text.open()
        run = engine._runner.run

        def failing(plan):
            if engine._scheduler.planned_prepared is not None:
                raise RuntimeError("planted")
            return run(plan)

        monkeypatch.setattr(engine._runner, "run", failing)
        first = await text.draft(TREE)
        await idle()
        assert outcomes_of(engine, text) == [] and engine.stats()["prepared_dropped"] == 1
        check_same(await text.draft(TREE), first)
        await text.close()


@pytest.mark.parametrize("ends", ["close", "forget", "open again", "moved"])
async def test_nothing_that_was_prepared_for_a_text_outlives_it(paths, ends):
    async with drafter_of(paths["llama"], draft_ahead=True) as engine:
        idle, text = Idle(engine), OpenedText(engine, prompt_of(9, 1))
        await text.open()
        await text.draft(TREE)
        await idle()
        held = engine.free_nodes
        assert len(outcomes_of(engine, text)) == MOST
        if ends == "forget":
            await abandon(text)
            return
        if ends == "open again":
            text.held = 0
            await text.open()
        if ends == "moved":
            text.ids[-2:] = [1, 2, 3]
            text.held = 7
            await text.draft(LevelShape((1,)))
            await idle()
            assert engine.free_nodes > held
        await text.close()


def grown(shape: LevelShape, chances: list[list[float]]) -> Any:
    """A tree whose candidates are 10, 11, ..., with these chances in each level, in all its rows."""
    growth = growth_of(9, shape)
    for level in chances:
        rows = len(growth.frontier)
        logs = [math.log(chance) for chance in level]
        growth.extend([list(range(10, 10 + len(level)))] * rows, [logs] * rows, [logs] * rows)
    return growth


def test_the_likely_outcomes_are_paths_to_leaves_and_unsent_candidates_by_their_chance(monkeypatch):
    """The chances after a row are those of a calibration that leaves the candidates' scores as they are."""
    monkeypatch.setattr(prepared, "LEAST", 0.05)
    plain = Calibration(sharpness=1.0, unseen=-12.0)
    growth = grown(LevelShape((1, 1)), [[0.8, 0.15, 0.05], [0.5, 0.4, 0.1]])
    found = likely_outcomes(growth, plain)
    assert [(each.tokens, each.leaf, round(each.chance, 2)) for each in found] == [
        ((10, 12), False, 0.08),
        ((11,), False, 0.15),
        ((10, 10), True, 0.25),  # 0.8 * 0.5, and the mean of both for the next token
        ((10, 11), False, 0.32),
    ]
    assert likely_outcomes(grown(LevelShape((3,)), [[0.01, 0.01, 0.01]]), plain) == []


def test_preparing_rests_after_misses_in_a_row_for_ever_longer_and_a_hit_ends_that():
    preparations, after = Preparations(), object()

    def prepares(used: bool) -> bool:
        """Answer a tree and the next call. Returns whether anything was prepared in between."""
        preparations.answered(after)
        found = preparations.after is not None
        preparations.texts = [object()] if found else []  # type: ignore[list-item]
        preparations.claimed(used and found)
        return found

    tried = [prepares(False) for _ in range(MISSES + 8 + 1 + 16 + 1 + 32 + 1 + LONGEST_REST + 1 + LONGEST_REST)]
    assert [place for place, found in enumerate(tried) if found] == [*range(MISSES), 16, 33, 66, 131]
    assert prepares(True)
    assert all(prepares(False) for _ in range(MISSES)) and not any(prepares(False) for _ in range(8))


def test_an_outcome_that_is_put_back_is_prepared_in_its_turn(monkeypatch):
    monkeypatch.setattr(prepared, "LEAST", 0.05)
    preparations = Preparations()
    preparations._outcomes, preparations.after = [Outcome(0.2, (1,), False), Outcome(0.6, (2,), False)], object()
    preparations.put_back(Outcome(0.3, (3,), False))
    preparations.put_back(Outcome(0.01, (4,), False))
    assert [preparations.next_outcome().tokens for _ in range(3)] == [(2,), (3,), (1,)]
    assert preparations.next_outcome() is None
