"""Trees that a verifier asks drafters for itself: the tokens are the same, whatever comes, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from dendro.calls import DraftCall, PeerText, VerifyCall
from dendro.errors import BadAnswer, BadRequest, EngineFailed, NotFound, PeerLost
from dendro.modes import VerificationMode
from dendro.order import Missed, Order, missed_by
from dendro.shapes import TreeShape
from dendro.text import Sampling
from dendro.tree import DraftTree

from tests.support.engines import TINY_TARGETS, engine_of, make_target
from tests.support.routers import LAWS, RoundByRound, alone, guessing
from tests.support.sockets import until

PROMPT = [5, 6, 7, 8, 9] * 8
SHAPE = TreeShape.parse("dynamic(4,5,31)")
DRAFTERS_OPENING = bytes(range(16))


class Links:
    """Ways to one drafter that keeps its copy of the text, and answers when and what a test says."""

    def __init__(self, trees: Callable[[list[int]], object], loop: asyncio.AbstractEventLoop) -> None:
        """trees: makes the tree of a text, or the outcome in its place; None: no answer"""
        self.trees = trees
        self.calls: list[DraftCall] = []
        self.text = PeerText()
        self.delay_s = 0.0
        self.loop = loop

    def draft(self, drafter, call, deliver):
        self.calls.append(call)
        assert drafter == "127.0.0.1:1" and call.update.opening == DRAFTERS_OPENING and call.shape == SHAPE
        self.text.follow(call.update)  # raises where the text or its digest differs
        outcome = self.trees(self.text.ids)
        if outcome is None:
            return
        if not self.delay_s:
            deliver(outcome)
            return
        self.loop.call_soon_threadsafe(lambda: self.loop.call_later(self.delay_s, deliver, outcome))


class Ordering(RoundByRound):
    """A request that orders the next round's tree in some of its calls, and claims it in the next."""

    ordered = False

    def order(self, wait_us=10_000_000):
        return Order("127.0.0.1:1", DRAFTERS_OPENING, SHAPE, 0, wait_us)

    async def ordering(self, tree=None, order=None, claim=True):
        """A round. claim: has the ordered tree, if one was ordered in the last round"""
        claims, self.ordered = self.ordered and claim, order is not None
        tree = DraftTree.root_only(self.text.ids[-1]) if tree is None or claims else tree
        call = VerifyCall(self.update(), tree, order=order, ordered=claims)
        self.known = len(self.text)
        verdict = await self.engine.verify(call)
        assert (verdict.tree is not None) is claims
        tree = verdict.verified(replace(tree, ordered=claims))
        assert tree.tokens[0] == self.text.ids[-1]
        for above, row, token in zip(verdict.path, verdict.path[1:], verdict.tokens, strict=False):
            assert tree.parents[row] == above and tree.tokens[row] == token
        self.text.extend(verdict.tokens)
        return verdict


@pytest.fixture(scope="module", params=TINY_TARGETS)
def folder(request, tmp_path_factory):
    return make_target(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
async def linked(folder):
    """An engine, and its links, which a test gives trees."""
    engine = engine_of(folder)
    links = Links(lambda ids: None, asyncio.get_running_loop())
    engine.link(links)
    await engine.start()
    yield engine, links
    await engine.stop()


def vocabulary_of(engine):
    return engine.scheduler.capacity.vocabulary


def from_truth(rng, truth, vocabulary):
    """Trees of random shape with the true tokens among their guesses."""
    trees = guessing(rng, truth, vocabulary)

    def tree(ids):
        router = type("AtText", (), {})()
        router.text, router.answer = type("Ids", (), {"ids": ids})(), ids[len(PROMPT) :]
        return trees(router)

    return tree


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "warm", "warped"])
@pytest.mark.parametrize("delay_s", [0.0, 0.003], ids=["at once", "later"])
async def test_an_answer_of_ordered_trees_has_the_tokens_that_it_has_without(linked, law, delay_s):
    engine, links = linked
    (truth,) = await alone(engine, [PROMPT], [law], 24)
    links.trees, links.delay_s = from_truth(np.random.default_rng(1), truth, vocabulary_of(engine)), delay_s
    router = Ordering(engine, PROMPT, law)
    await router.open()
    rounds = 0
    while len(router.text) < router.end:
        verdict = await router.ordering(order=router.order())
        assert not verdict.missed
        rounds += 1
    await router.close()
    assert router.answer == truth and rounds < 24, "some guesses were accepted"
    stats = engine.stats()
    assert stats["ordered"] == rounds - 1 and not stats["ordered_missed"] and not stats["unclaimed"]
    assert len(links.calls) == rounds - 1, "none is asked for past the answer's end"


