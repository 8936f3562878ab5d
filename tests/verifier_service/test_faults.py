"""A fault of one text ends that text alone: the others of its steps get the answers that they get without it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from dendro.calls import CloseCall, OpenCall, RequestParameters, TextUpdate, VerifyCall, new_opening
from dendro.errors import BadRequest, EngineFailed, NotFound, PeerLost
from dendro.grammars import GrammarText
from dendro.modes import VerificationMode
from dendro.structure import Structure
from dendro.text import Limits, Sampling, Tokens
from dendro.tree import DraftTree
from tree_kernels.tree_attention import compiled

from tests.support import tiny_mamba, tiny_models
from tests.support.faults import Panic
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions
from verifier_service.walk import walk_with_logprobs

POISON = 250
"""A token whose embedding is not finite, and so are the logits after it."""
PROMPT = [(7 * at * at + 3 * at) % 200 for at in range(30)]
LONG = [(5 * at * at + at) % 200 for at in range(40)]
TOKENS = 6
LAWS = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.0, seed=3),
    "filtered": Sampling(temperature=1.0, top_p=0.98, seed=3),
}


@pytest.fixture(scope="module", params=["llama", "mamba2"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mamba2":
        tiny_mamba.make_checkpoint(folder, "mamba2", config=tiny_mamba.tiny_config("mamba2", tiny_models.PADDED))
        tiny_models.write_tokenizer(folder)
    else:
        tiny_models.make_checkpoint(folder)
    made = VerifierEngine.load(folder, VerifierOptions(name="tiny", max_length=256, max_sessions=8))
    embedding = made.runner.target.model.get_input_embeddings()
    with torch.inference_mode():
        embedding.weight[POISON] = torch.nan
    return made


class Caller:
    """One text, and the calls that a router makes for it."""

    def __init__(self, engine, prompt=PROMPT, sampling=None, **parameters):
        self.engine, self.text, self.opening, self.known = engine, Tokens(), new_opening(), 0
        self.text.extend(prompt)
        self.parameters = RequestParameters(
            sampling or Sampling(), Limits(200, ignore_end=True), "", (), prompt_length=len(prompt), **parameters
        )

    def update(self):
        update = TextUpdate.of(self.opening, self.text, self.known)
        self.known = len(self.text)
        return update

    async def open(self):
        return await self.engine.open(OpenCall(self.update(), self.parameters))

    async def round(self, below=()):
        """below: guesses in a chain"""
        tokens, parents = np.array([self.text.ids[-1], *below]), np.arange(1 + len(below)) - 1
        tree = DraftTree(tokens, parents, np.zeros(len(tokens), np.float32))
        verdict = await self.engine.verify(VerifyCall(self.update(), tree))
        self.text.extend(verdict.tokens)
        return verdict

    async def answer(self, count=TOKENS):
        await self.open()
        for _ in range(count):
            await self.round()
        return self.text.ids[-count:]


async def fresh(engine, token_bytes=None):
    """An engine that answers in this event loop."""
    hello, shelf = await engine.hello(), engine._shelf
    again = VerifierEngine(engine.scheduler, engine.runner, hello, shelf, token_bytes=token_bytes)
    await again.start()
    return again


async def beside(engine, failing):
    """The answers of two texts while `failing` runs beside them; without it they are the same."""
    alone = [await Caller(engine, PROMPT[start:], LAWS["drawn"]).answer() for start in (0, 3)]
    texts = [Caller(engine, PROMPT[start:], LAWS["drawn"]) for start in (0, 3)]
    *answers, outcome = await asyncio.gather(*(each.answer() for each in texts), failing(), return_exceptions=True)
    assert answers == alone
    return outcome


@pytest.mark.parametrize("logprobs", [None, 2], ids=["tokens", "logprobs"])
@pytest.mark.parametrize("sampling", LAWS.values(), ids=LAWS)
async def test_logits_that_are_not_finite_end_their_text_alone_with_the_place(engine, sampling, logprobs):
    engine = await fresh(engine)

    async def failing():
        caller = Caller(engine, [*PROMPT, POISON], sampling, logprobs=logprobs)
        await caller.open()
        await caller.round()

    outcome = await beside(engine, failing)
    await engine.stop()
    assert isinstance(outcome, BadRequest)
    assert str(outcome) == f"prompt: the target's logits after the text's first {len(PROMPT) + 1} tokens are not finite"


@pytest.mark.parametrize("sampling", LAWS.values(), ids=LAWS)
async def test_a_tree_gives_the_tokens_before_logits_that_are_not_finite_and_then_the_same_error(engine, sampling):
    """A bias makes the answer's first token the one whose logits are not finite."""
    engine = await fresh(engine)
    biased = Sampling(sampling.temperature, seed=sampling.seed, logit_bias=((POISON, 100.0),))
    found = []
    for below in ((), (POISON,), (POISON, POISON, 7)):
        caller = Caller(engine, PROMPT, biased)
        await caller.open()
        verdict = await caller.round(below)
        with pytest.raises(BadRequest) as error:
            await caller.round()
        found.append((verdict.tokens, str(error.value)))
    await engine.stop()
    assert found == [found[0]] * 3 and found[0][0] == (POISON,)


