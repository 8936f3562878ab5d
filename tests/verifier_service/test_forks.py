"""Texts of a state-space target that begin like an open one copy its memory: no prompt is computed twice."""

from __future__ import annotations

import numpy as np
import pytest
from dendro.engine import started
from dendro.text import Sampling

from tests.support import tiny_hybrids
from tests.support.engines import bitwise_engine_of
from tests.support.made_once import made_once
from tests.support.routers import RoundByRound, guessing
from tests.support.tiny_hybrids import VOCABULARY

PROMPT = [(7 * at * at + 3 * at) % 90 for at in range(150)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return made_once(tmp_path_factory, tiny_hybrids.make_checkpoint)


def sample(index: int) -> Sampling:
    return Sampling(temperature=1.0, seed=3, sample_index=index)


@pytest.mark.parametrize("family", ["mamba2", pytest.param("mamba", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rounds", [0, 1, 6, 20])
async def test_a_sample_copies_the_prompts_states_and_has_the_tokens_that_it_has_alone(models, family, rounds: int):
    """The first text is that many rounds past the prompt; each of its trees may have moved it on by several tokens."""
    rng = np.random.default_rng(rounds)
    async with started(bitwise_engine_of(models(family)[0])) as engine:
        truths = [await RoundByRound(engine, PROMPT, sample(index), 24).finish() for index in range(3)]
        first = RoundByRound(engine, PROMPT, sample(0), 24)
        assert (await first.open()).restored == 0, "no text is open"
        for _ in range(rounds):
            await first.round(guessing(rng, truths[0], VOCABULARY)(first) if rounds == 6 else None)
        ahead = len(first.answer)
        others = [RoundByRound(engine, PROMPT, sample(index), 24) for index in (1, 2)]
        for router in others:
            opened = await router.open()
            # A first text that is too far ahead no longer holds what the prompt's end needs.
            if ahead <= 9:
                assert (opened.restored, opened.processed) == (len(PROMPT) - 1, 0)
            assert opened.restored + opened.processed == len(PROMPT) - 1
        answers = [
            await router.go_on(guessing(rng, truth, VOCABULARY))
            for router, truth in zip(others, truths[1:], strict=True)
        ]
        assert [await first.go_on(), *answers] == truths


async def test_a_longer_text_goes_on_from_an_open_one_and_another_tenants_is_not_seen(models):
    async with started(bitwise_engine_of(models("mamba2")[0])) as engine:
        first = RoundByRound(engine, PROMPT[:100])
        await first.open()
        longer, other = RoundByRound(engine, PROMPT), RoundByRound(engine, PROMPT, tenant="another")
        unlike = RoundByRound(engine, [*PROMPT[:98], 95, 5])
        assert [(await each.open()).restored for each in (longer, other, unlike)] == [99, 0, 0]
        for router, prompt in ((longer, PROMPT), (other, PROMPT), (unlike, unlike.prompt)):
            answer = await router.go_on()
            assert answer == await RoundByRound(engine, prompt, tenant="alone").finish()
        await first.close()


async def test_a_copy_that_fails_costs_time_and_no_token(models, monkeypatch: pytest.MonkeyPatch):
    async with started(bitwise_engine_of(models("mamba2")[0])) as engine:
        truth = await RoundByRound(engine, PROMPT, sample(1)).finish()
        first = RoundByRound(engine, PROMPT, sample(0))
        await first.open()

        def broken(*_):
            raise RuntimeError("broken by a test")

        monkeypatch.setattr(engine.runner, "restore", broken)
        second = RoundByRound(engine, PROMPT, sample(1))
        assert (await second.open()).processed == len(PROMPT) - 1
        assert await second.go_on() == truth
        await first.close()


async def test_a_text_that_ends_before_what_an_open_copy_was_made_of_has_the_tokens_that_it_has_alone(models):
    """The second text copies a checkpoint after 16 tokens and the inputs since; the third needs inputs before these."""
    async with started(bitwise_engine_of(models("mamba2")[0])) as engine:
        truth = await RoundByRound(engine, PROMPT[:21]).finish()
        first, second, third = (RoundByRound(engine, PROMPT[:length]) for length in (60, 41, 21))
        assert [(await each.open()).restored for each in (first, second)] == [0, 40]
        assert await third.finish() == truth
        await first.close()
        await second.close()
