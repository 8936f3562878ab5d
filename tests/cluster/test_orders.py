"""Trees that pass from a drafter to a verifier without the router, over real sockets: the tokens are the target's,
whatever happens to the drafter, and what does not come is asked for by the router again."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from dendro.calls import CloseCall, DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.engine import started
from dendro.errors import BadRequest, NotFound
from dendro.local_stream import FrameSocket
from dendro.order import Missed
from dendro.servicer import DRAFTER_REPLICA, VERIFIER_REPLICA, serve_engine
from dendro.shapes import TreeShape
from dendro.state import MemoryStates
from dendro.structure import Structure
from dendro.text import Limits, Sampling, Text, Verdict
from dendro.tree import DraftTree

from cluster.api.local import LocalClient
from cluster.arms import Arm
from cluster.config import DEMO_MODELS, pair_config
from cluster.demo.prompts import held_out_prompts
from cluster.engines import load_drafter, load_verifier
from cluster.peers import verifier as verifier_module
from cluster.peers.drafter import DrafterHandle
from cluster.peers.links import StreamLinks
from cluster.peers.opening import Pace
from cluster.peers.pools import LocalPeers, Peers
from cluster.peers.stream import DRAFTER, PeerStream, RemoteDrafter
from cluster.peers.verifier import CallLimit
from cluster.router.ingress import Ingress
from cluster.sessions import MemorySessions
from tests.support.certificates import Authority
from tests.support.fakes import FakeDrafter, RemotePool, in_task
from tests.support.sockets import until
from verifier_service import orders

SHAPE = "(3,2,1)"
COUNT = 40


def demo_config(**sections):
    return pair_config(DEMO_MODELS / "target", [DEMO_MODELS / "mamba2"], speculation={"proposers": []}, **sections)


class SocketPair:
    """An ingress whose peers are real engines behind sockets."""

    def __init__(self, ingress, verifier, drafter, drafters):
        self.client, self.verifier, self.drafter, self.drafters = LocalClient(ingress), verifier, drafter, drafters
        self.prompt = held_out_prompts(1, 64)[0].token_ids

    async def answer(self, speculation, temperature=1.0, count=COUNT, **options):
        options = {"seed": 7, "max_new_tokens": count, "ignore_end": True} | options
        return await self.client.generate_text(self.prompt, temperature=temperature, speculation=speculation, **options)


@pytest.fixture(scope="module")
def config():
    return demo_config(router={"draft_timeout_ms": 20_000})


@asynccontextmanager
async def served(config, ordered_trees=True, verifier_kind=VERIFIER_REPLICA):
    config = config.model_copy(update={"router": config.router.model_copy(update={"ordered_trees": ordered_trees})})
    (target,), (helper,) = config.targets, config.drafters
    verifier = load_verifier(target, config.targets[target], MemoryStates())
    drafter = load_drafter(helper, config.drafters[helper], MemoryStates(), config.targets)
    links = StreamLinks()
    verifier.link(links)
    async with AsyncExitStack() as stack:
        for engine in (verifier, drafter):
            await stack.enter_async_context(started(engine))
        replicas = {
            "verifier": await serve_engine(verifier_kind, verifier),
            "drafter": await serve_engine(DRAFTER_REPLICA, drafter),
        }
        pools = {kind: RemotePool(kind, [replica.address]) for kind, replica in replicas.items()}
        for closing in (links.close, *(pool.streams.close for pool in pools.values())):
            stack.push_async_callback(closing)
        for replica in replicas.values():
            stack.push_async_callback(replica.stop)
        peers = Peers(config, {target: pools["verifier"]}, {helper: pools["drafter"]})
        ingress = Ingress(config, peers, MemorySessions())
        stack.push_async_callback(ingress.close)
        yield SocketPair(ingress, verifier, drafter, replicas["drafter"])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_answers_of_ordered_trees_are_those_without_and_nearly_every_tree_is_ordered(config, temperature):
    async with served(config) as cluster:
        off = await cluster.answer("off", temperature)
        assert cluster.verifier.stats()["ordered"] == 0
        for _ in range(20):  # an answer may end before its drafter has opened the text
            assert (await cluster.answer("(1,1)", temperature)).token_ids == off.token_ids
            if cluster.verifier.stats()["ordered"]:
                break
        assert cluster.verifier.stats()["ordered_missed"] >= 1, "the first order finds no stream to the drafter yet"
        for way in (SHAPE, "dynamic(4,3,12)"):
            for _ in range(20):
                before = cluster.verifier.stats()
                done = await cluster.answer(way, temperature)
                assert done.token_ids == off.token_ids
                statistics, after = done.complete.speculation, cluster.verifier.stats()
                ordered, missed = (after[name] - before[name] for name in ("ordered", "ordered_missed"))
                assert missed <= statistics.late_drafts and statistics.contradictions == ()
                # Not ordered: the rounds until the drafter has opened the text, and the one after them.
                (drafter,) = done.complete.drafters
                assert ordered >= drafter.rounds - 2, f"{ordered} of {drafter.rounds}"
                if statistics.accepted_tokens > 0:
                    break
            assert statistics.accepted_tokens > 0


async def test_the_frames_of_ordered_rounds_are_written_by_the_threads_of_engines(config, monkeypatch):
    written, send = Counter[str](), FrameSocket.send

    def counted(self, frame):
        written[threading.current_thread().name] += 1
        send(self, frame)

    async with served(config) as cluster:
        await cluster.answer(SHAPE)  # connects the verifier and the drafter
        monkeypatch.setattr(FrameSocket, "send", counted)
        before = cluster.verifier.stats()["ordered"]
        done = await cluster.answer(SHAPE)
        ordered = cluster.verifier.stats()["ordered"] - before
        assert ordered > 5
        assert written["verifier"] >= ordered + done.complete.speculation.rounds - 2, "orders, and verdicts"
        assert sum(frames for thread, frames in written.items() if thread.startswith("drafter ")) >= ordered - 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_answers_with_prepared_trees_are_those_without(config, temperature):
    """A busy machine may leave a drafter no time to prepare trees, so answers are asked for until it has."""
    drafters = {name: each.model_copy(update={"draft_ahead": "on"}) for name, each in config.drafters.items()}
    async with served(config.model_copy(update={"drafters": drafters})) as cluster:
        for seed in range(30):
            off = await cluster.answer("off", temperature, seed=seed)
            for way in (SHAPE, "dynamic(4,3,12)", "auto"):
                assert (await cluster.answer(way, temperature, seed=seed)).token_ids == off.token_ids
            if cluster.drafter.stats()["prepared_used"] >= 5:
                break
        await until(lambda: cluster.drafter.sessions == 0)
        stats = cluster.drafter.stats()
        assert stats["prepared_used"] >= 5
        assert stats["prepared"] == stats["prepared_used"] + stats["prepared_dropped"]
        assert (stats["free_slots"], stats["free_nodes"]) == (stats["slots"], stats["nodes"])


@pytest.fixture
def sends_ahead(config, monkeypatch):
    """A configuration whose drafter sends every prepared tree before it is asked for it: as if each paid."""
    monkeypatch.setattr(orders, "MESSAGE_S", 1e-12)
    drafters = {name: each.model_copy(update={"draft_ahead": "on"}) for name, each in config.drafters.items()}
    return config.model_copy(update={"drafters": drafters})


def far(monkeypatch, way_s=0.01):
    """Put so many seconds between verifiers and drafters, each way."""
    draft = StreamLinks._draft

    def later(self, drafter, call, deliver):
        def after(outcome, deliver=deliver):
            self._loop.call_later(way_s, deliver, outcome)

        taken = replace(call, take_prepared=lambda sent: after(sent, call.take_prepared))
        self._loop.call_later(way_s, draft, self, drafter, taken, after)

    monkeypatch.setattr(StreamLinks, "_draft", later)
    monkeypatch.setattr(RemoteDrafter, "draft_at_once", lambda self, call, deliver: False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_answers_with_trees_sent_before_their_verdicts_are_those_without(sends_ahead, temperature, monkeypatch):
    """A busy machine may leave a drafter no time to prepare trees, so answers are asked for until it has."""
    far(monkeypatch)
    async with served(sends_ahead) as cluster:
        for seed in range(30):
            off = await cluster.answer("off", temperature, seed=seed)
            for way in (SHAPE, "(1,1,1)", "auto"):
                assert (await cluster.answer(way, temperature, seed=seed)).token_ids == off.token_ids
            if cluster.verifier.stats()["prepared_used"] >= 5:
                break
        await until(lambda: cluster.drafter.sessions == cluster.verifier.sessions == 0)
        stats, drafters = cluster.verifier.stats(), cluster.drafter.stats()
        assert 5 <= stats["prepared_used"] <= stats["prepared"] - stats["prepared_refused"]
        assert stats["prepared"] <= drafters["prepared_sent"] <= drafters["prepared"]
        assert (drafters["free_slots"], drafters["free_nodes"]) == (drafters["slots"], drafters["nodes"])


@pytest.mark.parametrize("draft_us, held, timed", [(300, [4, 7], True), (0, [0, 4], False)], ids=["asked", "before"])
def test_a_tree_that_came_before_it_was_asked_for_shows_what_its_drafter_held_a_round_before_and_no_time(
    draft_us, held, timed
):
    """The drafter's call may still be on its way: the next order has the tokens since the call before."""
    pace, found = Pace(), []
    handle = DrafterHandle("mamba", None, pace, None, None)
    handle._opening = SimpleNamespace(holds=found.append)
    for length in (4, 7):
        text = Text([0] * (length + 1), Sampling(), Limits(64))
        tree = replace(DraftTree.of([0, 1], [-1, 0]), draft_us=draft_us)
        handle.ordered(text, Arm.parse("mamba:(1,1)"), Verdict((1,), (0,), (), None, 1, tree=tree, drafted_us=500))
    assert found == held and bool(pace.draft_level_s) is timed