OUTCOMES = {
    "stale": NotFound("opening: gone"),
    "malformed": BadRequest("shape", "unknown"),
    "lost": PeerLost("drafter: gone"),
    "failed": EngineFailed("drafter: a fault"),
    "unlinked": Missed.UNLINKED,
}
BAD_TREES: dict[str, Callable[[list[int]], object]] = {
    "another root": lambda ids: DraftTree.of([ids[-1] ^ 1, 3], [-1, 0]),
    "unknown token": lambda ids: DraftTree.of([ids[-1], 1 << 20], [-1, 0]),
    "too many rows": lambda ids: DraftTree.of([ids[-1], *range(40)], [-1, *[0] * 40]),
    "too deep": lambda ids: DraftTree.of([ids[-1], *range(7)], range(-1, 7)),
}


@pytest.mark.parametrize("missed", [*OUTCOMES, *BAD_TREES])
async def test_a_round_whose_ordered_tree_does_not_come_has_its_root_alone_and_says_why(linked, missed):
    engine, links = linked
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 8)
    links.trees = BAD_TREES.get(missed, lambda ids: OUTCOMES[missed])
    router = Ordering(engine, PROMPT, LAWS[1], 8)
    await router.open()
    await router.ordering(order=router.order())
    verdict = await router.ordering(order=router.order())
    assert verdict.missed == (missed if missed in OUTCOMES else Missed.MALFORMED) and len(verdict.tokens) == 1
    assert verdict.verified(DraftTree.root_only(0, ordered=True)).missed
    while len(router.text) < router.end:
        await router.ordering(order=router.order())
    await router.close()
    assert router.answer == truth


async def test_a_late_tree_is_dropped_and_its_round_has_the_root_alone(linked):
    engine, links = linked
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 6)
    kept = []
    links.trees = lambda ids: kept.append(ids[:])
    router = Ordering(engine, PROMPT, LAWS[1], 6)
    await router.open()
    await router.ordering(order=router.order(wait_us=20_000))
    verdict = await router.ordering()
    assert verdict.missed == Missed.LATE and verdict.drafted_us >= 20_000
    assert engine.scheduler.late_in_s() is None
    while len(router.text) < router.end:
        await router.ordering()
    assert router.answer == truth


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "warm", "warped"])
async def test_claims_dropped_orders_and_lost_verdicts_in_any_order_change_no_token(linked, law):
    engine, links = linked
    (truth,) = await alone(engine, [PROMPT], [law], 60)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        size = vocabulary_of(engine)
        good, router_trees = from_truth(rng, truth, size), guessing(rng, truth, size)

        def trees(ids, rng=rng, good=good):
            outcome = rng.random()
            if outcome < 0.7:
                return good(ids)
            return None if outcome < 0.8 else list(OUTCOMES.values())[int(rng.integers(len(OUTCOMES)))]

        links.trees, links.text = trees, PeerText()
        router = Ordering(engine, PROMPT, law, 60)
        await router.open()
        while len(router.text) < router.end:
            links.delay_s = float(rng.choice([0.0, 0.001, 0.004]))
            before = len(router.text)
            order = router.order(wait_us=5_000) if rng.random() < 0.8 else None
            own = router_trees(router) if rng.random() < 0.5 else None
            await router.ordering(own, order, claim=rng.random() < 0.7)
            if rng.random() < 0.2:
                await asyncio.sleep(0.003)
            if rng.random() < 0.15 and len(router.text) < router.end:
                router.back_to(int(rng.integers(before, len(router.text))))
        await router.close()
        assert router.answer == truth
        assert engine.scheduler.late_in_s() is None and not engine.scheduler.sessions


async def test_a_claim_of_an_order_that_the_verifier_does_not_have_is_a_round_of_the_root_alone(linked):
    engine, _ = linked
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 4)
    router = Ordering(engine, PROMPT, LAWS[1], 4)
    await router.open()
    router.ordered = True
    verdict = await router.ordering()
    assert verdict.missed == Missed.UNKNOWN
    while len(router.text) < router.end:
        await router.ordering()
    assert router.answer == truth


