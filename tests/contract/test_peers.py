"""The contract between a router and a peer, in this process or at the other end of a stream.

One suite runs on the fakes and on the engines: each alone, behind a stream of one machine (beside), and behind one of
two machines (far), which gRPC carries alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
import torch
from dendro.calls import CloseCall, DraftCall, OpenCall, Opened, RequestParameters, TextUpdate, VerifyCall, new_opening
from dendro.engine import started
from dendro.errors import BadRequest, NotFound, Overloaded
from dendro.logprobs import EchoedLogprobs
from dendro.options import MAX_ECHOED
from dendro.shapes import OFF, TreeShape
from dendro.state import MemoryStates
from dendro.text import Finish, Limits, Sampling, Text
from dendro.tree import DraftTree
from transformers import AutoModelForCausalLM

from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.support import fakes, tiny_mamba, tiny_models
from tests.support.fakes import FakeDrafter, FakeVerifier
from tests.support.sockets import drafter_at, until, verifier_at
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

SHAPE = TreeShape.parse("(2,1,1)")
KINDS = tuple(f"{peer}, {place}" for peer in ("fake", "engine") for place in ("near", "beside", "far"))
SESSIONS = 32
Greedy = Callable[[Sequence[int], int], list[int]]


@dataclass(frozen=True)
class Case:
    """A peer and the engine behind it."""

    peer: Any
    engine: Any
    vocabulary: int
    open_texts: Callable[[], int]
    greedy: Greedy  # the target's greedy answer to a text, of so many tokens


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_models.make_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def mamba(tmp_path_factory) -> Path:
    """A drafter with the target's tokenizer."""
    folder = tmp_path_factory.mktemp("mamba")
    model = AutoModelForCausalLM.from_config(tiny_mamba.tiny_config("mamba", tiny_models.PADDED))
    tiny_mamba.randomise(model, 0)
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    return folder


def greedy_of(folder: Path) -> Greedy:
    """The greedy answers of transformers' `generate` for a checkpoint."""

    def greedy(ids: Sequence[int], count: int) -> list[int]:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.suppress_tokens = list(range(tiny_models.VOCABULARY, tiny_models.PADDED))
        output = model.generate(torch.tensor([list(ids)]), max_new_tokens=count, do_sample=False)
        return output[0, len(ids) :].tolist()

    return greedy


def drafter_engine(folder: Path) -> DrafterEngine:
    return DrafterEngine.load(folder, DrafterOptions(name="tiny", max_sessions=SESSIONS), states=MemoryStates())


def verifier_engine(folder: Path) -> VerifierEngine:
    return VerifierEngine.load(
        folder, VerifierOptions(name="tiny", dtype=torch.float32, max_length=128, max_sessions=SESSIONS, max_waiting=0)
    )


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch) -> str:
    """The same kind for both peers, because their vocabularies must be the same."""
    if request.param.endswith("far"):
        monkeypatch.setattr("cluster.peers.stream.join", AsyncMock(return_value=None))
    return request.param


@pytest.fixture
async def drafter(kind, mamba) -> AsyncIterator[Case]:
    fake, near = kind.startswith("fake"), kind.endswith("near")
    async with started(drafter_engine(mamba)) as real:
        engine = FakeDrafter() if fake else real
        vocabulary = fakes.VOCABULARY if fake else tiny_models.VOCABULARY
        case = Case(engine, engine, vocabulary, lambda: engine.sessions, fakes.plain)
        if near:
            yield case
            return
        async with drafter_at(engine) as (_, pool):
            yield replace(case, peer=(await pool.lease()).peer)


@pytest.fixture
async def verifier(kind, target) -> AsyncIterator[Case]:
    fake, near = kind.startswith("fake"), kind.endswith("near")
    async with started(verifier_engine(target)) as real:
        engine = FakeVerifier() if fake else real
        vocabulary = fakes.VOCABULARY if fake else tiny_models.VOCABULARY
        greedy = fakes.plain if fake else greedy_of(target)
        case = Case(engine, engine, vocabulary, lambda: engine.sessions, greedy)
        if near:
            yield case
            return
        async with verifier_at(engine) as (_, pool):
            yield replace(case, peer=(await pool.lease()).peer)