def false_trees(sent):
    """What a lying drafter may send in place of a prepared tree."""
    tree = sent.tree
    yield replace(sent, digest=sent.digest ^ 1)
    yield replace(sent, base=sent.base + 1)
    yield replace(sent, opening=bytes(16))
    yield replace(sent, tree=DraftTree.of([int(tree.tokens[0]) ^ 1, 3], [-1, 0]))
    yield replace(sent, tree=DraftTree.of([int(tree.tokens[0]), *range(40)], [-1, *[0] * 40]))
    yield replace(sent, tree=DraftTree.of([int(tree.tokens[0]), 1 << 20], [-1, 0]))
    yield from [sent] * 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_false_late_repeated_and_too_many_trees_before_their_verdicts_change_no_token(
    sends_ahead, temperature, monkeypatch
):
    async with served(sends_ahead) as cluster:
        draft, loop, turns = cluster.drafter.draft, asyncio.get_running_loop(), count()
        held = []

        async def lying(call):
            def take(sent):
                held.append((call, sent))
                false = list(false_trees(sent))
                first = next(turns) % len(false)
                for each in false[first:] + false[:first]:
                    call.take_prepared(each)
                loop.call_soon_threadsafe(loop.call_later, 0.02, call.take_prepared, sent)
                if len(held) > 10:  # of an order that is long gone
                    old, tree = held[-10]
                    old.take_prepared(tree)

            return await draft(replace(call, take_prepared=take) if call.take_prepared is not None else call)

        monkeypatch.setattr(cluster.drafter, "draft_for", in_task(lying))
        for seed in range(30):
            off = await cluster.answer("off", temperature, seed=seed)
            for way in (SHAPE, "(1,1,1)"):
                assert (await cluster.answer(way, temperature, seed=seed)).token_ids == off.token_ids
            if cluster.verifier.stats()["prepared"] >= 60:
                break
        await until(lambda: cluster.drafter.sessions == cluster.verifier.sessions == 0)
        stats = cluster.verifier.stats()
        assert 0 < stats["prepared_refused"] < stats["prepared"] and stats["prepared"] >= 60


