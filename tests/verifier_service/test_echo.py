"""Log-probabilities of a prompt: those of its own rows, bit for bit, whatever is kept of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from dendro.calls import RequestParameters
from dendro.engine import started
from dendro.errors import BadRequest
from dendro.options import MAX_ECHOED
from dendro.text import Limits, Sampling

from tests.support import tiny_hybrids, tiny_models
from tests.support.defined_logprobs import defined_logprobs
from tests.support.engines import bitwise_engine_of
from tests.support.made_once import made_once
from tests.support.routers import RoundByRound

PROMPT = [(7 * at * at + 3 * at) % 90 for at in range(210)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    def make(folder, family):
        if family == "llama":
            return tiny_models.make_checkpoint(folder)
        return tiny_hybrids.make_checkpoint(folder, family)

    return made_once(tmp_path_factory, make)


class Echoing(RoundByRound):
    """A router that asks for the log-probabilities of the text's tokens from `first` on."""

    def __init__(self, engine, prompt, first: int = 1, top: int = 3, count: int = 8, tenant: str = "") -> None:
        super().__init__(engine, prompt, count=count, tenant=tenant)
        self.parameters = replace(self.parameters, logprobs=top, echo_from=first)


@pytest.mark.parametrize("first", [1, 60, 209])
async def test_those_of_a_prompt_and_of_a_first_round_in_its_last_step_are_those_of_a_round_of_its_own(models, first):
    engine = bitwise_engine_of(models("llama")[0])
    async with started(engine):
        outcomes = []
        for ahead in (False, True):
            router = Echoing(engine, PROMPT, first)
            opened = await router.open(ahead)
            verdict = await router.round()
            outcomes.append((tuple(opened.logprobs), verdict.tokens, verdict.logprobs))
            await router.close()
        assert outcomes[0] == outcomes[1] and len(outcomes[1][0]) == len(PROMPT) - first


FAMILIES = ["llama", pytest.param("mamba2", marks=pytest.mark.slow), pytest.param("bamba", marks=pytest.mark.long)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
async def test_they_are_those_of_each_tokens_own_row_whatever_is_kept_of_the_prompt(models, family: str):
    engine = bitwise_engine_of(models(family)[0])
    truth = tuple(defined_logprobs(engine, PROMPT, 1, 3))
    async with started(engine) as running:
        plain = await RoundByRound(running, PROMPT, count=8).finish()
        open_text = RoundByRound(running, PROMPT, count=8)  # its pages and states are kept
        await open_text.open()
        for first in (1, 2, 64, 65, 130, 200, 209):
            router = Echoing(running, PROMPT, first)
            opened = await router.open()
            assert tuple(opened.logprobs) == truth[first - 1 :], first
            assert opened.restored <= first - 1 and opened.restored + opened.processed == len(PROMPT) - 1
            assert await router.go_on() == plain
        again = await RoundByRound(running, PROMPT, count=8).open()
        assert not again.logprobs
        short = Echoing(running, PROMPT[:1])
        assert not (await short.open()).logprobs


async def test_several_at_once_beside_rounds_each_get_their_own(models):
    engine = bitwise_engine_of(models("llama")[0])
    prompts = [PROMPT[:150], PROMPT[:70], PROMPT[5:50], [*PROMPT[:64], 9, 9, 9]]
    truths = [tuple(defined_logprobs(engine, prompt, 1, 2)) for prompt in prompts]
    async with started(engine) as running:
        other = RoundByRound(running, PROMPT[:30], count=40)
        await other.open()
        routers = [Echoing(running, prompt, top=2) for prompt in prompts]
        opened, _ = await asyncio.gather(asyncio.gather(*(each.open() for each in routers)), other.go_on())
        assert [tuple(each.logprobs) for each in opened] == truths


@pytest.mark.parametrize(("first", "top"), [(0, 2), (1, None)])
def test_a_call_for_them_without_the_tokens_own_or_from_the_first_token_is_refused(first: int, top: int | None):
    with pytest.raises(BadRequest, match="^echo_from: "):
        RequestParameters(Sampling(), Limits(40), "", (), logprobs=top, echo_from=first)


async def test_too_many_are_refused_before_a_row_is_computed(models, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dendro.logprobs.MAX_ECHOED", 300)
    assert MAX_ECHOED > 300
    async with started(bitwise_engine_of(models("llama")[0])) as running:
        with pytest.raises(BadRequest, match="^text: has 209 tokens with 4 log-probabilities each"):
            await Echoing(running, PROMPT).open()
        assert running.stats()["steps"] == 0
