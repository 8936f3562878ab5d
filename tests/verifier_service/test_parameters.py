"""Parameters at the engine: trees, dropped verdicts and rounds begun ahead give the tokens of the plain formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dendro.calls import OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.errors import BadRequest
from dendro.text import Finish, Limits, Sampling, Tokens

from cluster.certify.parameters import random_options
from tests.parameters import EACH, decoded, parameters_of
from tests.support import tiny_models
from tests.support.engines import bitwise_engine_of, running
from tests.support.routers import RoundByRound, guessing
from verifier_service.engine import VerifierEngine

COUNT = 24
PROMPT = [(7 * at * at + 3 * at) % 250 for at in range(40)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> VerifierEngine:
    folder = tmp_path_factory.mktemp("target")
    tiny_models.make_checkpoint(folder)
    return bitwise_engine_of(folder, dtype=torch.bfloat16, max_length=256, max_sessions=4)


class WithParameters(RoundByRound):
    """A router of a request with parameters, which stops where the verifier says so."""

    def __init__(self, engine, parameters: RequestParameters, prompt=PROMPT):
        super().__init__(engine, prompt)
        self.parameters, self.end, self.finish_reason = parameters, parameters.limits.max_length, None

    async def round(self, tree=None, ahead=None):
        verdict = await super().round(tree, ahead)
        if verdict.finish is not None:
            self.finish_reason, self.end = verdict.finish, len(self.text)
        return verdict


async def check_identity(engine: VerifierEngine, parameters: RequestParameters, seed: int) -> list[int]:
    """Assert that plain rounds, trees, rounds begun ahead and dropped verdicts give the answer of the formulas."""
    truth, rng = decoded(engine.logits_of, PROMPT, parameters), np.random.default_rng(seed)
    plain = WithParameters(engine, parameters)
    assert await plain.finish() == truth
    assert plain.finish_reason is (Finish.LENGTH if len(truth) == COUNT else Finish.STOP_TOKEN) or (
        truth[-1] in parameters.limits.stop_ids
    )
    assert await WithParameters(engine, parameters).finish(guessing(rng, truth)) == truth
    assert await WithParameters(engine, parameters).finish(ahead=lambda: True) == truth
    dropped, trees = WithParameters(engine, parameters), guessing(rng, truth)
    await dropped.open()
    while len(dropped.text) < dropped.end:
        before = len(dropped.text)
        await dropped.round(trees(dropped) if rng.random() < 0.7 else None, lambda: rng.random() < 0.5)
        if rng.random() < 0.5:  # a part of the verdict, its last token included, is dropped
            dropped.back_to(int(rng.integers(before, len(dropped.text))))
            dropped.end = parameters.limits.max_length
    await dropped.close()
    assert dropped.answer == truth
    return truth


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", EACH)
async def test_each_parameter_gives_the_tokens_of_the_formulas_whatever_the_trees(loaded, name: str, temperature):
    base = {"temperature": temperature, "seed": 3}
    if name.endswith("penalty"):
        base["allowed_ids"] = range(12)  # so that tokens are drawn again
    parameters = parameters_of(base | EACH[name], len(PROMPT), COUNT)
    async with running(loaded) as engine:
        with_it = await check_identity(engine, parameters, seed=1)
        without = decoded(loaded.logits_of, PROMPT, parameters_of(base, len(PROMPT), COUNT))
    assert with_it != without, "the parameter changed no token"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, 10))])
async def test_random_combinations_give_the_tokens_of_the_formulas_whatever_the_trees(loaded, part: int):
    async with running(loaded) as engine:
        for seed in range(20 * part, 20 * part + 20):
            options = random_options(np.random.default_rng(seed), COUNT, tiny_models.VOCABULARY) | {"seed": seed}
            await check_identity(engine, parameters_of(options, len(PROMPT), COUNT), seed)


async def test_an_answer_continued_elsewhere_counts_the_tokens_that_it_has(loaded):
    """The text is opened anew in the middle of the answer, as after the loss of a replica or for a resume."""
    options = EACH["frequency_penalty"] | EACH["presence_penalty"] | {"min_new_tokens": 20, "stop_ids": (5, 6, 7)}
    parameters = parameters_of(options, len(PROMPT), COUNT)
    truth = decoded(loaded.logits_of, PROMPT, parameters)
    async with running(loaded) as engine:
        for held in range(1, len(truth), 5):
            later = WithParameters(engine, parameters, [*PROMPT, *truth[:held]])
            assert await later.finish() == truth[held:]


async def test_no_token_ends_an_answer_before_its_least_length(loaded):
    """All but eight ids are stop ids, so that an answer would end at once."""
    stop_ids = tuple(range(8, 257))
    async with running(loaded) as engine:
        for least in (0, 1, 10, COUNT):
            options = {"stop_ids": stop_ids, "min_new_tokens": least, "temperature": 1.0}
            router = WithParameters(engine, parameters_of(options, len(PROMPT), COUNT))
            answer = await router.finish()
            assert len(answer) >= max(least, 1) and all(token < 8 for token in answer[: max(least, 1) - 1])
            if least < COUNT:
                assert router.finish_reason is Finish.STOP_TOKEN and answer[-1] in stop_ids


async def test_end_of_text_is_not_drawn_before_the_least_length_unless_it_does_not_end_the_answer(loaded):
    """With a bias on the end-of-text token it is drawn as soon as it may be."""
    for ignored, position in ((False, 10), (True, 0)):
        sampling = Sampling(logit_bias=((tiny_models.END, 100.0),))
        limits = Limits(len(PROMPT) + COUNT, ignored, len(PROMPT) + 10)
        async with running(loaded) as engine:
            router = WithParameters(engine, RequestParameters(sampling, limits, "", (), prompt_length=len(PROMPT)))
            answer = await router.finish()
        assert answer.index(tiny_models.END) == position
        assert router.finish_reason is (Finish.LENGTH if ignored else Finish.END_OF_TEXT)


async def test_ids_outside_the_vocabulary_and_choices_without_a_token_are_refused(loaded):
    """A verifier checks them itself."""
    text = Tokens(PROMPT)
    plain = RequestParameters(Sampling(), Limits(100), "", (), prompt_length=len(PROMPT))
    cases = [
        ("banned_ids: 257 is outside the vocabulary of 257", Sampling(banned_ids=(1, 257)), plain.limits),
        (r"logit_bias: 300 is outside", Sampling(logit_bias=((300, 1.0),)), plain.limits),
        (r"bad_words\[1\]: 999 is outside", Sampling(bad_words=((1,), (999, 1))), plain.limits),
        ("stop_ids: 257 is outside", Sampling(), Limits(100, stop_ids=(257,))),
        ("allowed_ids: may leave no token", Sampling(allowed_ids=(4, 5), bad_words=((1, 4), (5,))), plain.limits),
        ("banned_ids: may leave no token", Sampling(banned_ids=tuple(range(257))), plain.limits),
        ("allowed_ids: may leave no token", Sampling(allowed_ids=(9,)), Limits(100, False, 60, (9,))),
    ]
    async with running(loaded) as engine:
        for reason, sampling, limits in cases:
            call = OpenCall(TextUpdate.of(new_opening(), text, 0), replace(plain, sampling=sampling, limits=limits))
            with pytest.raises(BadRequest, match=f"^{reason}"):
                await engine.open(call)
        router = WithParameters(engine, parameters_of({}, len(PROMPT), 4))
        assert len(await router.finish()) == 4