async def test_a_text_that_ends_while_its_tree_is_awaited_leaves_nothing(linked):
    engine, links = linked
    kept = []

    def later(drafter, call, deliver):
        kept.append(deliver)

    links.draft = later
    router = Ordering(engine, PROMPT, LAWS[1], 8)
    await router.open()
    await router.ordering(order=router.order())
    claim = asyncio.ensure_future(router.ordering())
    await asyncio.sleep(0.01)
    await router.close()
    with pytest.raises(NotFound):
        await claim
    kept[0](DraftTree.root_only(0))
    await asyncio.sleep(0.01)
    assert engine.scheduler.late_in_s() is None and not engine.scheduler.sessions
    assert engine.stats()["ordered_dropped"] == 1


def called(engine, router, **options):
    """A verify call that is made at once, beside others."""
    return asyncio.ensure_future(
        engine.verify(VerifyCall(router.update(), DraftTree.root_only(router.text.ids[-1]), **options))
    )


@pytest.mark.parametrize("ordered", [True, False], ids=["another claim", "another tree"])
async def test_each_of_two_calls_for_one_round_is_answered(linked, ordered):
    """A correct router makes one."""
    engine, _ = linked
    router = Ordering(engine, PROMPT, LAWS[0], 200)
    await router.open()
    await router.ordering(order=router.order(wait_us=100_000))
    calls = [called(engine, router, ordered=True), called(engine, router, ordered=ordered)]
    done, pending = await asyncio.wait(calls, timeout=10)
    assert len(done) == 2 and not pending
    await router.close()


async def test_two_orders_for_one_round_leave_none_behind(linked):
    engine, _ = linked
    router = Ordering(engine, PROMPT, LAWS[0], 200)
    await router.open()
    await asyncio.gather(*(called(engine, router, order=router.order(wait_us=50_000)) for _ in range(2)))
    await router.close()
    assert engine.scheduler.late_in_s() is None
    assert engine.stats()["ordered_dropped"] == engine.stats()["ordered"] == 2


async def test_links_that_raise_cost_one_round_its_tree_and_end_no_text(linked):
    engine, links = linked
    links.trees = Ordering  # raises: it takes more than the text's ids
    other, router = (Ordering(engine, PROMPT, LAWS[0], 8) for _ in range(2))
    for each in (other, router):
        await each.open()
    await router.ordering(order=router.order())
    assert (await router.ordering()).missed == Missed.UNLINKED
    await other.ordering()
    for each in (other, router):
        await each.close()


async def test_a_tree_that_waits_for_another_texts_step_waits_in_the_queue(linked):
    engine, links = linked
    kept = []
    links.draft = lambda drafter, call, deliver: kept.append(deliver)
    router = Ordering(engine, PROMPT, LAWS[0], 100)
    await router.open()
    await router.ordering(order=router.order())
    await until(lambda: bool(kept))
    freed = threading.Event()
    engine._thread.post(lambda ticket: freed.wait())  # stands for a step
    kept[0](DraftTree.of([router.text.ids[-1], 3], [-1, 0]))
    asyncio.get_running_loop().call_later(0.2, freed.set)
    verdict = await router.ordering()
    assert verdict.queue_us > 150_000
    await router.close()


async def test_a_verifier_without_links_says_so_and_runs_ordered_rounds_without_a_tree(folder):
    engine = engine_of(folder)
    assert not (await engine.hello()).orders
    await engine.start()
    router = Ordering(engine, PROMPT, LAWS[1], 4)
    await router.open()
    await router.ordering(order=router.order())
    assert (await router.ordering()).missed == Missed.UNLINKED
    await engine.stop()


async def test_an_order_of_a_text_whose_guesses_are_drawn_is_refused(linked):
    engine, _ = linked
    router = Ordering(engine, PROMPT, Sampling(temperature=1.0, seed=1, mode=VerificationMode.NAIVE), 4)
    assert not router.parameters.sampling.draws_guesses
    drawn = Ordering(engine, PROMPT, Sampling(temperature=1.0, seed=1, mode=VerificationMode.MULTI_STEP), 4)
    assert drawn.parameters.sampling.draws_guesses
    await drawn.open()
    with pytest.raises(BadRequest, match=r"verify\.order"):
        await drawn.ordering(order=drawn.order())
    await drawn.close()


def test_an_order_beside_an_announced_root_alone_is_refused():
    router = Ordering(None, PROMPT)
    with pytest.raises(BadRequest, match=r"verify\.order"):
        VerifyCall(router.update(), DraftTree.root_only(9), ahead=True, order=router.order())


def test_errors_of_a_drafter_have_a_reason_each():
    assert missed_by(BadAnswer("tree: malformed")) is Missed.MALFORMED
    assert missed_by(ValueError("any")) is Missed.FAILED