DEMANDS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "top_p": 0.9},
    "log-probabilities": {"logprobs": 3},
    "stop strings": {"stop": ["e", "self"], "max_new_tokens": 60},
    "a structure": {"structure": Structure.regex("[a-z ]{30,60}"), "ignore_end": False, "max_new_tokens": 80},
    "bad words": {"bad_words": [[32, 40], [5]], "banned_ids": [7]},
}


@pytest.mark.parametrize("demand", DEMANDS)
async def test_what_a_verifier_keeps_of_a_text_follows_rounds_that_begin_before_their_call(config, demand):
    """A verdict may be cut after its next round has run: logits' history and a structure must go back with the text."""
    async with served(config) as cluster:
        await cluster.answer("(1,1)")  # connects verifier and drafter
        with_orders = 0
        for seed in range(20):  # an answer may end before its drafter has opened the text, as on a busy machine
            off = await cluster.answer("off", seed=seed, **DEMANDS[demand])
            done = await cluster.answer(SHAPE, seed=seed, **DEMANDS[demand])
            assert (done.token_ids, done.text, done.logprobs) == (off.token_ids, off.text, off.logprobs)
            with_orders += done.complete.speculation.ordered_trees > 0
            if with_orders == 3:
                break
        assert with_orders == 3


async def test_no_tree_is_ordered_where_the_configuration_says_so(config):
    async with served(config, ordered_trees=False) as cluster:
        assert (await cluster.answer(SHAPE)).token_ids == (await cluster.answer("off")).token_ids
        assert cluster.verifier.stats()["ordered"] == 0