@pytest.mark.parametrize("mode", [VerificationMode.NAIVE, VerificationMode.MULTI_STEP, VerificationMode.LENIENT])
async def test_in_every_mode_logits_that_are_not_finite_end_their_text(engine, mode):
    engine = await fresh(engine)
    lenience = 0.5 if mode is VerificationMode.LENIENT else None
    given = {} if lenience is None else {"lenience": lenience}
    caller = Caller(engine, [*PROMPT, POISON], Sampling(1.0, seed=3, mode=mode, **given))
    await caller.open()
    with pytest.raises(BadRequest, match="not finite"):
        await caller.round()
    await engine.stop()


async def test_an_echo_whose_logits_are_not_finite_ends_its_text_alone(engine):
    engine = await fresh(engine)

    async def failing():
        await Caller(engine, [*PROMPT, POISON, 1, 2], logprobs=1, echo_from=1).open()

    outcome = await beside(engine, failing)
    await engine.stop()
    assert isinstance(outcome, EngineFailed | BadRequest) and "not finite" in str(outcome)


async def test_a_page_of_a_text_that_was_not_finite_is_read_by_no_later_text(tmp_path, monkeypatch):
    """In the form of the library's products, which multiply whole pages."""
    monkeypatch.setattr(compiled, "why_not_compiled", lambda: "for this test")
    tiny_models.make_checkpoint(tmp_path)
    options = VerifierOptions(name="tiny", max_length=256, max_sessions=8, dtype=torch.float32)
    engine = VerifierEngine.load(tmp_path, options)
    with torch.inference_mode():
        engine.runner.target.model.get_input_embeddings().weight[POISON] = torch.nan
    engine = await fresh(engine)
    before, poisoned, after = (
        Caller(engine, prompt) for prompt in (LONG, [*PROMPT, *PROMPT[:10], POISON, *PROMPT[:20]], LONG)
    )
    try:
        wanted = await before.answer()
        await engine.close(CloseCall(before.update()))
        await poisoned.open()
        with pytest.raises(BadRequest, match="not finite"):
            await poisoned.round()
        await engine.close(CloseCall(poisoned.update()))
        assert await after.answer() == wanted
    finally:
        await engine.stop()


@pytest.mark.parametrize("kind", [RuntimeError, Panic], ids=["exception", "panic"])
async def test_a_draw_that_raises_ends_its_text_alone(engine, kind, monkeypatch):
    engine = await fresh(engine)
    walk = walk_with_logprobs

    def raising(walker, draw, logits, masks=None):
        if draw.sampling.seed == 99:
            raise kind("planted")
        return walk(walker, draw, logits, masks)

    monkeypatch.setattr("verifier_service.runner.walk_with_logprobs", raising)

    async def failing():
        caller = Caller(engine, PROMPT[5:], Sampling(temperature=1.0, seed=99))
        await caller.open()
        await caller.round()

    outcome = await beside(engine, failing)
    await engine.stop()
    assert isinstance(outcome, EngineFailed) and str(outcome).endswith(("planted", "Panic"))


@pytest.mark.parametrize("part", ["masks", "foresee"])
@pytest.mark.parametrize("kind", [RuntimeError, Panic], ids=["exception", "panic"])
async def test_a_structure_that_raises_in_a_round_ends_its_text_alone(engine, kind, part, monkeypatch):
    pytest.importorskip("llguidance")
    engine = await fresh(engine, lambda: {token: bytes([token]) for token in range(200)})

    def raising(text, given):
        raise kind("planted")

    monkeypatch.setattr(GrammarText, part, raising)
    outcomes = []

    async def failing():
        caller = Caller(engine, PROMPT[5:], structure=Structure.regex("[a-z]{20}"))
        await caller.open()
        outcomes.append(await asyncio.gather(caller.round(), return_exceptions=True))
        await caller.round()

    outcome = await beside(engine, failing)
    await engine.stop()
    ((first,),) = outcomes
    assert isinstance(first, EngineFailed) and str(first).endswith(("planted", "Panic"))
    assert isinstance(outcome, NotFound)