def new_text(prompt: Sequence[int] = (5, 6, 7), count: int = 40, sampling: Sampling | None = None) -> Text:
    return Text(prompt, sampling or Sampling(), Limits(len(prompt) + count, ignore_end=True))


def whole(text: Text, opening: bytes) -> TextUpdate:
    return TextUpdate.of(opening, text, 0)


def rest(text: Text, opening: bytes, start: int) -> TextUpdate:
    return TextUpdate.of(opening, text, start)


def opening_of(text: Text) -> OpenCall:
    return OpenCall(whole(text, new_opening()), RequestParameters(text.sampling, text.limits, "", ()))


async def test_the_hello_is_that_of_the_engine(drafter, verifier):
    for case in (drafter, verifier):
        assert await case.peer.hello() == await case.engine.hello()


async def test_an_opening_reports_its_restored_and_processed_tokens(drafter, verifier):
    for case in (drafter, verifier):
        opened = await case.peer.open(opening_of(new_text([1, 2, 3, 4])))
        assert (opened.restored, opened.processed) == (0, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_rounds_emit_the_answer_without_drafts_and_a_close_frees_the_text(drafter, verifier, temperature):
    sampling = Sampling(temperature=temperature, seed=2**64 - 1)
    answers = []
    for shape in (OFF, SHAPE):
        text = new_text(count=30, sampling=sampling)
        openings = []
        for case in (drafter, verifier):
            call = opening_of(text)
            openings.append(call.update.opening)
            await case.peer.open(call)
        sent = len(text)
        while text.finish is None:
            base = len(text)
            tree = await drafter.peer.draft(DraftCall(rest(text, openings[0], sent), shape))
            verdict = await verifier.peer.verify(VerifyCall(rest(text, openings[1], sent), tree))
            text.commit(verdict)
            sent = base
        assert text.finish is Finish.LENGTH
        answers.append(text.answer)
        for case, opening in zip((drafter, verifier), openings, strict=True):
            closed = await case.peer.close(CloseCall(rest(text, opening, sent)))
            assert closed.saved in (0, len(text) - 1)  # a verifier's keys are not saved
            assert case.open_texts() == 0
    assert answers[0] == answers[1]
    if not temperature:
        assert answers[0] == verifier.greedy([5, 6, 7], 30)


async def test_a_repeated_verify_call_returns_the_same_tokens(verifier):
    text = new_text()
    call = opening_of(text)
    await verifier.peer.open(call)
    update = rest(text, call.update.opening, len(text))
    first = await verifier.peer.verify(VerifyCall(update, DraftTree.root_only(text.root)))
    again = await verifier.peer.verify(VerifyCall(update, DraftTree.root_only(text.root)))
    assert first.tokens == again.tokens


@pytest.mark.parametrize("harm", ["unknown opening", "other digest", "a gap in the text"])
async def test_a_text_that_differs_is_not_found(verifier, drafter, harm):
    text = new_text()
    for case in (verifier, drafter):
        call = opening_of(text)
        await case.peer.open(call)
        update = rest(text, call.update.opening, len(text))
        bad = {
            "unknown opening": replace(update, opening=new_opening()),
            "other digest": replace(update, digest=update.digest ^ 1),
            "a gap in the text": replace(update, start=len(text) + 1, base=len(text) + 1),
        }[harm]
        with pytest.raises(NotFound):
            if case is verifier:
                await case.peer.verify(VerifyCall(bad, DraftTree.root_only(text.root)))
            else:
                await case.peer.draft(DraftCall(bad, SHAPE))


@pytest.mark.parametrize("fault", ["another root", "past the vocabulary"])
async def test_a_tree_that_does_not_fit_is_refused_and_the_opening_remains_usable(verifier, fault):
    text = new_text()
    call = opening_of(text)
    await verifier.peer.open(call)
    update = rest(text, call.update.opening, len(text))
    tree = DraftTree.root_only(99) if fault == "another root" else DraftTree.of([7, verifier.vocabulary], [-1, 0])
    with pytest.raises(BadRequest) as refused:
        await verifier.peer.verify(VerifyCall(update, tree))
    assert refused.value.field == "tree.tokens"
    verdict = await verifier.peer.verify(VerifyCall(update, DraftTree.root_only(text.root)))
    assert list(verdict.tokens) == verifier.greedy(text.ids, 1)


async def test_an_open_past_the_session_limit_is_overloaded_and_leaves_nothing_behind(drafter, verifier):
    for case in (drafter, verifier):
        if isinstance(case.engine, FakeDrafter | FakeVerifier):
            case.engine.max_sessions = SESSIONS
        first = opening_of(new_text())
        await case.peer.open(first)
        for _ in range(SESSIONS - 1):
            await case.peer.open(opening_of(new_text()))
        with pytest.raises(Overloaded):
            await case.peer.open(opening_of(new_text()))
        await case.peer.close(CloseCall(first.update))
        await case.peer.open(opening_of(new_text()))
        assert case.open_texts() == SESSIONS


async def first_tokens(peer: Any, texts: Sequence[Text]) -> list[list[int]]:
    """The tokens of each text's first verdict, all calls sent at once."""
    calls = [opening_of(text) for text in texts]
    await asyncio.gather(*(peer.open(call) for call in calls))
    verdicts = []
    for text, call in zip(texts, calls, strict=True):
        update = rest(text, call.update.opening, len(text))
        verdicts.append(peer.verify(VerifyCall(update, DraftTree.root_only(text.root))))
    return [list(verdict.tokens) for verdict in await asyncio.gather(*verdicts)]


async def test_concurrent_requests_do_not_mix(verifier):
    texts = [new_text([token, 2, 3]) for token in range(24)]
    assert await first_tokens(verifier.peer, texts) == [verifier.greedy(text.ids, 1) for text in texts]


@pytest.mark.parametrize("kind", ["fake, near", "fake, far"], indirect=True)
async def test_calls_of_many_requests_reach_the_engine_concurrently(verifier):
    verifier.engine.pause_s = 600.0
    texts = [new_text([token, 2, 3]) for token in range(24)]
    asking = asyncio.create_task(first_tokens(verifier.peer, texts))
    await until(lambda: verifier.engine.largest_batch == len(texts))
    asking.cancel()
    await asyncio.wait({asking})


@pytest.mark.parametrize("kind", ["fake, near", "fake, far"], indirect=True)
async def test_a_close_during_an_open_frees_the_opening(drafter):
    began = asyncio.Event()

    async def never() -> None:
        began.set()
        await asyncio.Event().wait()

    drafter.engine.before_opened = never
    call = opening_of(new_text())
    opening = asyncio.ensure_future(drafter.peer.open(call))
    await began.wait()
    opening.cancel()  # as a handle does before it closes
    await asyncio.wait({opening})
    with pytest.raises(NotFound):
        await drafter.peer.close(CloseCall(call.update))
    assert drafter.open_texts() == 0


@pytest.mark.parametrize("kind", ["fake, near", "fake, far"], indirect=True)
async def test_long_answers_that_are_ready_together_all_arrive(verifier):
    """A message of a stream has at most 4 MiB; the most log-probabilities of a prompt have 1 MiB."""
    top, texts = 20, [new_text([token, 2, 3]) for token in range(6)]
    places = MAX_ECHOED // (1 + top)
    ids, values = np.zeros((places, top), np.uint32), np.zeros((places, top), np.float32)
    echoed, opened = EchoedLogprobs(values[:, 0], ids, values), verifier.engine.open

    async def echoing(call: OpenCall) -> Opened:
        return replace(await opened(call), logprobs=echoed)

    verifier.engine.open, verifier.engine.before_opened = echoing, asyncio.Barrier(len(texts)).wait
    found = await asyncio.gather(*(verifier.peer.open(opening_of(text)) for text in texts))
    assert [each.logprobs == echoed for each in found] == [True] * len(texts)
