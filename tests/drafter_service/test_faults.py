"""A fault of one text ends that text alone; a drafter that cannot guess is refused when it is loaded."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import numpy as np
import pytest
import torch
from dendro.calls import CloseCall, DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.errors import BadRequest, EngineFailed, PeerLost
from dendro.shapes import DynamicShape, LevelShape
from dendro.state import MemoryStates, NoStates
from dendro.text import Limits, Sampling, Tokens
from safetensors.torch import load_file, save_file

from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from drafter_service.texts import DrafterText
from tests.support.faults import Panic
from tests.support.tiny_drafters import FAMILIES, VOCABULARY, make_drafter

POISON = 11
"""A token whose embedding is not finite, and so are the scores after it."""
SHAPES = (LevelShape((3, 2, 1)), DynamicShape(3, 3, 8))
EMBEDDINGS = ("backbone.embeddings.weight", "model.embed_tokens.weight")
PROMPT = [token for token in random.Random(1).choices(range(VOCABULARY), k=20) if token != POISON]


def poison(folder, row: int | slice) -> None:
    """Make rows of the embedding NaN; the head keeps its numbers."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    name = next(name for name in EMBEDDINGS if name in weights)
    weights.setdefault("lm_head.weight", weights[name].clone())
    weights[name][row] = torch.nan
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


class DraftCaller:
    def __init__(self, engine, prompt, sampling=None):
        self.engine, self.opening, self.text, self.known = engine, new_opening(), Tokens(), 0
        self.text.extend(prompt)
        self.sampling = sampling or Sampling()

    def update(self):
        update, self.known = TextUpdate.of(self.opening, self.text, self.known), len(self.text)
        return update

    async def open(self):
        await self.engine.open(OpenCall(self.update(), RequestParameters(self.sampling, Limits(1000), "", ())))
        return self

    async def draft(self, shape):
        tree = await self.engine.draft(DraftCall(self.update(), shape))
        return tree.tokens.tolist(), tree.parents.tolist()

    async def close(self):
        return await self.engine.close(CloseCall(self.update()))


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    make_drafter(tmp_path, request.param)
    return tmp_path


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=5), Sampling(1.0, top_k=4, seed=5)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_scores_that_are_not_finite_end_their_text_alone(folder, shape, sampling):
    poison(folder, POISON)
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=NoStates())
    await engine.start()
    alone = await (await DraftCaller(engine, PROMPT, sampling).open()).draft(shape)
    with pytest.raises(EngineFailed, match="not finite"):  # by itself, where all levels may be one call
        await (await DraftCaller(engine, [*PROMPT, POISON], sampling).open()).draft(shape)
    callers = [await DraftCaller(engine, prompt, sampling).open() for prompt in (PROMPT, [*PROMPT, POISON], PROMPT)]
    first, failed, last = await asyncio.gather(*(each.draft(shape) for each in callers), return_exceptions=True)
    assert isinstance(failed, EngineFailed) and first == last == alone
    assert await callers[0].draft(shape) == alone
    await engine.stop()


async def test_a_text_whose_part_of_a_forward_raises_ends_alone(folder, monkeypatch):
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=NoStates())
    await engine.start()
    callers = [await DraftCaller(engine, PROMPT[start:]).open() for start in (0, 4)]
    alone = await callers[0].draft(SHAPES[0])
    apply = engine._scheduler._apply

    def raising(session, *given):
        if session.opening == callers[1].opening:
            raise RuntimeError("planted")
        apply(session, *given)

    monkeypatch.setattr(engine._scheduler, "_apply", raising)
    found, failed = await asyncio.gather(*(each.draft(SHAPES[0]) for each in callers), return_exceptions=True)
    assert found == alone and isinstance(failed, EngineFailed) and str(failed).endswith(("planted", "Panic"))
    await engine.stop()


KINDS = pytest.mark.parametrize("kind", [RuntimeError, Panic], ids=["exception", "panic"])


async def rounds(caller, count=3):
    """Trees of an answer that follows the first guess of each."""
    found = []
    for _ in range(count):
        tokens, parents = await caller.draft(SHAPES[0])
        found.append((tokens, parents))
        caller.text.extend([tokens[1], (tokens[1] + 1) % POISON])
    return found


async def pair(engine):
    """Two open texts, after the first round of each."""
    callers = [await DraftCaller(engine, PROMPT[start:]).open() for start in (0, 4)]
    alone = [await rounds(await DraftCaller(engine, PROMPT[start:]).open()) for start in (0, 4)]
    for caller, before in zip(callers, alone, strict=True):
        assert await rounds(caller, 1) == before[:1]
    return callers, alone


@KINDS
async def test_a_text_whose_fold_cannot_be_planned_ends_alone(folder, kind, monkeypatch):
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=NoStates())
    await engine.start()
    (first, second), alone = await pair(engine)
    record = DrafterText.record_rank

    def raising(session, *given):
        if session.opening == second.opening:
            raise kind("planted")
        record(session, *given)

    monkeypatch.setattr(DrafterText, "record_rank", raising)
    found, failed = await asyncio.gather(*(rounds(each, 2) for each in (first, second)), return_exceptions=True)
    assert found == alone[0][1:] and isinstance(failed, EngineFailed) and str(failed).endswith(("planted", "Panic"))
    assert engine.sessions == 3
    await engine.stop()


def plant(monkeypatch, engine, name, kind):
    """The next call of a method of the engine's memory raises."""
    memory, method = engine._runner.memory, getattr(engine._runner.memory, name)

    def raising(*_):
        monkeypatch.setattr(memory, name, method)
        raise kind("planted")

    monkeypatch.setattr(memory, name, raising)


