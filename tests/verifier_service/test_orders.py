"""Trees that a verifier asks drafters for itself: the tokens are the same, whatever comes, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from dendro.calls import MOST_PREPARED, DraftCall, PeerText, PreparedTree, VerifyCall
from dendro.errors import BadAnswer, BadRequest, EngineFailed, NotFound, PeerLost
from dendro.modes import VerificationMode
from dendro.order import Missed, Order, missed_by
from dendro.shapes import TreeShape
from dendro.text import Sampling, Tokens
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
    assert engine.scheduler.orders.late_in_s() is None
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
        assert engine.scheduler.orders.late_in_s() is None and not engine.scheduler.sessions


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
    assert engine.scheduler.orders.late_in_s() is None and not engine.scheduler.sessions
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
    assert engine.scheduler.orders.late_in_s() is None
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
    claim = asyncio.ensure_future(router.ordering())
    await asyncio.sleep(0.2)
    freed.set()
    assert (await claim).queue_us > 150_000
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


# Trees that are sent before they are asked for


def next_tree(truth, answered, depth=3):
    """A chain of the true tokens after so many of the answer, whose root is the last of those."""
    ids = [*PROMPT, *truth]
    start = len(PROMPT) + answered
    tokens = ids[start - 1 : start + depth]
    return DraftTree.of(tokens, range(-1, len(tokens) - 1))


def prepared_of(ids, tree, opening=DRAFTERS_OPENING):
    return PreparedTree(opening, len(ids), Tokens(ids).digest(), tree)


async def test_a_round_whose_tree_came_before_its_verdict_begins_without_the_drafters_answer(linked):
    """The drafter answers the first call alone, and late: no round waits for it."""
    engine, links = linked
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 24)

    def draft(drafter, call, deliver):
        links.calls.append(call)
        links.text.follow(call.update)
        at = len(links.text.ids) - len(PROMPT)
        if len(links.calls) == 1:
            deliver(next_tree(truth, at))
        done = at + 4  # the three guesses, and a token
        if done < len(truth):
            call.take_prepared(prepared_of([*PROMPT, *truth[:done]], next_tree(truth, done)))

    links.draft = draft
    router = Ordering(engine, PROMPT, LAWS[1], 24)
    await router.open()
    while len(router.text) < router.end:
        verdict = await router.ordering(order=router.order())
        assert not verdict.missed
    await router.close()
    stats = engine.stats()
    assert router.answer == truth and len(links.calls) == stats["ordered"] == 6
    assert stats["prepared_used"] == 5 and not stats["ordered_missed"] and not stats["prepared_refused"]
    assert [len(call.update.tokens) + call.update.start - len(PROMPT) for call in links.calls] == [1, 5, 9, 13, 17, 21]


async def test_a_tree_that_was_sent_before_it_was_asked_for_may_come_after_the_verdict(linked):
    engine, links = linked
    (truth,) = await alone(engine, [PROMPT], [LAWS[1]], 12)
    links.trees = lambda ids: None
    router = Ordering(engine, PROMPT, LAWS[1], 12)
    await router.open()
    await router.ordering(order=router.order())
    claim = asyncio.ensure_future(router.ordering())
    await until(lambda: len(links.calls) == 1)
    assert not claim.done()
    take = links.calls[0].take_prepared
    take(prepared_of([*PROMPT, *truth[:1]], next_tree(truth, 1)))
    # It is of the text that the call has, but the order before it was of another drafter or shape: it is not kept.
    await until(lambda: engine.stats()["prepared_refused"] == 1)
    take(prepared_of([*PROMPT, *truth[:5]], next_tree(truth, 5)))
    await until(lambda: engine.stats()["prepared"] == 2)
    assert not claim.done()
    claim.cancel()
    await router.close()


async def test_a_drafter_can_fill_no_more_than_its_own_texts_room_and_what_is_refused_is_counted(linked):
    engine, links = linked
    (truth,) = await alone(engine, [PROMPT], [LAWS[0]], 12)
    router = Ordering(engine, PROMPT, LAWS[0], 12)
    await router.open()
    await router.ordering(order=router.order())
    await until(lambda: bool(links.calls))
    take, ids = links.calls[0].take_prepared, [*PROMPT, *truth[:5]]
    wide = DraftTree.of([ids[-1], *range(40)], [-1, *[0] * 40])
    refused = [
        prepared_of(ids, next_tree(truth, 5), bytes(16)),  # no order of this name
        prepared_of(ids[: len(PROMPT)], next_tree(truth, 0)),  # of a text that has more tokens already
        prepared_of(ids, wide),  # more rows than were ordered
    ]
    kept = [PreparedTree(DRAFTERS_OPENING, len(ids), digest, next_tree(truth, 5)) for digest in range(MOST_PREPARED)]
    for sent in [*refused, *kept, kept[0], PreparedTree(DRAFTERS_OPENING, len(ids), 99, next_tree(truth, 5))]:
        take(sent)
    await until(lambda: engine.stats()["prepared"] == len(refused) + MOST_PREPARED + 2)
    assert engine.stats()["prepared_refused"] == len(refused) + 2
    latest = next(iter(engine.scheduler.sessions.values())).latest
    assert len(latest.prepared) == MOST_PREPARED
    await router.close()
    take(prepared_of(ids, next_tree(truth, 5)))
    await until(lambda: engine.stats()["prepared_refused"] == len(refused) + 3)
    assert not engine.stats()["prepared_used"]


class EagerDrafter:
    """Sends trees of the true text's next lengths, or of others, before they are asked for: some of them twice, false
    or late. Answers some calls, others with an error or not at all."""

    def __init__(self, rng, truth, trees):
        self.rng, self.truth, self.trees = rng, truth, trees
        self.text, self.loop = PeerText(), asyncio.get_running_loop()

    def later(self, most_s, work, value):
        self.loop.call_soon_threadsafe(self.loop.call_later, float(self.rng.uniform(0.0, most_s)), work, value)

    def draft(self, drafter, call, deliver):
        self.text.follow(call.update)
        ids, outcome = list(self.text.ids), self.rng.random()
        for more in self.rng.permutation(6)[: int(self.rng.integers(7))]:
            text = [*ids, *self.truth[len(ids) - len(PROMPT) :][: int(more) + 1]]
            text[-1] ^= int(self.rng.random() < 0.2)
            bad = list(BAD_TREES.values())[int(self.rng.integers(len(BAD_TREES)))]
            tree = self.trees(text) if self.rng.random() < 0.8 else bad(text)
            sent = prepared_of(text, tree, DRAFTERS_OPENING if self.rng.random() < 0.9 else bytes(16))
            for _ in range(1 + (self.rng.random() < 0.2)):
                self.later(0.02, call.take_prepared, sent)
        if outcome < 0.5:
            self.later(0.004, deliver, self.trees(ids))
        elif outcome < 0.7:
            deliver(list(OUTCOMES.values())[int(self.rng.integers(len(OUTCOMES)))])


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "warm", "warped"])
async def test_whatever_drafters_send_before_they_are_asked_and_when_changes_no_token(linked, law):
    engine, links = linked
    (truth,) = await alone(engine, [PROMPT], [law], 40)
    size = vocabulary_of(engine)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        router_trees = guessing(rng, truth, size)
        links.draft = EagerDrafter(rng, truth, from_truth(rng, truth, size)).draft
        router = Ordering(engine, PROMPT, law, 40)
        await router.open()
        while len(router.text) < router.end:
            before = len(router.text)
            order = router.order(wait_us=20_000) if rng.random() < 0.9 else None
            own = router_trees(router) if rng.random() < 0.2 else None
            await router.ordering(own, order, claim=rng.random() < 0.9)
            if rng.random() < 0.2:
                await asyncio.sleep(0.003)
            if rng.random() < 0.1 and len(router.text) < router.end:
                router.back_to(int(rng.integers(before, len(router.text))))
        await router.close()
        assert router.answer == truth
        assert engine.scheduler.orders.late_in_s() is None and not engine.scheduler.sessions
    assert engine.stats()["prepared"] > 0


async def test_trees_are_sent_before_they_are_asked_for_where_their_way_takes_longer_than_their_message(linked):
    engine, links = linked
    (truth,) = await alone(engine, [PROMPT], [LAWS[0]], 24)
    for delay_s, wanted in ((0.0, False), (0.02, True)):
        links.calls, links.text, links.delay_s = [], PeerText(), delay_s
        links.trees = from_truth(np.random.default_rng(1), truth, vocabulary_of(engine))
        took_us = 0 if wanted else 10**9  # the drafter's own time is no part of the way
        trees = links.trees
        links.trees = lambda ids, trees=trees, took_us=took_us: replace(trees(ids), draft_us=took_us)
        router = Ordering(engine, PROMPT, LAWS[0], 24)
        await router.open()
        while len(router.text) < router.end:
            await router.ordering(order=router.order())
        await router.close()
        assert links.calls[0].prepared_from == 0, "no way is measured before the first tree"
        assert all((0 < call.prepared_from < 0.05) is wanted for call in links.calls[1:])