async def test_answers_whose_guesses_are_drawn_order_no_tree():
    config = demo_config(router={"draft_timeout_ms": 20_000}, verification_modes=["multi-step"])
    async with served(config) as cluster:
        done = await cluster.answer(SHAPE, mode="multi-step")
        assert done.complete.speculation.accepted_tokens > 0
        assert cluster.verifier.stats()["ordered"] == 0


async def order_a_tree(cluster):
    """Ask for answers until a tree of one was ordered: on a busy machine a short one may end before the drafter has
    opened its text. Returns the answer's tokens."""
    for _ in range(20):
        done = await cluster.answer(SHAPE)
        if cluster.verifier.stats()["ordered"]:
            break
    assert cluster.verifier.stats()["ordered"] > 0
    return done.token_ids


@pytest.mark.parametrize("fault", ["stops", "hangs", "forgets", "lies"])
async def test_a_fault_of_the_drafter_amid_ordered_rounds_changes_no_token_and_ends_no_answer(
    config, fault, monkeypatch
):
    if fault == "hangs":
        config = demo_config(router={"draft_timeout_ms": 200})
    async with served(config) as cluster:
        off = await cluster.answer("off", count=120)
        await order_a_tree(cluster)
        struck, draft, before = [], cluster.drafter.draft, cluster.verifier.stats()

        async def failing(call):
            early = call.update.base < len(cluster.prompt) + 60
            if not struck and not (early and cluster.verifier.stats()["ordered"] > before["ordered"] + 5):
                return await draft(call)
            struck.append(call)
            if fault == "hangs":
                await asyncio.sleep(30)
            if fault == "forgets":
                raise NotFound("opening: gone")
            if fault == "lies":
                return DraftTree.of([call.update.tokens[-1] ^ 1, 3], [-1, 0])
            if len(struck) == 1:
                asyncio.get_running_loop().create_task(cluster.drafters._server.stop(None))
            return await draft(call)

        monkeypatch.setattr(cluster.drafter, "draft_for", in_task(failing))
        for _ in range(20):  # an answer may end before so many of its trees were ordered
            before = cluster.verifier.stats()
            done = await cluster.answer(SHAPE, count=120)
            assert done.token_ids == off.token_ids
            if struck:
                break
        missed = cluster.verifier.stats()["ordered_missed"] - before["ordered_missed"]
        assert struck and missed > 0 and done.complete.speculation.late_drafts > 0
        if fault == "lies":
            assert missed <= 5, "a drafter of malformed trees is given up"
    assert cluster.verifier.sessions == 0


