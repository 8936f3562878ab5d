"""Rounds that are begun before their calls: the tokens are the same, and nothing is begun past an answer's end."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from dendro.errors import BadRequest, NotFound
from dendro.state import MemoryStates
from dendro.text import Sampling
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE

from tests.support.engines import TINY_TARGETS, engine_of, make_target
from tests.support.exactness import bitwise_or_skip
from tests.support.routers import LAWS, RoundByRound, alone, guessing

PROMPT = [5, 6, 7, 8, 9] * 8


def always():
    return True


@pytest.fixture(scope="module", params=TINY_TARGETS)
def folder(request, tmp_path_factory):
    return make_target(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def engine(folder):
    engine = engine_of(folder)
    await engine.start()
    yield engine
    await engine.stop()


async def idle(engine):
    """Wait until the engine has run every step that it can without a call."""
    steps = -1
    while steps != engine.stats()["steps"]:
        steps = engine.stats()["steps"]
        for _ in range(2):  # between two calls comes a step, if there is one to run
            await asyncio.to_thread(engine._thread.run, lambda: None)


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "warm", "warped"])
async def test_an_answer_whose_rounds_are_begun_ahead_has_the_tokens_that_it_has_without(engine, law):
    (truth,) = await alone(engine, [PROMPT], [law], 24)
    before = engine.stats()
    assert await RoundByRound(engine, PROMPT, law).finish(ahead=always) == truth
    after = engine.stats()
    assert after["ahead"] - before["ahead"] == 24, "every round; none past the last"
    assert after["unclaimed"] == before["unclaimed"]
    assert after["rows"] - before["rows"] == len(PROMPT) - 1 + 24, "no row is computed twice"


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "warm", "warped"])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 130, 200])
async def test_a_first_round_announced_by_the_opening_has_its_root_in_the_prompts_last_step(engine, length, law):
    prompt = (5 * PROMPT)[:length]
    (truth,) = await alone(engine, [prompt], [law], 4)
    router, before = RoundByRound(engine, prompt, law, 4, tenant="another"), engine.stats()["steps"]  # shares no pages
    opened = await router.open(ahead=True)
    assert opened.processed == length - 1, "the root is not of the opening"
    await idle(engine)
    steps = engine.stats()["steps"] - before
    assert steps == -(-length // 128), "as many as the prompt and its root have parts"
    verdict = await router.round()
    assert engine.stats()["steps"] - before == steps and engine.stats()["unclaimed"] == 0
    assert verdict.cold is (length % 128 != 1), "its step had rows of the prompt, so that its time predicts nothing"
    assert await router.go_on() == truth


async def test_a_tree_after_an_announced_first_round_is_verified_as_if_nothing_had_been_announced(engine):
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 24)
    router = RoundByRound(engine, PROMPT, LAWS[1])
    await router.open(ahead=True)
    await idle(engine)
    verdict = await router.round(DraftTree.of([PROMPT[-1], truth[0], truth[1]], [-1, 0, 1]))
    assert verdict.tokens[:2] == tuple(truth[:2]), "its guesses were accepted"
    assert engine.stats()["unclaimed"] == 1
    assert await router.go_on() == truth


async def test_texts_opened_together_with_announced_first_rounds_have_the_tokens_that_they_have_alone(engine):
    prompts = [[*PROMPT[place:], place] for place in range(8)]
    truths = await alone(engine, prompts, [LAWS[1]] * 8, 6)
    routers = [RoundByRound(engine, prompt, LAWS[1], 6) for prompt in prompts]
    assert await asyncio.gather(*(router.finish(ahead=always) for router in routers)) == truths


async def test_an_announced_first_round_that_is_refused_is_dropped_and_the_text_is_open(engine, monkeypatch):
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 8)
    verdict, refused = engine.scheduler._verdict, []

    def refusing(*args):
        if not refused:
            refused.append(args)
            raise BadRequest("structure", "refused by a test")
        return verdict(*args)

    monkeypatch.setattr(engine.scheduler, "_verdict", refusing)
    router = RoundByRound(engine, PROMPT, LAWS[1], 8)
    await router.open(ahead=True)
    assert refused
    assert await router.go_on() == truth


async def test_a_round_is_begun_before_its_call_and_only_one(engine):
    router = RoundByRound(engine, PROMPT)
    await router.open()
    await router.round(ahead=always)
    await idle(engine)
    steps = engine.stats()["steps"]
    await router.round()
    await idle(engine)
    assert engine.stats()["steps"] == steps, "the answer was ready, and its call announced no other round"
    await router.close()


async def test_a_tree_after_an_announced_root_is_verified_as_if_nothing_had_been_announced(engine):
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 24)
    router = RoundByRound(engine, PROMPT, LAWS[1])
    await router.open()
    await router.round(ahead=always)
    await idle(engine)
    vocabulary = engine.runner.target.vocabulary
    trees = guessing(np.random.default_rng(0), truth, vocabulary)
    verdict = await router.round(DraftTree.of([router.text.ids[-1], truth[1], truth[2]], [-1, 0, 1]))
    assert verdict.tokens[:2] == tuple(truth[1:3]), "its guesses were accepted"
    assert engine.stats()["unclaimed"] == 1
    assert await router.go_on(trees, always) == truth


@pytest.mark.parametrize("kept", [1, 0], ids=["another token", "a token fewer"])
async def test_a_call_with_another_text_than_the_announced_is_verified_with_its_own(engine, kept):
    router = RoundByRound(engine, PROMPT)
    await router.open()
    await router.round(ahead=always)
    await idle(engine)
    other = (router.text.ids[-1] + 1) % engine.runner.target.vocabulary
    router.back_to(len(PROMPT))
    router.text.extend([other] * kept)
    (truth,) = await alone(engine, [router.text.ids], [Sampling()], 1)
    assert (await router.round()).tokens == tuple(truth)
    assert engine.stats()["unclaimed"] == 1
    await router.close()


async def test_a_verdict_that_no_call_asked_for_answers_no_later_call(engine):
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 24)
    router = RoundByRound(engine, PROMPT, LAWS[1])
    await router.open()
    await router.round(ahead=always)
    await idle(engine)
    await router.round(DraftTree.of([router.text.ids[-1], truth[1]], [-1, 0]))
    length = len(router.text)
    await router.round()
    router.back_to(length)  # the last verdict was lost on its way: its call is repeated
    await router.round()
    assert router.answer == truth[: len(router.answer)]
    await router.close()


async def test_a_text_whose_next_round_is_begun_delays_no_step_of_others(engine):
    router = RoundByRound(engine, PROMPT)
    await router.open()
    await router.round(ahead=always)
    (session,) = engine.scheduler.sessions.values()
    assert session.answered is None, "steps wait for texts that were answered"
    await router.close()


async def test_a_client_that_leaves_while_its_next_round_runs_leaves_nothing(engine):
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 8)
    for rounds in range(1, 4):
        router = RoundByRound(engine, PROMPT, LAWS[1])
        await router.open()
        for _ in range(rounds):
            await router.round(ahead=always)
        await router.close()  # at once: the round begun ahead waits, runs or has just ended
    await idle(engine)
    assert engine.stats()["pages_held"] == engine.sessions == 0
    assert await RoundByRound(engine, PROMPT, LAWS[1], 8).finish(ahead=always) == truth


async def test_texts_that_lose_their_pages_with_a_round_ahead_have_the_same_tokens(folder):
    engine = engine_of(folder, pool_tokens=3 * PAGE, share_prefixes=False)
    await engine.start()
    try:
        prompts = [[5 + place, 6, 7, 8] * 10 for place in range(3)]
        count = 2 * PAGE - len(prompts[0]) - engine.scheduler.capacity.max_depth - 1
        truths = await alone(engine, prompts, LAWS, count)
        routers = [RoundByRound(engine, *each, count) for each in zip(prompts, LAWS, strict=True)]
        assert await asyncio.gather(*(router.finish(ahead=always) for router in routers)) == truths
        assert engine.stats()["preempted"] > 0
        assert engine.stats()["pages_held"] == engine.sessions == 0
    finally:
        await engine.stop()


async def test_the_times_of_a_round_begun_ahead_are_within_the_wait_of_its_call(engine, monkeypatch):
    router = RoundByRound(engine, PROMPT)
    await router.open()
    await router.round(ahead=always)
    await idle(engine)
    arrived_s = engine.scheduler.clock()  # a wait of 10 us, however busy the machine is; the step took longer
    monkeypatch.setattr(engine._thread, "clock", lambda: arrived_s)
    monkeypatch.setattr(engine.scheduler, "clock", lambda: arrived_s + 10e-6)
    verdict = await router.round()
    assert verdict.verify_us + verdict.queue_us <= 10
    assert verdict.ahead_us > 0, "the step had ended before"
    monkeypatch.undo()
    await router.close()


async def test_no_round_is_begun_past_the_end_of_an_answer(engine):
    router = RoundByRound(engine, PROMPT, count=2)
    await router.open()
    await router.round(ahead=always)
    await router.round(ahead=always)
    await idle(engine)
    assert engine.stats()["ahead"] == 1
    await router.close()
    assert engine.stats()["pages_held"] == engine.sessions == 0


async def test_a_text_that_is_closed_with_a_round_ahead_is_freed_and_its_state_is_that_of_the_text(folder):
    store = MemoryStates()
    engines = [engine_of(folder, states=store) for _ in range(2)]
    for each in engines:
        bitwise_or_skip(each)
        await each.start()
    try:
        (truth,) = await alone(engines[1], [PROMPT], [LAWS[1]], 24)
        store.blobs.clear()
        router = RoundByRound(engines[0], PROMPT, LAWS[1])
        await router.open()
        for _ in range(7):
            await router.round(ahead=always)
        await idle(engines[0])
        saved = (await router.close()).saved
        assert saved == (len(router.text) - 1 if engines[0].scheduler.capacity.saves else 0)
        assert engines[0].stats()["pages_held"] == engines[0].sessions == 0
        later = RoundByRound(engines[1], router.text.ids, LAWS[1], 24 - 7)
        assert (await later.open()).restored >= saved
        assert router.answer + await later.go_on() == truth
    finally:
        for each in engines:
            await each.stop()


async def test_a_step_that_fails_ahead_of_its_call_costs_an_opening_and_no_answer(engine, monkeypatch):
    """The call finds its text closed, as after a restart: its router opens the text again."""
    router = RoundByRound(engine, PROMPT, Sampling())
    await router.open()
    run = engine.runner.run

    def failing(plan):
        monkeypatch.setattr(engine.runner, "run", run)
        raise RuntimeError("broken by a test")

    await router.round(ahead=always)
    await idle(engine)
    monkeypatch.setattr(engine.runner, "run", failing)
    await router.round(ahead=always)  # its verdict was computed ahead; the round after it fails
    await idle(engine)
    with pytest.raises(NotFound, match="opening: unknown here"):
        await router.round()
    (truth,) = await alone(engine, [PROMPT], [Sampling()], 24)
    assert await RoundByRound(engine, PROMPT).finish() == truth


async def test_a_round_ahead_that_is_refused_is_dropped_and_all_texts_go_on(engine, monkeypatch):
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 8)
    router, other = RoundByRound(engine, PROMPT, LAWS[1], 8), RoundByRound(engine, PROMPT[::-1], Sampling(), 8)
    await router.open()
    await other.open()
    follow, refused = engine.scheduler._follow, []

    def refusing(session, call):
        if call.update.start == call.update.base > len(PROMPT) and not refused:  # the round begun ahead
            refused.append(call)
            raise BadRequest("text", "refused by a test")
        return follow(session, call)

    monkeypatch.setattr(engine.scheduler, "_follow", refusing)
    await router.round(ahead=always)
    await idle(engine)
    assert refused
    assert await router.go_on() == truth
    await other.go_on()


async def test_a_call_that_arrives_while_its_closed_text_is_saved_is_refused_and_other_texts_go_on(folder):
    engine = engine_of(folder, states=MemoryStates())
    await engine.start()
    try:
        other = RoundByRound(engine, PROMPT[::-1], Sampling(), 12)
        await other.open()
        for _ in range(8):
            router = RoundByRound(engine, PROMPT, LAWS[1])
            await router.open()
            await router.round(ahead=always)
            late = asyncio.create_task(router.round())
            await router.close()
            with pytest.raises(NotFound):
                await late
        await other.go_on()
    finally:
        await engine.stop()