async def test_a_closing_call_with_an_id_outside_the_vocabulary_ends_its_text_alone(engine):
    engine = await fresh(engine)

    async def failing():
        caller = Caller(engine, PROMPT[4:], Sampling(repetition_penalty=1.5))
        await caller.answer(2)
        caller.text.extend([10**6])
        closed = await engine.close(CloseCall(caller.update()))
        with pytest.raises(NotFound):
            await caller.round()
        return closed

    outcome = await beside(engine, failing)
    await engine.stop()
    assert outcome.saved == 0


async def test_a_panic_in_a_step_ends_its_texts_and_not_the_engine(engine, monkeypatch):
    engine = await fresh(engine)
    run = engine.runner.run

    def panicking(plan):
        monkeypatch.setattr(engine.runner, "run", run)
        raise Panic("planted")

    caller = Caller(engine)
    await caller.open()
    monkeypatch.setattr(engine.runner, "run", panicking)
    with pytest.raises(EngineFailed, match="planted|Panic"):
        await caller.round()
    assert await Caller(engine).answer()
    await engine.stop()


@pytest.mark.parametrize("reason", ["", "cuda:0 is lost: an illegal address"], ids=["usable", "lost"])
async def test_a_step_that_raises_ends_the_engine_only_where_its_device_is_lost(engine, monkeypatch, reason):
    monkeypatch.setattr("verifier_service.engine.device_fault", lambda device: reason)
    engine = await fresh(engine)

    def raising(plan):
        raise RuntimeError("planted")

    caller = Caller(engine)
    await caller.open()
    monkeypatch.setattr(engine.runner, "run", raising)
    with pytest.raises(PeerLost if reason else EngineFailed, match=reason or "planted"):
        await caller.round()
    assert engine.fault() == reason
    await engine.stop()


async def test_a_panic_in_a_queued_call_ends_that_call_alone(engine, monkeypatch):
    engine = await fresh(engine)
    submit = engine.scheduler.submit
    failing = Caller(engine, PROMPT[5:])

    def panicking(pending):
        if pending.call.update.opening == failing.opening:
            raise Panic("planted")
        submit(pending)

    monkeypatch.setattr(engine.scheduler, "submit", panicking)
    outcome = await beside(engine, failing.open)
    await engine.stop()
    assert isinstance(outcome, EngineFailed) and str(outcome).endswith(("planted", "Panic"))


async def test_a_panic_while_a_step_is_planned_ends_its_texts_and_not_the_engine(engine, monkeypatch):
    engine = await fresh(engine)
    alone, caller = await Caller(engine).answer(), Caller(engine)
    await caller.open()
    plan = engine.scheduler.next

    def panicking():
        monkeypatch.setattr(engine.scheduler, "next", plan)
        raise Panic("planted")

    monkeypatch.setattr(engine.scheduler, "next", panicking)
    with pytest.raises(EngineFailed, match="planted|Panic"):
        await caller.round()
    with pytest.raises(NotFound):
        await caller.round()
    assert await Caller(engine).answer() == alone
    await engine.stop()


@pytest.mark.parametrize("kind", [RuntimeError, Panic], ids=["exception", "panic"])
async def test_a_fault_while_a_text_is_copied_ends_no_text(engine, monkeypatch, kind):
    engine, failed = await fresh(engine), asyncio.Event()
    loop = asyncio.get_running_loop()

    def failing(*given):
        loop.call_soon_threadsafe(failed.set)
        raise kind("planted")

    monkeypatch.setattr(engine.runner, "save", failing)
    filtered = LAWS["filtered"]
    other, caller = Caller(engine, PROMPT[5:], filtered), Caller(engine, PROMPT, filtered)
    await asyncio.gather(other.open(), caller.answer(2))
    assert not (await engine.close(CloseCall(caller.update()))).saved
    await other.round()
    if engine.scheduler.capacity.saves:
        await asyncio.wait_for(failed.wait(), 20)
    await other.round()
    await engine.stop()