def changing(change):
    """A kind of verifier that calls `change` with each verdict, as a message, that has accepted ordered guesses."""

    def answer(number, outcome):
        message = VERIFIER_REPLICA.answer(number, outcome)
        if message.WhichOneof("answer") == "verdict" and message.verdict.HasField("tree") and message.verdict.ranks:
            change(message.verdict)
        return message

    return replace(VERIFIER_REPLICA, answer=answer)


def enlarge(tree):
    """Add guesses below the last row, past the shape that was ordered."""
    rows = len(tree.tokens)
    tree.tokens.extend(range(20))
    tree.parents.extend([rows - 1] * 20)
    tree.values.extend([-9.0] * 20)


LIES: dict[str, Callable[[Any], object]] = {
    "another root": lambda verdict: verdict.tree.tokens.__setitem__(0, verdict.tree.tokens[0] ^ 1),
    "another guess": lambda verdict: verdict.tree.tokens.__setitem__(verdict.path[1], verdict.tokens[0] ^ 1),
    "no tree": lambda verdict: verdict.ClearField("tree"),
    "a missed tree": lambda verdict: setattr(verdict, "missed", "late"),
    "a larger tree": lambda verdict: enlarge(verdict.tree),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_ordered_tree_that_a_verdict_cannot_have_moves_the_text_and_changes_no_token(config, lie):
    lied = []

    def once(verdict):
        if not lied:
            lied.append(lie)
            LIES[lie](verdict)

    async with served(config, verifier_kind=changing(once)) as cluster:
        off, moves = await cluster.answer("off"), 0
        for _ in range(20):  # an answer may end before an ordered tree was accepted
            done = await cluster.answer(SHAPE)
            assert done.token_ids == off.token_ids
            moves += done.complete.speculation.verifier_moves
            if lied:
                break
        assert moves == 1


async def test_times_of_an_ordered_tree_that_its_verifier_reports_are_at_most_those_since_the_order(config):
    def exaggerate(verdict):
        verdict.drafted_us = verdict.tree.draft_us = 2**64 - 1

    async with served(config, verifier_kind=changing(exaggerate)) as cluster:
        for _ in range(20):  # an answer may end before its drafter has opened the text
            account = (await cluster.answer(SHAPE)).complete.speculation
            assert account.draft_us <= account.rounds_us < 100e6
            if account.ordered_trees:
                break
        assert account.ordered_trees > 0


async def test_an_order_beside_a_tree_that_the_verifier_refuses_is_not_claimed(config, monkeypatch):
    async with served(config) as cluster:
        off, verify = await cluster.answer("off", count=200), cluster.verifier.verify
        refused, missed = [], []

        async def refusing(call):
            if call.order is not None and call.tree.guesses and not refused:
                refused.append(call)
                raise BadRequest("tree.tokens", "as a test says")
            verdict = await verify(call)
            missed.append(verdict.missed)
            return verdict

        monkeypatch.setattr(cluster.verifier, "verify_for", in_task(refusing))
        for _ in range(20):  # an answer may end before its drafter has opened the text
            assert (await cluster.answer(SHAPE, count=200)).token_ids == off.token_ids
            if refused:
                break
        assert refused and Missed.UNKNOWN not in missed


@pytest.mark.parametrize("timeout_ms", [90_000, 1e12])
async def test_a_draft_may_be_waited_for_longer_than_an_order_can_say(timeout_ms):
    async with served(demo_config(router={"draft_timeout_ms": timeout_ms})) as cluster:
        assert await order_a_tree(cluster) == (await cluster.answer("off")).token_ids


async def test_a_drafter_that_is_slower_than_a_step_may_be_does_not_make_the_verifier_seem_hung(config, monkeypatch):
    async with served(config) as cluster:
        off, draft = await cluster.answer("off", count=12), cluster.drafter.draft
        await order_a_tree(cluster)
        ordered = cluster.verifier.stats()["ordered"]

        async def slowly(call):
            await asyncio.sleep(1.2)
            return await draft(call)

        monkeypatch.setattr(cluster.drafter, "draft_for", in_task(slowly))
        monkeypatch.setattr(verifier_module, "CallLimit", lambda limit_s: CallLimit(1.0))
        for _ in range(20):  # an answer may end before its drafter has opened the text
            done = await cluster.answer(SHAPE, count=12)
            assert done.token_ids == off.token_ids
            assert done.complete.speculation.verifier_moves == 0
            if cluster.verifier.stats()["ordered"] > ordered:
                break
        assert cluster.verifier.stats()["ordered"] > ordered


async def test_a_verifier_that_cannot_reach_the_drafter_costs_few_rounds_their_trees(monkeypatch):
    monkeypatch.setattr(StreamLinks, "draft", lambda self, drafter, call, deliver: None)  # packets are dropped
    async with served(demo_config(router={"draft_timeout_ms": 200})) as cluster:
        off = await cluster.answer("off", count=120)
        for _ in range(20):  # an answer may end before its drafter has opened the text
            assert (await cluster.answer(SHAPE, count=120)).token_ids == off.token_ids
            if cluster.verifier.stats()["ordered_missed"]:
                break
        assert 0 < cluster.verifier.stats()["ordered_missed"] <= 5, (
            "4, 8, 16, ... trees pass through the router between"
        )


async def test_a_call_that_would_wait_for_a_connection_is_not_made_and_no_failed_one_is_kept():
    links, outcomes = StreamLinks(), []
    call = DraftCall(TextUpdate.of(bytes(16), Text([1, 2, 3], Sampling(), Limits(9)), 0), TreeShape.parse("(1,1)"))
    for port in range(1, 51):
        links.draft(f"127.0.0.1:{port}", call, outcomes.append)
    await until(lambda: len(outcomes) == 50 and not links._streams._streams)
    assert outcomes == 50 * [Missed.UNLINKED]
    await links.close()


async def test_a_client_that_leaves_amid_ordered_rounds_leaves_no_text_open(config):
    async with served(config) as cluster:
        for turn in range(3):
            parts = cluster.client.generate(
                cluster.prompt, speculation=SHAPE, temperature=1.0, max_new_tokens=400, ignore_end=True
            )
            async for _ in parts:
                if cluster.verifier.stats()["ordered"] > 3 * (1 + turn):
                    break
            await parts.aclose()
        await until(lambda: cluster.verifier.sessions == cluster.drafter.sessions == 0)


async def test_texts_that_run_together_with_ordered_trees_have_the_tokens_that_they_have_alone(config):
    """On a busy machine short answers may end before a tree is ordered, so they are asked for until one was."""
    async with served(config) as cluster:
        alone = [(await cluster.answer("off", seed=seed)).token_ids for seed in range(6)]
        for _ in range(20):
            together = await asyncio.gather(*(cluster.answer(SHAPE, seed=seed) for seed in range(6)))
            assert [done.token_ids for done in together] == alone
            if cluster.verifier.stats()["ordered"]:
                break
        assert cluster.verifier.stats()["ordered"] > 0


async def test_engines_of_one_process_pass_trees_without_an_event_loop(config):
    peers = await asyncio.to_thread(LocalPeers.load, config, MemoryStates())
    try:
        await peers.start()
        client, prompt = LocalClient(Ingress(config, peers, MemorySessions())), held_out_prompts(1, 64)[0].token_ids
        for seed in range(30):  # an answer may end before its drafter has opened the text
            options = {"temperature": 1.0, "seed": seed, "max_new_tokens": COUNT, "ignore_end": True}
            off = await client.generate_text(prompt, speculation="off", **options)
            assert (await client.generate_text(prompt, speculation=SHAPE, **options)).token_ids == off.token_ids
            if peers.engines[0].stats()["ordered"] > 5:
                break
        stats = peers.engines[0].stats()
        assert stats["ordered"] > 5 and stats["ordered_missed"] == 0
    finally:
        await peers.close()


async def test_engines_of_one_process_send_trees_before_their_verdicts(sends_ahead):
    peers = await asyncio.to_thread(LocalPeers.load, sends_ahead, MemoryStates())
    try:
        await peers.start()
        client = LocalClient(Ingress(sends_ahead, peers, MemorySessions()))
        prompt = held_out_prompts(1, 64)[0].token_ids
        for seed in range(30):
            options = {"temperature": 1.0, "seed": seed, "max_new_tokens": COUNT, "ignore_end": True}
            off = await client.generate_text(prompt, speculation="off", **options)
            assert (await client.generate_text(prompt, speculation="(1,1,1)", **options)).token_ids == off.token_ids
            if peers.engines[0].stats()["prepared_used"] >= 5:
                break
        assert peers.engines[0].stats()["prepared_used"] >= 5
    finally:
        await peers.close()


# A drafter's side of a verifier's calls


def opened(text):
    opening = new_opening()
    parameters = RequestParameters(text.sampling, text.limits, "", ())
    return opening, OpenCall(TextUpdate.of(opening, text, 0), parameters)


async def test_a_stream_may_ask_for_trees_of_texts_that_another_has_opened_and_for_nothing_else():
    drafter, text = FakeDrafter(), Text([5, 6, 7], Sampling(), Limits(64))
    replica = await serve_engine(DRAFTER_REPLICA, drafter)
    streams = [await PeerStream.connect(replica.address, DRAFTER) for _ in range(2)]
    router, verifier = map(RemoteDrafter, streams)
    opening, call = opened(text)
    with pytest.raises(NotFound):
        await verifier.draft(DraftCall(TextUpdate.of(opening, text, 0), TreeShape.parse("(1,1)")))
    await router.open(call)
    tree = await verifier.draft(DraftCall(TextUpdate.of(opening, text, 3), TreeShape.parse("(1,1)")))
    assert tree.rows == 3
    with pytest.raises(NotFound):
        await verifier.close(CloseCall(TextUpdate.of(opening, text, 3)))
    await router.close(CloseCall(TextUpdate.of(opening, text, 3)))
    with pytest.raises(NotFound):
        await verifier.draft(DraftCall(TextUpdate.of(opening, text, 3), TreeShape.parse("(1,1)")))
    for stream in streams:
        await stream.close()
    await replica.stop()


async def test_a_verifiers_certificate_lets_it_ask_for_trees_alone(tmp_path):
    authority = Authority(tmp_path)

    def files(role):
        from dendro.certificates import CertificateFiles

        pair = authority.issue(role, f"{role}.dendro")
        return CertificateFiles(f"tls.peers.{role}", pair["certificate"], pair["key"], authority.path)

    text = Text([5, 6, 7], Sampling(), Limits(64))
    replica = await serve_engine(DRAFTER_REPLICA, FakeDrafter(), certificates=files("drafter"))
    streams = [await PeerStream.connect(replica.address, DRAFTER, files(role)) for role in ("router", "verifier")]
    router, verifier = map(RemoteDrafter, streams)
    opening, call = opened(text)
    with pytest.raises(BadRequest, match="router"):
        await verifier.open(call)
    await router.open(call)
    assert (await verifier.draft(DraftCall(TextUpdate.of(opening, text, 3), TreeShape.parse("(1,1)")))).rows == 3
    for stream in streams:
        await stream.close()
    await replica.stop()
