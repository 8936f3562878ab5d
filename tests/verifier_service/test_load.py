"""Many texts in little memory: waiting, growth, sharing, preemption. Every text has the tokens that it has alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dendro.calls import OpenCall, VerifyCall
from dendro.engine import Ticket
from dendro.errors import BadRequest, NotFound, Overloaded
from dendro.text import Tokens
from dendro.tree import DraftTree
from tree_kernels.tree_attention import PAGE, Layout
from tree_kernels.tree_walk import Walk
from tree_layers.memory import pages_for

from tests.support.cases import few_of
from tests.support.engines import engine_of
from tests.support.routers import LAWS, RoundByRound, alone, arrive_at_random, guessing, watch_logits
from tests.support.sockets import until
from tests.support.tiny_models import WINDOW, make_checkpoint
from verifier_service.budget import StepCosts, path_in, reached, subtree, worthwhile
from verifier_service.engine import _pool_pages
from verifier_service.memory import PageTable, TextMemory, most_pages, salt_of, working_bytes
from verifier_service.options import VerifierOptions
from verifier_service.requests import Capacity, PendingCall
from verifier_service.rows import StepOutcome
from verifier_service.scheduler import StepScheduler

SIZES = (8, 16, 24, 32, 48, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
async def test_random_arrivals_and_departures_in_little_memory_change_no_token(folder, dtype, seed):
    """Pages for about three of the texts, places for eight: texts wait, share, are preempted and computed again."""
    rng = np.random.default_rng(seed)
    engine = engine_of(folder, dtype, pool_tokens=9 * PAGE)
    await engine.start()
    try:
        begins = [rng.integers(0, 256, 70).tolist(), []]
        prompts = [begins[k % 2] + rng.integers(0, 256, int(rng.integers(1, 90))).tolist() for k in range(14)]
        laws = [LAWS[int(rng.integers(0, len(LAWS)))] for _ in prompts]
        await arrive_at_random(engine, prompts, laws, 40, rng, leaving=True)
        stats = engine.stats()
        assert stats["preempted"] > 0 and stats["shared_tokens"] > 0
        assert stats["pages_held"] == stats["sessions"] == 0
        assert stats["pages_held_at_most"] <= 9
    finally:
        await engine.stop()


async def test_a_text_without_a_free_place_waits_and_one_more_than_max_waiting_is_refused(folder):
    engine = engine_of(folder, max_sessions=2, max_waiting=1)
    await engine.start()
    try:
        first, second, third = (RoundByRound(engine, [token, 2, 3]) for token in (1, 2, 3))
        await first.open()
        await second.open()
        waiting = asyncio.ensure_future(third.open())
        await asyncio.sleep(0)  # calls are taken in the order in which they are sent
        with pytest.raises(Overloaded, match="2 texts are open and 1 wait"):
            await RoundByRound(engine, [4, 2, 3]).open()
        await until(lambda: engine.stats()["waited"] == 1)
        assert not waiting.done()
        await first.close()
        assert (await waiting).processed == 2
        for router in (second, third):
            await router.close()
        stats = engine.stats()
        assert (stats["waited"], stats["refused"], stats["sessions"], stats["pages_held"]) == (1, 1, 0, 0)
    finally:
        await engine.stop()


async def test_a_waiting_text_whose_caller_leaves_makes_room(folder):
    engine = engine_of(folder, max_sessions=1, max_waiting=1)
    await engine.start()
    try:
        first, second, third = (RoundByRound(engine, [token, 2, 3]) for token in (1, 2, 3))
        await first.open()
        waiting = asyncio.ensure_future(second.open())
        await asyncio.sleep(0)
        await first.round()  # its call is taken after that of the second text
        assert engine.sessions == 2 and not waiting.done()
        waiting.cancel()
        await asyncio.wait({waiting})
        queued = asyncio.ensure_future(third.open())
        await asyncio.sleep(0)
        await first.close()
        await queued
        await third.close()
        with pytest.raises(NotFound):
            await second.round()
        assert engine.stats()["sessions"] == 0
    finally:
        await engine.stop()


async def test_a_text_that_can_never_fit_is_refused_at_once_with_the_numbers(folder):
    engine = engine_of(folder, pool_tokens=2 * PAGE)
    await engine.start()
    try:
        message = "max_new_tokens: makes a text of up to 200 tokens, which needs 4 pages of 64 tokens; there are 2 in"
        with pytest.raises(BadRequest, match=message):
            await RoundByRound(engine, [1] * 100, count=100).open()
    finally:
        await engine.stop()


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_memory_fraction_must_be_one(folder, fraction):
    with pytest.raises(BadRequest, match="memory_fraction"):
        engine_of(folder, memory_fraction=fraction)


def test_a_pool_takes_its_share_of_the_free_memory(folder, monkeypatch):
    monkeypatch.setattr("verifier_service.engine.free_bytes", lambda device: 1 << 24)
    engine = engine_of(folder, memory_fraction=0.5)
    page_bytes = engine.runner.pages.token_bytes * PAGE
    assert engine.stats()["pages"] == (1 << 23) // page_bytes


def test_a_step_of_an_accelerator_has_the_memory_of_its_logits_filters_and_sums():
    assert working_bytes(1000, 8, splits=0, widest=0) == 1000 * (20 * 8 + 80 * 8)
    assert working_bytes(1000, 256, splits=0, widest=0) == 1000 * (20 * 256 + 80 * 32)
    assert working_bytes(0, 256, splits=40, widest=32 * 130) == 4 * 40 * 256 * 32 * 130


def test_a_pool_on_an_accelerator_leaves_room_for_a_steps_results(monkeypatch):
    """2 kv heads with 4 heads each; 550 tokens and depth have 3 splits."""
    monkeypatch.setattr("verifier_service.engine.free_bytes", lambda device: 1 << 31)
    layout = Layout(2, 64, 64, torch.bfloat16)
    run = SimpleNamespace(probed=[SimpleNamespace(group=4)])
    target = SimpleNamespace(run=run, layouts=(layout,), vocabulary=50_000, window=None, token_bytes=512)
    options = VerifierOptions(name="tiny", max_length=550, max_depth=16, prefill_chunk=128, memory_fraction=0.5)
    beside = 10_000 + working_bytes(50_000, 128, splits=3, widest=2 * 4 * (64 + 2))
    for device, taken in (("cpu", 10_000), ("cuda", beside)):
        pages = _pool_pages(options, target, torch.device(device), 10_000, None)
        assert pages == ((1 << 30) - taken) // (512 * PAGE)


async def test_equal_beginnings_are_computed_once_but_never_across_tenants(folder):
    engine = engine_of(folder)
    await engine.start()
    try:
        prompt = np.random.default_rng(1).integers(0, 256, 150).tolist()
        whole = await RoundByRound(engine, prompt).finish()
        again = RoundByRound(engine, prompt)
        opened = await again.open()
        assert (opened.restored, opened.processed) == (128, 21)
        other = RoundByRound(engine, prompt, tenant="another")
        assert (await other.open()).restored == 0
        for router in (again, other):
            while len(router.text) < router.end:
                await router.round()
            assert router.answer == whole
            await router.close()
        assert engine.stats()["pages_held"] == 0
    finally:
        await engine.stop()


async def test_a_text_cut_inside_a_shared_page_changes_no_other_text(folder):
    engine = engine_of(folder)
    await engine.start()
    try:
        prompt = np.random.default_rng(2).integers(0, 256, 140).tolist()
        whole = await RoundByRound(engine, prompt).finish()
        first, second = RoundByRound(engine, prompt), RoundByRound(engine, prompt)
        await first.open()
        await second.open()
        changed = prompt[:100] + [7, 8, 9]
        expected = await RoundByRound(engine, changed).finish()
        first.text = Tokens()  # its router drops tokens and goes on with others
        first.text.extend(changed)
        first.prompt, first.known, first.end = changed, 100, len(changed) + 24
        while len(first.text) < first.end:
            await first.round()
        while len(second.text) < second.end:
            await second.round()
        assert first.answer == expected
        assert second.answer == whole
        await first.close()
        await second.close()
        assert engine.stats()["pages_held"] == 0
    finally:
        await engine.stop()


def test_released_pages_are_found_again_until_they_are_reused():
    memory, ids = PageTable(4), list(range(3 * PAGE))
    text = TextMemory(salt_of("a"))
    assert memory.grow(text, len(ids))
    memory.append(text, ids)
    pages = list(text.pages)
    memory.release(text)
    assert memory.held == 0
    assert memory.adopt(text, ids[: 2 * PAGE + 1]) == 2 * PAGE
    assert text.pages == pages[:2]
    other = TextMemory(salt_of("a"))
    assert memory.grow(other, 2 * PAGE)  # the blank page, and the one published last
    memory.release(text)
    assert memory.adopt(text, ids) == 2 * PAGE
    memory.release(text)
    assert not memory.grow(other, 5 * PAGE)
    assert memory.grow(other, 4 * PAGE)
    assert memory.adopt(TextMemory(salt_of("a")), ids) == 0


def test_pages_computed_twice_become_one():
    memory, ids = PageTable(4), list(range(PAGE))
    texts = [TextMemory(salt_of("")) for _ in range(2)]
    for text in texts:
        memory.grow(text, PAGE)
    assert memory.held == 2
    for text in texts:
        memory.append(text, ids)
    assert texts[0].pages == texts[1].pages
    assert memory.held == 1
    for text in texts:
        memory.release(text)
    assert memory.held == 0


def random_values(rng, rows):
    parents = [-1, *(int(rng.integers(0, row)) for row in range(1, rows))]
    values = [0.0]
    for row in range(1, rows):
        values.append(values[parents[row]] - float(rng.exponential(0.7)))
    return DraftTree.of(range(rows), parents, values)


@pytest.mark.parametrize("seed", range(8))
def test_the_guesses_that_are_kept_are_the_best_of_all_subtrees(seed):
    """Compared with every choice of guesses that includes their ancestors."""
    rng = np.random.default_rng(seed)
    trees = [random_values(rng, int(rng.integers(2, 6))) for _ in range(2)]
    costs = StepCosts()
    for size in SIZES:
        costs.learn(size, 100.0 + 4.0 * size)
    sizes = tuple(range(1, 65))  # every row costs
    must = len(trees)

    def rate(chosen):
        rows = sum(len(each) for each in chosen)
        gain = sum(reached([tree])[list(each)].sum() for tree, each in zip(trees, chosen, strict=True))
        return gain / costs.us(np.array([must - len(trees) + rows]))[0]

    def closed(tree):
        rows = range(1, tree.rows)
        for count in range(tree.rows):
            for some in combinations(rows, count):
                if all(tree.parents[row] in (0, *some) for row in some):
                    yield (0, *some)

    best = max(rate((first, second)) for first in closed(trees[0]) for second in closed(trees[1]))
    kept = worthwhile(trees, must, 64, sizes, costs)
    tokens = [tuple(tree.tokens.tolist()) for tree in kept]  # which are the rows' numbers here
    assert rate(tokens) == pytest.approx(best, rel=1e-12)


def test_a_saturated_step_drops_all_guesses_and_a_lone_text_keeps_its_tree():
    rng = np.random.default_rng(0)
    trees = [random_values(rng, 12) for _ in range(6)]
    costs = StepCosts()
    costs.learn(8, 100.0)
    costs.learn(64, 100_000.0)
    assert [tree.rows for tree in worthwhile(trees, 6, 100, SIZES, costs)] != [12] * 6
    steep = StepCosts()
    steep.learn(6, 100.0)
    steep.learn(12, 1e9)
    assert [tree.rows for tree in worthwhile(trees, 6, 100, tuple(range(1, 90)), steep)] == [1] * 6
    assert worthwhile(trees[:1], 1, 100, SIZES, costs)[0].rows == 12
    assert sum(tree.guesses for tree in worthwhile(trees, 6, 9, SIZES, StepCosts())) == 9


def test_a_guess_whose_value_is_above_its_parents_is_not_kept_without_its_parent():
    tree = DraftTree.of([0, 1, 2, 3], [-1, 0, 1, 2], [0.0, -3.0, -0.1, -0.1])
    rival = DraftTree.of([0, 1], [-1, 0], [0.0, -0.5])
    kept = worthwhile([tree, rival], 2, 2, SIZES, StepCosts())
    assert [each.rows for each in kept] == [2, 2]


@pytest.mark.parametrize("seed", range(4))
def test_drafters_whose_values_rise_along_long_paths_have_their_trees_trimmed_to_whole_paths(seed):
    """A drafter may send any values that are finite and at most 0: zeros of both signs, the least, rising ones."""
    rng = np.random.default_rng(seed)
    some = [0.0, -0.0, -1e-45, -1.0, -50.0, -3e38]
    trees, minima = [], []
    for rows in (2, 33, 64):
        parents = [-1, *(row - 1 if rng.random() < 0.9 else int(rng.integers(0, row)) for row in range(1, rows))]
        tree = DraftTree.of(range(rows), parents, rng.choice(some, rows))
        least = tree.values.astype(np.float64)
        for row in range(1, rows):
            least[row] = min(least[row], least[parents[row]])
        trees.append(tree)
        minima.append(least)
    assert reached(trees).tolist() == np.exp(np.concatenate(minima)).tolist()
    for most in (1, 20, 60, 95):
        kept = worthwhile(trees, len(trees), most, SIZES, StepCosts())
        assert sum(tree.guesses for tree in kept) == most
        for tree, part in zip(trees, kept, strict=True):
            rows = part.tokens.tolist()  # the rows' numbers here
            assert [rows[above] for above in part.parents[1:]] == [tree.parents[row] for row in rows[1:]]


def test_a_subtrees_path_is_given_in_the_rows_of_the_whole_tree():
    tree = DraftTree.of([0, 5, 6, 7, 8], [-1, 0, 0, 2, 2])
    part = subtree(tree, np.array([True, False, True, False, True]))
    assert (part.tokens.tolist(), part.parents.tolist()) == ([0, 6, 8], [-1, 0, 1])
    assert path_in(tree, (6, 8)) == ((0, 2, 4), (1, 1))


def scheduler_of(clock=time.monotonic, **limits):
    settings: dict[str, Any] = {
        "vocabulary": 100,
        "max_length": 64,
        "max_rows": 16,
        "max_depth": 8,
        "max_sessions": 8,
        "max_waiting": 0,
        "step_rows": 64,
        "sizes": SIZES,
        "prefill_rows": 16,
        "pages": 16,
        "share_prefixes": True,
        "first_scratch": 30 * PAGE,
        "end_ids": frozenset(),
    }
    return StepScheduler(Capacity(**settings | limits), clock)


@pytest.mark.parametrize("guesses, rows", [(0, 16), (3, 16), (11, 24), (14, 24), (15, 24)])
def test_a_prompt_beside_a_tree_gets_every_row_that_would_be_padding(guesses, rows):
    scheduler = scheduler_of(step_rows=64, prefill_rows=16)
    decoding, opening = RoundByRound(None, [1], count=9), RoundByRound(None, range(50), count=9)
    tree = DraftTree.of(list(range(1, guesses + 2)), [-1, *[0] * guesses])
    calls = [OpenCall(router.update(), router.parameters) for router in (decoding, opening)]
    decoding.known = 1
    for call in (*calls, VerifyCall(decoding.update(), tree)):
        scheduler.submit(PendingCall(call, Ticket(0.0)))
    assert len(scheduler.next().tokens) == rows


def test_a_verdict_reports_how_many_of_its_own_trees_guesses_were_left_out():
    """A step of 16 rows, 2 of them roots: of 9 guesses and 7 less likely ones, 9 and 5 are in the step."""
    scheduler = scheduler_of(step_rows=16, prefill_rows=8, sizes=(8, 16))
    tickets = []
    for place, (guesses, value) in enumerate([(9, -1.0), (7, -2.0)]):
        router = RoundByRound(None, [1], count=9)
        tree = DraftTree.of(range(1, guesses + 2), [-1, *[0] * guesses], [0.0, *[value] * guesses])
        scheduler.submit(PendingCall(OpenCall(router.update(), router.parameters), Ticket(0.0)))
        router.known = 1
        tickets.append(Ticket(0.0))
        scheduler.submit(PendingCall(VerifyCall(router.update(), tree), tickets[place]))
    plan = scheduler.next()
    scheduler.apply(StepOutcome(tuple(Walk((0,), (99,), ()) for _ in plan.draws), 1000, 1000))
    assert [ticket.value.trimmed for ticket in tickets] == [0, 2]


@pytest.mark.parametrize("cold", [True, False])
def test_the_time_of_a_step_that_compiled_is_not_learned_as_a_cost(cold):
    scheduler = scheduler_of()
    router, ticket = RoundByRound(None, [1], count=9), Ticket(0.0)
    scheduler.submit(PendingCall(OpenCall(router.update(), router.parameters), Ticket(0.0)))
    router.known = 1
    scheduler.submit(PendingCall(VerifyCall(router.update(), DraftTree.root_only(1)), ticket))
    scheduler.next()
    scheduler.apply(StepOutcome((Walk((0,), (99,), ()),), 9_000_000, 9_000_000, cold))
    assert ticket.value.cold is cold
    assert bool(scheduler.costs._us) is not cold


class TakingTurns:
    """Texts whose routers send the next round `away_s` after each verdict, on a simulated clock."""

    STEP_S = 0.020

    def __init__(self, away_s):
        self.now = 100.0
        self.scheduler, self.away_s = scheduler_of(clock=lambda: self.now), away_s
        self.routers = [RoundByRound(None, [place + 1], count=50) for place in range(len(away_s))]
        self.due = {}
        self.sharers = 0  # texts of the last step, as its verdicts report
        for router in self.routers:
            self.submit(OpenCall(router.update(), router.parameters))
            router.known = len(router.text)
        while (plan := self.scheduler.next()) is not None:
            self.run(plan)
        for size in SIZES:
            self.scheduler.costs.learn(size, self.STEP_S * 1e6)
        for place in range(len(self.routers)):
            self.due[place] = self.now + 0.003 * place

    def submit(self, call, arrived=None):
        ticket = Ticket(self.now if arrived is None else arrived)
        self.scheduler.submit(PendingCall(call, ticket))
        return ticket

    def run(self, plan):
        self.now += self.STEP_S  # for any number of rows: steps are memory-bound
        walks = tuple(Walk((0,), (7,), ()) for _ in plan.draws)
        self.scheduler.apply(StepOutcome(walks, 19_000, int(1e6 * self.STEP_S)))

    def rounds(self, count, places=None):
        """Steps that `count` rounds of every text take, or only of those at `places`."""
        tickets, steps = {}, 0
        left = {place: count if places is None or place in places else 0 for place in range(len(self.routers))}
        while any(left.values()):
            for place in [place for place, due in self.due.items() if due <= self.now and left[place]]:
                router = self.routers[place]
                call = VerifyCall(router.update(), DraftTree.root_only(router.text.ids[-1]))
                tickets[place] = self.submit(call, self.due.pop(place))
                router.known = len(router.text)
            plan = self.scheduler.next()
            if plan is None:
                arrivals = [due for place, due in self.due.items() if left[place]]
                self.now = min([*arrivals, *([self.now + self.scheduler.linger_s] if self.scheduler.linger_s else [])])
                continue
            steps += 1
            self.run(plan)
            for place in [place for place, ticket in tickets.items() if ticket.settled]:
                verdict = tickets.pop(place).value
                self.sharers = verdict.texts
                self.routers[place].text.extend(verdict.tokens)
                left[place] -= 1
                self.due[place] = self.now + self.away_s[place]
        return steps


def test_texts_whose_routers_return_soon_share_their_steps():
    turns = TakingTurns([0.002, 0.003, 0.004])
    turns.rounds(4)
    assert turns.rounds(20) == 20


def test_texts_that_arrive_during_the_others_step_share_the_next_one():
    turns = TakingTurns([0.004] * 4)
    turns.due = {place: turns.now + (0.0, 0.0, 0.004, 0.004)[place] for place in range(4)}
    turns.rounds(4)
    assert turns.rounds(20) == 20
    assert turns.sharers == 4


def test_no_step_waits_for_a_router_that_is_away_for_long():
    turns = TakingTurns([0.002, 0.050])
    turns.rounds(4)
    began = turns.now
    turns.rounds(12)
    alone_s = 12 * (turns.STEP_S + 0.002)
    assert turns.scheduler.linger_s == 0.0
    assert turns.now - began < 2 * alone_s + 12 * 0.050


def test_a_router_that_never_returns_delays_no_other_text():
    turns = TakingTurns([0.002, 0.003])
    turns.rounds(4)
    turns.rounds(2, places=[0])  # for a while the other one is still expected
    began = turns.now
    turns.rounds(10, places=[0])
    assert turns.now - began == pytest.approx(10 * (turns.STEP_S + 0.002), abs=0.0021)


def test_a_lone_text_never_waits():
    turns = TakingTurns([0.002])
    began = turns.now
    assert turns.rounds(10) == 10
    assert turns.now - began == pytest.approx(10 * turns.STEP_S + 9 * 0.002)


@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "first round announced"])
def test_a_text_that_waits_while_another_publishes_all_that_it_lacks_is_opened(ahead):
    """Two equal prompts of a page and a root, of which the first takes all rows of a step."""
    scheduler = scheduler_of(max_length=2 * PAGE, step_rows=PAGE)
    openings, calls = [], 0
    for _ in range(2):
        router = RoundByRound(None, range(PAGE + 1), count=9)
        openings.append(Ticket(0.0))
        call = OpenCall(router.update(), router.parameters, ahead=ahead)
        scheduler.submit(PendingCall(call, openings[-1]))
    while (plan := scheduler.next()) is not None:
        calls += 1
        scheduler.apply(StepOutcome(tuple(Walk((0,), (7,), ()) for _ in plan.draws), 1, 1))
    assert [ticket.settled for ticket in openings] == [True, True]
    assert [ticket.value.restored for ticket in openings] == [0, PAGE]
    assert calls == (2 if ahead else 1), "the announced rounds share a step"


def test_no_step_has_more_rows_than_step_rows_though_a_text_was_preempted():
    scheduler = scheduler_of(step_rows=32, prefill_rows=8)
    routers = [
        RoundByRound(None, [1], count=9),
        RoundByRound(None, [2], count=9),
        RoundByRound(None, range(41), count=9),
    ]
    tickets = []

    def submit(call):
        tickets.append(Ticket(0.0))
        scheduler.submit(PendingCall(call, tickets[-1]))

    def step():
        plan = scheduler.next()
        assert plan is not None
        assert len(plan.tokens) <= 32
        scheduler.apply(StepOutcome(tuple(Walk((0,), (7,), ()) for _ in plan.draws), 1, 1))

    for router in routers:
        submit(OpenCall(router.update(), router.parameters))
        router.known = len(router.text)
    while not all(ticket.settled for ticket in tickets):
        step()
    scheduler.memory.release(scheduler.sessions[routers[2].opening].memory)
    for router in routers:
        root = router.text.ids[-1]
        submit(VerifyCall(router.update(), DraftTree.of([root, *range(50, 65)], [-1, *[0] * 15])))
    for _ in range(12):
        if all(ticket.settled for ticket in tickets):
            break
        step()
    assert all(ticket.settled for ticket in tickets)


# Sliding windows


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    path = tmp_path_factory.mktemp("mistral")
    make_checkpoint(path, "mistral")
    return path


def sliding_engine(folder, dtype=torch.float32, **limits):
    return engine_of(folder, dtype, **limits)


MOST = most_pages(512, WINDOW, slack=9, rows=128 + 8)


@pytest.mark.parametrize("dtype", few_of([torch.float32, torch.bfloat16], torch.float32), ids=["fp32", "bf16"])
async def test_texts_longer_than_the_pool_keep_their_tokens_where_windows_slide(sliding, dtype):
    """Texts of up to 300 tokens, seven pages of 64: they release pages out of sight, share, wait and are preempted."""
    rng = np.random.default_rng(8)
    engine = sliding_engine(sliding, dtype, pool_tokens=7 * PAGE)
    roomy = sliding_engine(sliding, dtype)
    await engine.start()
    await roomy.start()
    try:
        begins = [rng.integers(0, 256, 130).tolist(), []]
        prompts = [begins[k % 2] + rng.integers(0, 256, int(rng.integers(1, 90))).tolist() for k in range(6)]
        laws = [LAWS[k % len(LAWS)] for k in range(len(prompts))]
        truths = await alone(roomy, prompts, laws, 90)
        routers = [RoundByRound(engine, prompt, law, 90) for prompt, law in zip(prompts, laws, strict=True)]
        trees = [guessing(rng, truth) for truth in truths]
        assert await asyncio.gather(*map(RoundByRound.finish, routers, trees)) == truths
        stats = engine.stats()
        assert stats["preempted"] > 0 and stats["shared_tokens"] > 0
        assert stats["pages_held"] == stats["sessions"] == 0
    finally:
        await engine.stop()
        await roomy.stop()


async def test_a_long_text_holds_no_more_than_its_window_needs(sliding):
    engine = sliding_engine(sliding, pool_tokens=MOST * PAGE, share_prefixes=False)
    await engine.start()
    try:
        assert pages_for(501) > MOST
        await RoundByRound(engine, [5] * 300, count=200).finish()
        assert engine.stats()["pages_held_at_most"] <= MOST
        router = RoundByRound(engine, [5] * 300, count=200)
        await router.open()
        assert engine.stats()["pages_held"] <= pages_for(WINDOW + 9) + 1, "the window, and what may be cut"
        await router.close()
    finally:
        await engine.stop()


async def test_a_text_cut_to_before_its_released_pages_is_computed_again(sliding):
    engine = sliding_engine(sliding)
    await engine.start()
    try:
        truth = await RoundByRound(engine, range(30), count=250).finish()
        router = RoundByRound(engine, range(30), count=250)
        await router.open()
        while len(router.text) < 230:
            await router.round(DraftTree.of([router.text.ids[-1], 1, 2], [-1, 0, 0]))
        router.back_to(60)
        assert await router.go_on() == truth
    finally:
        await engine.stop()


async def test_a_text_cut_inside_a_shared_page_sees_all_that_its_rows_see(sliding):
    """All tokens of that page are computed again; the first of them sees further back than the row at the cut."""
    engine = sliding_engine(sliding)
    seen = watch_logits(engine)
    await engine.start()
    try:
        straight = RoundByRound(engine, range(30), count=190)
        await straight.finish()
        router = RoundByRound(engine, range(30), count=190)
        await router.open()
        while len(router.text) < 3 * PAGE + 3:
            await router.round()
        router.back_to(3 * PAGE - 2)  # by a verdict's length, but into a page that is full and published
        assert await router.go_on() == straight.answer
        first, second = seen.values()
        for position, logits in first.items():
            assert torch.equal(second[position], logits), position
    finally:
        await engine.stop()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("window", "slack"), [(70, 9), (1, 3), (64, 17), (129, 2), (300, 17)])
def test_after_every_cut_all_pages_that_the_next_rows_see_are_held(window, slack, share):
    rng = np.random.default_rng(window)
    memory = PageTable(40, share, window, slack)
    text = TextMemory(salt_of(""))
    ids = rng.integers(0, 256, 2000).tolist()
    for _ in range(400):
        done = len(text.consumed)
        if rng.random() < 0.3 and done:
            back = int(rng.integers(0, slack + 1)) if rng.random() < 0.8 else int(rng.integers(0, done))
            memory.cut(text, done - min(back, done))
        elif done < 1900:
            more = int(rng.integers(1, 90))
            if not text.pages:
                done = memory.adopt(text, ids[: done + more])
            assert memory.grow(text, done + more)
            memory.append(text, ids[done : done + more])
        done = len(text.consumed)
        first = max(done - window + 1, 0) // PAGE
        assert all(text.pages[first : pages_for(done)]), (done, text.pages)
        assert text.consumed == ids[:done]
    memory.release(text)
    assert memory.held == 0


def test_pages_out_of_sight_are_free_and_those_in_sight_are_not():
    memory = PageTable(8, share=False, window=100, slack=4)
    text = TextMemory(salt_of(""))
    memory.grow(text, 6 * PAGE)
    memory.append(text, range(PAGE + 102))  # the next rows, after any cut within the slack, are at 162 and later
    assert text.unseen == 0 and memory.held == 6
    memory.append(text, [0])  # at 163 a row sees from 64 on
    assert text.unseen == 1 and memory.held == 5 and text.pages[0] == 0 and 0 not in text.pages[1:]
    memory.cut(text, PAGE + 99)
    assert len(text.consumed) == PAGE + 99 and memory.held == 5
    memory.cut(text, PAGE + 98)  # a row there would see the released page
    assert text.consumed == [] and memory.held == 0


def test_a_text_that_waits_for_a_place_delays_no_step_by_its_announced_first_round():
    turns = TakingTurns([0.002] * 8)
    turns.scheduler.capacity = replace(turns.scheduler.capacity, max_waiting=1)
    router = RoundByRound(None, [1], count=9)
    turns.submit(OpenCall(router.update(), router.parameters, ahead=True))
    turns.rounds(1)  # from here on, all are expected to return soon
    assert turns.scheduler.next() is None and turns.scheduler.linger_s == 0.0, "there is nothing to wait with"
