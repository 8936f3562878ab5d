"""Log-probabilities of emitted tokens: those of the raw logits, bit for bit, whatever the trees and parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from dendro.calls import RequestParameters
from dendro.engine import started
from dendro.errors import BadRequest
from dendro.logprobs import TokenLogprobs
from dendro.options import MAX_TOP_LOGPROBS
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.warp import Warp

from tests.parameters import parameters_of
from tests.support import tiny_hybrids, tiny_models
from tests.support.defined_logprobs import defined_logprobs
from tests.support.engines import bitwise_engine_of
from tests.support.routers import RoundByRound, guessing
from verifier_service import walk as walk_module
from verifier_service.engine import VerifierEngine
from verifier_service.walk import Draw, likeliest_tokens, token_logprobs

COUNT = 24
PROMPT = [(7 * at * at + 3 * at) % 250 for at in range(40)]
EDITED = {
    "temperature": 0.7, "seed": 4, "top_k": 30, "top_p": 0.8, "repetition_penalty": 1.8, "frequency_penalty": 2.0,
    "logit_bias": {5: 40.0, 9: -40.0}, "banned_ids": range(100, 200), "bad_words": [(token,) for token in range(40)],
}  # fmt: skip
"""Parameters of which each changes what a token is drawn from, and none its log-probability."""


@pytest.fixture(scope="module", params=["llama", pytest.param("mamba2", marks=pytest.mark.slow)])
def loaded(request, tmp_path_factory) -> VerifierEngine:
    folder = tmp_path_factory.mktemp("target")
    if request.param == "llama":
        tiny_models.make_checkpoint(folder)
    else:
        tiny_hybrids.make_checkpoint(folder, request.param, vocab_size=tiny_models.PADDED)
        tiny_models.write_tokenizer(folder)
    return bitwise_engine_of(folder, dtype=torch.bfloat16, max_length=256, max_sessions=4)


class AskingForLogprobs(RoundByRound):
    """A router that asks for log-probabilities, and notes those of the tokens that it keeps."""

    def __init__(self, engine: VerifierEngine, parameters: RequestParameters, prompt: Sequence[int] = PROMPT) -> None:
        super().__init__(engine, prompt)
        self.parameters, self.end = parameters, parameters.limits.max_length
        self.logprobs: list[TokenLogprobs] = []

    async def round(self, tree=None, ahead=None):
        verdict = await super().round(tree, ahead)
        self.logprobs += verdict.logprobs
        return verdict

    def back_to(self, length: int) -> None:
        del self.logprobs[length - len(self.prompt) :]
        super().back_to(length)


def test_the_librarys_are_computed_from_a_copy_of_the_row_whose_address_is_no_rows_among_others(monkeypatch):
    """A GPU's softmax adds in an order of the row's address."""
    monkeypatch.setattr("tree_kernels.row_softmax.cpu._kernel", lambda: None)
    log_softmax, given = torch.log_softmax, []
    monkeypatch.setattr(torch, "log_softmax", lambda row, dim: given.append(row) or log_softmax(row, dim))
    logits = torch.randn(4, 51, generator=torch.Generator().manual_seed(1))
    for row in range(4):
        found = token_logprobs(logits[row : row + 1], 3, 0)
        assert found.logprob == float(log_softmax(logits[row], 0)[3])
    assert [each.data_ptr() % 16 for each in given] == [0] * 4
    assert not any(each.data_ptr() == row.data_ptr() for each, row in zip(given, logits, strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("top", [0, 5, MAX_TOP_LOGPROBS])
@pytest.mark.parametrize("options", [{}, EDITED], ids=["plain", "edited"])
async def test_they_are_those_of_each_tokens_own_row_bit_for_bit_whatever_the_trees(loaded, options, top: int):
    asked = parameters_of(options | {"logprobs": top}, len(PROMPT), COUNT)
    rng = np.random.default_rng(top)
    async with started(VerifierEngine(loaded.scheduler, loaded.runner, await loaded.hello(), loaded._shelf)) as engine:
        without = RoundByRound(engine, PROMPT, asked.sampling, COUNT)
        without.parameters = replace(asked, logprobs=None)
        answer = await without.finish()
        truth = defined_logprobs(engine, [*PROMPT, *answer], len(PROMPT), top)
        trees = guessing(rng, answer)
        for given in ({}, {"trees": trees}, {"ahead": lambda: True}):
            router = AskingForLogprobs(engine, asked)
            assert (await router.finish(**given), router.logprobs) == (answer, truth)
        dropped = AskingForLogprobs(engine, asked)
        await dropped.open()
        while len(dropped.text) < dropped.end:
            before = len(dropped.text)
            await dropped.round(trees(dropped) if rng.random() < 0.7 else None, lambda: rng.random() < 0.5)
            if rng.random() < 0.5:
                dropped.back_to(int(rng.integers(before, len(dropped.text))))
        await dropped.close()
        assert (dropped.answer, dropped.logprobs) == (answer, truth)
        for held in (1, 10, COUNT - 1):  # the text is opened anew, as after the loss of a replica
            later = AskingForLogprobs(engine, asked, [*PROMPT, *answer[:held]])
            assert (await later.finish(), later.logprobs) == (answer[held:], truth[held:])


async def test_a_text_that_does_not_ask_for_them_computes_none(loaded, monkeypatch: pytest.MonkeyPatch):
    def refused(*_):
        raise AssertionError("a softmax for a text that asked for none")

    monkeypatch.setattr(walk_module, "token_logprobs", refused)
    async with started(VerifierEngine(loaded.scheduler, loaded.runner, await loaded.hello(), loaded._shelf)) as engine:
        router = RoundByRound(engine, PROMPT)
        await router.open()
        assert (await router.round()).logprobs == ()
        await router.close()


def test_only_rows_that_a_walk_visits_are_computed(loaded, monkeypatch: pytest.MonkeyPatch):
    """The rows of guesses off the path get no softmax."""
    seen, compute = [], walk_module.token_logprobs
    monkeypatch.setattr(walk_module, "token_logprobs", lambda *given: seen.append(given) or compute(*given))
    tree = DraftTree.of([3, 5, 6, 7, 8], [-1, 0, 0, 1, 2])
    logits = torch.randn(5, 257, generator=torch.Generator().manual_seed(0))
    logits[0, 6] = logits[2, 8] = 50.0
    draw = Draw(0, 0, 9, tree, Warp(0.0, 0, 1.0, 0.0), Sampling(), None, 2)
    walked, found = walk_module.walk_with_logprobs(loaded.runner.walker, draw, lambda row: logits[row : row + 1])
    assert walked.path == (0, 2, 4) and len(found) == len(seen) == 3
    assert all(torch.equal(given[0][0], logits[row]) for given, row in zip(seen, walked.path, strict=True))


def test_equal_logits_are_listed_by_id():
    rng = np.random.default_rng(0)
    for size in (1, 3, 257, 5000):
        for kinds in (1, 2, 40):
            logits = torch.from_numpy(rng.integers(-kinds, kinds, size)).float()
            order = sorted(range(size), key=lambda each: (-float(logits[each]), each))
            for top in (0, 1, 7, MAX_TOP_LOGPROBS):
                assert likeliest_tokens(logits, top).tolist() == order[:top], (size, kinds, top)


@pytest.mark.parametrize("top", [-1, MAX_TOP_LOGPROBS + 1, 2**32 - 1])
def test_a_call_for_more_than_the_bound_is_refused_by_the_name_of_the_field(top: int):
    with pytest.raises(BadRequest, match=f"^logprobs: must lie in 0 to {MAX_TOP_LOGPROBS}"):
        parameters_of({"logprobs": top}, len(PROMPT), COUNT)