@KINDS
async def test_a_fold_that_raises_ends_the_texts_of_its_step_and_saves_none_of_their_memory(folder, kind, monkeypatch):
    states = MemoryStates()
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=states)
    await engine.start()
    (first, second), alone = await pair(engine)
    plant(monkeypatch, engine, "fold", kind)
    with pytest.raises(EngineFailed, match="planted|Panic"):
        await second.close()
    assert await rounds(first, 2) == alone[0][1:] and not states.blobs and engine.sessions == 3
    await engine.stop()


@pytest.mark.parametrize("reason", ["", "cuda:0 is lost: an illegal address"], ids=["usable", "lost"])
@pytest.mark.parametrize("part", ["run", "fold", "admit"])
async def test_an_error_ends_the_engine_only_where_its_device_is_lost(folder, monkeypatch, part, reason):
    monkeypatch.setattr("drafter_service.engine.device_fault", lambda device: reason)
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=NoStates())
    await engine.start()
    caller = await DraftCaller(engine, PROMPT).open()
    await rounds(caller, 1)

    def raising(*given):
        raise RuntimeError("planted")

    monkeypatch.setattr(engine._runner, part, raising)
    with pytest.raises(PeerLost if reason else EngineFailed, match=reason or "planted"):
        await (DraftCaller(engine, PROMPT).open() if part == "admit" else rounds(caller, 1))
    assert engine.fault() == reason
    await engine.stop()


@KINDS
async def test_a_memory_that_cannot_be_copied_fails_its_close_and_the_other_texts_go_on(folder, kind, monkeypatch):
    states = MemoryStates()
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=states)
    await engine.start()
    (first, second), alone = await pair(engine)
    plant(monkeypatch, engine, "save", kind)
    closing = asyncio.create_task(second.close())
    assert await rounds(first, 2) == alone[0][1:]
    with pytest.raises(EngineFailed, match="planted|Panic"):
        await closing
    assert not states.blobs and engine.sessions == 3
    assert (await first.close()).saved > 0 and states.blobs
    await engine.stop()


@KINDS
async def test_a_text_that_cannot_be_admitted_leaves_nothing_open(folder, kind, monkeypatch):
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=NoStates())
    await engine.start()

    def raising(*given):
        raise kind("planted")

    monkeypatch.setattr(engine._runner, "admit", raising)
    with pytest.raises(EngineFailed, match="planted|Panic"):
        await DraftCaller(engine, PROMPT).open()
    assert engine.sessions == 0
    await engine.stop()


@KINDS
async def test_noise_that_cannot_be_computed_ahead_ends_no_text(folder, kind, monkeypatch):
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=NoStates())
    await engine.start()
    sampling = Sampling(1.0, seed=5)
    alone = await rounds(await DraftCaller(engine, PROMPT, sampling).open())
    asked = threading.Event()

    def raising(*given):
        asked.set()
        raise kind("planted")

    monkeypatch.setattr(engine._runner, "prepare", raising)
    caller = await DraftCaller(engine, PROMPT, sampling).open()
    assert await asyncio.to_thread(asked.wait, 10)
    assert await rounds(caller) == alone
    await engine.stop()


@KINDS
async def test_a_fault_while_a_step_is_planned_ends_its_texts_and_not_the_engine(folder, kind, monkeypatch):
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=NoStates())
    await engine.start()
    caller = await DraftCaller(engine, PROMPT).open()

    def raising():
        raise kind("planted")

    monkeypatch.setattr(engine._scheduler, "next", raising)
    with pytest.raises(EngineFailed, match="planted|Panic"):
        await caller.draft(SHAPES[0])
    assert engine.sessions == 0
    await (await DraftCaller(engine, PROMPT).open()).draft(SHAPES[0])
    await engine.stop()


@KINDS
async def test_a_fault_in_a_queued_call_ends_that_call_alone(folder, kind, monkeypatch):
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=NoStates())
    await engine.start()
    (first, second), alone = await pair(engine)
    draft = engine._scheduler.draft

    def raising(ticket, call, ahead):
        if call.update.opening == second.opening:
            raise kind("planted")
        draft(ticket, call, ahead)

    monkeypatch.setattr(engine._scheduler, "draft", raising)
    found, failed = await asyncio.gather(*(rounds(each, 2) for each in (first, second)), return_exceptions=True)
    assert found == alone[0][1:] and isinstance(failed, EngineFailed) and str(failed).endswith(("planted", "Panic"))
    await engine.stop()


async def test_a_close_with_an_id_outside_the_vocabulary_leaves_nothing_behind(folder):
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=8), states=NoStates())
    await engine.start()
    caller = await DraftCaller(engine, PROMPT).open()
    await caller.draft(SHAPES[0])
    caller.text.extend([10**6])
    with pytest.raises(BadRequest, match="outside the vocabulary"):
        await caller.close()
    assert engine.sessions == 0
    await engine.stop()


@pytest.mark.parametrize("rows", [slice(None), slice(1, None, 2)], ids=["all", "every-other"])
def test_a_drafter_whose_logits_are_not_finite_is_refused_at_loading(folder, rows):
    poison(folder, rows)
    with pytest.raises(BadRequest, match="checkpoint: the model's logits are not finite"):
        DrafterEngine.load(folder, DrafterOptions(name="tiny"), states=NoStates())


def test_the_check_at_loading_leaves_the_memory_as_it_was(folder):
    engine = DrafterEngine.load(folder, DrafterOptions(name="tiny"), states=NoStates())
    before = engine._runner.memory.save(0, 0)
    with torch.inference_mode():
        assert engine._runner.scores_are_finite()
    after = engine._runner.memory.save(0, 0)
    assert all(np.array_equal(before[name], after[name]) for name in before)
