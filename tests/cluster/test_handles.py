"""Lost, late, lying or failing peers change no token. Over real sockets, with fake engines."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
from dendro import wire
from dendro.calls import (
    IDLE_ROUNDS,
    PROTOCOL_VERSION,
    TARGET_FACTS,
    DraftCall,
    Hello,
    OpenCall,
    TextUpdate,
    VerifyCall,
    new_opening,
)
from dendro.errors import BadRequest, EngineFailed, NotFound, PeerLost
from dendro.internal.v1 import calls_pb2, verifier_pb2
from dendro.modes import VerificationMode
from dendro.shapes import TreeShape
from dendro.text import Finish, Sampling, Text, Verdict
from dendro.tree import DraftTree
from tree_layers.checkpoint import Facts
from tree_layers.tokens import TokenTable

from cluster.arms import OFF_ARM, Arm
from cluster.peers import stream
from cluster.peers.drafter import DrafterHandle
from cluster.peers.opening import Opening, Pace
from cluster.peers.stream import PeerStream
from cluster.peers.verifier import VerifierHandle
from cluster.policies import Static
from cluster.router.rounds import rounds
from tests.support.fakes import END, VOCABULARY, FakeDrafter, FakePool, FakeVerifier, RemotePool, new_text, plain
from tests.support.sockets import drafter_at, end, process, until, verifier_at
from tests.support.virtual_time import virtual_time

CHAIN = Arm.parse("helper:(1,1,1)")


@dataclass
class Ran:
    """The result of a run of the loop."""

    text: Text
    drafter: DrafterHandle
    verifier: VerifierHandle
    lengths: list[int]

    @property
    def asked(self) -> int:
        """Rounds that found the drafter open: the first may begin before that."""
        return len(self.lengths) - self.drafter.fallbacks["opening"]


class OneHandle:
    """What the loop calls in place of a RequestSpeculation: one handle, and any policy. A round without a tree
    announces the next where `stays_off` says so."""

    def __init__(self, drafter, policy, stays_off):
        self.drafter, self.choose, self.policy, self.stays_off = drafter, policy.choose, policy, stays_off

    async def draft(self, text, arm):
        if arm.off:
            self.drafter.skip(text)
        tree = DraftTree.root_only(text.root) if arm.off else await self.drafter.draft(text, arm)
        announces = not tree.guesses and self.stays_off is not None and self.stays_off()
        return DraftTree.root_only(text.root, ahead=True) if announces else tree

    def learn(self, arm, tree, verdict):
        if verdict.refused:
            self.drafter.strike()
        self.policy.learn(arm, tree, verdict)


async def run(
    text,
    drafters,
    verifiers,
    policy=None,
    pace=None,
    each=None,
    gate=None,
    drafting=None,
    stays_off=None,
    prepared=False,
    **options,
) -> Ran:
    """Run the loop over new handles; `each` is called after every round with its number. `drafting` are options of the
    drafter's handle, `options` of the verifier's. `prepared`: the drafter is prepared first."""
    pace, clock = pace or Pace(), asyncio.get_running_loop().time
    verifier = VerifierHandle(text, verifiers, pace, clock=clock, **options)
    drafter = DrafterHandle(CHAIN.maker, drafters, pace, verifier, gate or Gate(), clock=clock, **(drafting or {}))
    lengths: list[int] = []
    try:
        await verifier.first_hello()
        if prepared:
            drafter.prepare(text)
        speculation = OneHandle(drafter, policy or Static(CHAIN), stays_off)
        async for verdict in rounds(text, speculation, verifier, speculation):
            lengths.append(len(verdict.tokens))
            if each is not None:
                await each(len(lengths))
    finally:
        await asyncio.gather(drafter.close(text), verifier.close(text))
    return Ran(text, drafter, verifier, lengths)


@asynccontextmanager
async def pair(drafter: FakeDrafter, verifier: FakeVerifier):
    """Pools of both engines behind sockets."""
    async with AsyncExitStack() as stack:
        _, drafters = await stack.enter_async_context(drafter_at(drafter))
        _, verifiers = await stack.enter_async_context(verifier_at(verifier))
        yield drafters, verifiers


def is_plain(ran: Ran) -> bool:
    text = ran.text
    return text.answer == plain(text.ids[: text.prompt_length], len(text.answer), text.sampling)


@dataclass
class Gate:
    """The gate of a request's drafter; a test sets `guesses`."""

    speculates: bool = True
    rests: bool = False
    openings: int = 0
    open: bool = False

    async def opened(self) -> None:
        """Wait until a drafter was asked to open the text and has done so, or was found to be of no use."""
        await until(lambda: self.openings and not self.open, 60.0)

    @contextmanager
    def opening(self) -> Iterator[None]:
        self.openings, self.open = self.openings + 1, True
        yield
        self.open = False


PATIENT = {"adaptive": False, "longest_s": 60.0}
"""Options of a drafter's handle whose rounds wait for their drafts on a busy machine."""


def opened_first(verifier: FakeVerifier) -> Gate:
    """A gate whose drafter is open when the first round begins: the verifier opens after it."""
    gate = Gate()
    verifier.before_opened = gate.opened
    return gate


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=2**63 + 5)], ids=["greedy", "warm"])
@pytest.mark.parametrize("shape", ["off", "(1,1,1)", "(3,2,1)"])
async def test_local_and_remote_peers_give_the_plain_answer(sampling, shape):
    for near in (True, False):
        drafter, verifier = FakeDrafter(), FakeVerifier()
        gate = Gate() if shape == "off" else opened_first(verifier)
        text = new_text(sampling=sampling)
        options = {"policy": Static(Arm.of("helper", TreeShape.parse(shape))), "gate": gate, "drafting": PATIENT}
        if near:
            ran = await run(text, FakePool(drafter), FakePool(verifier), **options)
        else:
            async with pair(drafter, verifier) as pools:
                ran = await run(text, *pools, **options)
        assert is_plain(ran) and len(text.answer) == 40
        assert drafter.held == {} and verifier.held == {}
        assert ran.verifier.saved == len(text) - 1 == verifier.closed_with[0] - 1
        assert shape == "off" or (ran.drafter.saved == len(text) - 1 and max(ran.lengths) > 1)
        assert ran.drafter.fallbacks.total() == 0


async def test_a_frame_contains_the_calls_of_several_requests():
    verifier = FakeVerifier(pause_s=0.01)
    async with pair(FakeDrafter(), verifier) as (drafters, verifiers):
        texts = [new_text((token, 2, 3)) for token in range(16)]
        ran = await asyncio.gather(*(run(text, drafters, verifiers) for text in texts))
        stream = await verifiers.streams.to(verifiers.addresses[0])
        assert all(map(is_plain, ran))
        assert len({id(await verifiers.streams.to(verifiers.addresses[0]))}) == 1
        assert stream.calls > 2 * stream.frames


async def test_a_rounds_call_is_queued_before_anything_else_runs():
    async with pair(FakeDrafter(), FakeVerifier()) as pools:
        for pool in pools:
            remote = (await pool.lease()).peer
            opening, text, before = new_opening(), new_text(), remote.stream.calls
            update = TextUpdate.of(opening, text, 0)
            answer = (
                remote.draft(DraftCall(update, CHAIN.shape))
                if pool is pools[0]
                else remote.verify(VerifyCall(update, DraftTree.root_only(text.root)))
            )
            assert remote.stream.calls == before + 1
            with pytest.raises(NotFound):
                await answer


async def test_a_call_on_a_lost_stream_raises_peer_lost_where_it_is_awaited():
    async with pair(FakeDrafter(), FakeVerifier()) as (drafters, _):
        remote = (await drafters.lease()).peer
        await remote.stream.close()
        answer = remote.draft(DraftCall(TextUpdate.of(new_opening(), new_text(), 0), CHAIN.shape))
        with pytest.raises(PeerLost):
            await answer


async def test_no_drafter_is_opened_while_the_gate_is_closed_when_the_verifier_is_leased():
    gate = Gate()

    async def open_gate_after_5(round_number: int) -> None:
        gate.speculates = round_number >= 5
        if round_number == 6:
            await gate.opened()

    drafter = FakeDrafter()
    async with pair(drafter, FakeVerifier()) as (drafters, verifiers):
        verifier_leased = verifiers.lease

        async def lease():  # the gate closes while this request waits for its verifier
            gate.speculates = False
            return await verifier_leased()

        verifiers.lease = lease
        ran = await run(new_text(), drafters, verifiers, each=open_gate_after_5, gate=gate, drafting=PATIENT)
    assert is_plain(ran)
    assert ran.drafter.fallbacks["unwanted"] == 5 and ran.lengths[:5] == [1] * 5
    assert ran.drafter.leases == 1 and max(ran.lengths) > 1, "opened when the gate opens again"
    assert gate.openings == 1 and not gate.open


class FirstOff:
    """A policy whose first round has no tree."""

    def __init__(self) -> None:
        self.rounds = 0

    def choose(self):
        self.rounds += 1
        return CHAIN if self.rounds > 1 else OFF_ARM

    def learn(self, arm, tree, verdict):
        return


@virtual_time
@pytest.mark.parametrize("speculates", [True, False])
async def test_a_prepared_drafter_has_a_tree_for_the_second_round_where_the_gate_lets_it(speculates):
    drafter, verifier, gate = FakeDrafter(), FakeVerifier(), Gate()
    gate.speculates, calls = speculates, list[OpenCall]()
    drafter.open_pause_s, verifier.open_pause_s = 0.5, 1.0
    open_text = verifier.open

    async def watched(call):
        calls.append(call)
        return await open_text(call)

    verifier.open = watched
    pools = FakePool(drafter), FakePool(verifier)
    ran = await run(new_text(), *pools, gate=gate, policy=FirstOff(), prepared=True, plain_first=True)
    assert is_plain(ran)
    assert [call.ahead for call in calls] == [True], "the verifier may run the first round with the prompt"
    reasons = {"unwanted": len(ran.lengths) - 1} if not speculates else {}
    assert ran.drafter.fallbacks == reasons and ran.drafter.leases == speculates


async def test_a_drafter_is_released_by_the_first_round_without_a_draft_once_the_request_rests():
    policy = Static(CHAIN)
    for gate_rests in (False, True):
        drafter, verifier, held = FakeDrafter(), FakeVerifier(), list[int]()
        gate, policy.arm = opened_first(verifier), CHAIN

        async def rest_after_5(number: int, rests=gate_rests, gate=gate, drafter=drafter, held=held) -> None:
            if number == 5:
                policy.arm, gate.rests = OFF_ARM, rests
            if number == 10 and rests:
                await until(lambda: not drafter.held)  # the call that closes the text is sent in the background
            held.append(len(drafter.held))

        async with pair(drafter, verifier) as pools:
            ran = await run(new_text(count=60), *pools, each=rest_after_5, gate=gate, policy=policy, drafting=PATIENT)
        assert is_plain(ran)
        assert held[3] == 1 and held[9] == (not gate_rests), "otherwise it is kept for IDLE_ROUNDS rounds"


@virtual_time
async def test_a_late_draft_costs_at_most_its_deadline_and_changes_no_token():
    """A draft takes 1 ms and its verification 2 ms; the fourth draft takes 34.9 ms. Its deadline is the least, 20 ms,
    and the next 7 rounds find the drafter busy with it."""
    drafter, verifier, ended_s = FakeDrafter(pause_s=0.001), FakeVerifier(pause_s=0.002), list[float]()

    async def slow_after_the_third(number: int) -> None:
        drafter.pause_s = 0.0349 if number == 3 else 0.001
        ended_s.append(asyncio.get_running_loop().time())

    verifier.before_opened = partial(asyncio.sleep, 0)  # so the first round finds the drafter open
    ran = await run(new_text(count=200), FakePool(drafter), FakePool(verifier), each=slow_after_the_third)
    assert is_plain(ran)
    assert ran.drafter.fallbacks == {"late": 1, "busy": 7}
    took_ms = [round(1e3 * (later - sooner), 6) for sooner, later in pairwise(ended_s)]
    assert took_ms == [3.0, 3.0, 22.0, *[2.0] * 7, *[3.0] * (len(took_ms) - 10)]
    assert ran.lengths[3:11] == [1] * 8 and max(ran.lengths[11:]) > 1
    assert drafter.opens == 1, "the drafter still has the text"


@virtual_time
async def test_a_policys_round_waits_for_a_slow_tree_of_drawn_guesses():
    """As above, with a fourth draft that takes 4 s: the tree may be late because of what was drawn, and to leave it out
    would then change the law."""
    drafter, verifier = FakeDrafter(pause_s=0.001), FakeVerifier(pause_s=0.002)

    async def slow_after_the_third(number: int) -> None:
        drafter.pause_s = 4.0 if number == 3 else 0.001

    verifier.before_opened = partial(asyncio.sleep, 0)
    sampling = Sampling(1.0, mode=VerificationMode.MULTI_STEP)
    text = new_text(count=60, sampling=sampling)
    ran = await run(text, FakePool(drafter), FakePool(verifier), each=slow_after_the_third)
    assert ran.drafter.fallbacks.total() == 0 and drafter.calls == len(ran.lengths)


@pytest.mark.parametrize(("mode", "first"), [(VerificationMode.COUPLED, "opening"), (VerificationMode.MULTI_STEP, "")])
@virtual_time
async def test_a_first_round_waits_for_a_drafter_that_opens_late_where_guesses_are_drawn(mode, first):
    """The tokens of an answer depend there on which rounds have a tree, and a seed should give the same ones again."""
    drafter, verifier = FakeDrafter(pause_s=0.001), FakeVerifier(pause_s=0.002)
    drafter.before_opened = partial(asyncio.sleep, 4.0)
    verifier.before_opened = partial(asyncio.sleep, 0)
    text = new_text(count=60, sampling=Sampling(1.0, mode=mode))
    ran = await run(text, FakePool(drafter), FakePool(verifier))
    assert set(ran.drafter.fallbacks) == ({first} if first else set())


async def test_a_drafter_that_forgot_the_text_is_opened_again_under_the_same_lease():
    drafter, verifier = FakeDrafter(), FakeVerifier()
    gate = opened_first(verifier)

    async def forget(number: int) -> None:
        if number == 4:
            drafter.forget()
        if number == 5:
            await until(lambda: drafter.opens == 2)

    async with pair(drafter, verifier) as pools:
        ran = await run(new_text(count=100), *pools, each=forget, gate=gate, drafting=PATIENT)
    assert is_plain(ran) and ran.drafter.fallbacks["stale"] == 1 and drafter.opens == 2
    assert ran.drafter.leases == 1
    assert drafter.held == {}


@pytest.mark.parametrize(
    "spoilt",
    [
        DraftTree.root_only(99),
        DraftTree.of([7] + [VOCABULARY + 3], [-1, 0]),
        DraftTree.of([7, 1, 2, 3, 4, 5, 6, 8], [-1, 0, 1, 2, 3, 4, 5, 6]),
    ],
    ids=["another root", "past the vocabulary", "deeper than asked"],
)
async def test_after_three_malformed_trees_a_request_asks_for_no_more_drafts(spoilt):
    drafter, verifier = FakeDrafter(), FakeVerifier()
    drafter.spoil, gate = spoilt, opened_first(verifier)
    async with pair(drafter, verifier) as pools:
        ran = await run(new_text((5, 6, 7)), *pools, gate=gate, drafting=PATIENT)
    assert is_plain(ran) and set(ran.lengths) == {1}
    assert ran.drafter.fallbacks["malformed"] == 3 == drafter.calls
    assert ran.drafter.fallbacks["struck"] == ran.asked - 3


class FewPositions(FakeDrafter):
    """Takes texts of up to MOST tokens, like a drafter with so many positions."""

    MOST = 20
    refused = 0

    def _check(self, call: OpenCall | DraftCall) -> None:
        if call.update.base > self.MOST:
            self.refused += 1
            raise BadRequest("update.base", f"is {call.update.base} tokens; this drafter allows at most {self.MOST}")

    async def hello(self) -> Hello:
        return replace(await super().hello(), max_length=self.MOST)

    async def open(self, call: OpenCall):
        self._check(call)
        return await super().open(call)

    async def draft(self, call: DraftCall):
        self._check(call)
        return await super().draft(call)


@pytest.mark.parametrize("prompt", [10, 30])
async def test_a_text_that_is_or_becomes_too_long_for_its_drafter_is_refused_by_it_once(prompt):
    drafter = FewPositions()
    async with pair(drafter, FakeVerifier()) as pools:
        ran = await run(new_text(range(prompt), count=400), *pools, drafting=PATIENT)
        assert is_plain(ran)
        await until(lambda: not drafter.held)
    assert drafter.refused == 1
    assert ran.drafter.fallbacks["limits"] > 100
    assert not {"malformed", "struck"} & ran.drafter.fallbacks.keys()


@pytest.mark.parametrize("role", ["drafter", "verifier"])
async def test_a_text_goes_on_where_the_socket_of_a_stream_ends_and_grpc_does_not(role):
    drafter, verifier = FakeDrafter(), FakeVerifier()
    gate = opened_first(verifier)
    async with pair(drafter, verifier) as (drafters, verifiers):
        pool = {"drafter": drafters, "verifier": verifiers}[role]

        async def cut(number: int) -> None:
            if number == 10:
                stream = pool.streams.connected(pool.addresses[0])
                assert stream is not None and stream.local
                stream._local.close()
            if number > 10 and role == "drafter" and drafter.opens == 1:
                await asyncio.sleep(0.02)  # the answer does not end before the drafter is opened again

        ran = await run(new_text(count=100), drafters, verifiers, each=cut, gate=gate, drafting=PATIENT)
    assert is_plain(ran) and len(ran.text.answer) == 100 and max(ran.lengths[20:]) > 1
    assert ran.verifier.reopened + ran.verifier.moves == (role == "verifier")


async def test_a_message_that_is_not_a_tree_counts_as_a_malformed_tree(monkeypatch):
    spoil = wire.answer_from

    def garbled(message):
        if message.WhichOneof("answer") == "tree":
            message.tree.parents[0] = 3
        return spoil(message)

    monkeypatch.setattr(wire, "answer_from", garbled)
    verifier = FakeVerifier()
    gate = opened_first(verifier)
    async with pair(FakeDrafter(), verifier) as pools:
        ran = await run(new_text(), *pools, gate=gate, drafting=PATIENT)
    assert is_plain(ran) and ran.drafter.fallbacks["malformed"] == 3


class RefusingVerifier(FakeVerifier):
    """Refuses every tree with guesses."""

    async def verify(self, call: VerifyCall):
        if call.tree.guesses:
            raise BadRequest("tree.tokens", "refused by the test")
        return await super().verify(call)


async def test_a_tree_that_the_verifier_refuses_counts_as_malformed_and_changes_no_token():
    verifier = RefusingVerifier()
    gate = opened_first(verifier)
    async with pair(FakeDrafter(), verifier) as pools:  # a late draft would leave the verifier no tree to refuse
        ran = await run(new_text(), *pools, gate=gate, drafting=PATIENT)
    assert is_plain(ran) and ran.drafter.fallbacks["struck"] == ran.asked - 3
    assert ran.verifier.reopened == 0 and ran.verifier.moves == 0


class RecordingVerifier(FakeVerifier):
    """Keeps whether each call had guesses, and whether it announced a round without."""

    def __init__(self):
        super().__init__()
        self.seen = []

    async def verify(self, call: VerifyCall):
        self.seen.append((bool(call.tree.guesses), call.ahead))
        return await super().verify(call)


@pytest.mark.parametrize("stays", [True, False])
async def test_only_a_round_without_a_tree_announces_that_the_next_has_none(stays):
    recording, gate = RecordingVerifier(), Gate()

    async def wait_for_drafter(number: int) -> None:
        if number == 3:
            await gate.opened()

    async with pair(FakeDrafter(), recording) as pools:
        options = {"policy": LateChain(2), "stays_off": lambda: stays, "drafting": PATIENT}
        ran = await run(new_text(), *pools, each=wait_for_drafter, gate=gate, **options)
    assert is_plain(ran) and {guessed for guessed, _ in recording.seen} == {True, False}
    assert all(ahead == (stays and not guessed) for guessed, ahead in recording.seen)


@pytest.mark.parametrize(("announced", "bounded"), [(False, True), (True, False)])
async def test_a_step_cannot_have_begun_before_the_call_that_announced_its_round(announced, bounded):
    """What a verifier says of the time before a call is believed only as far as the router announced the round."""

    class Boasting(FakeVerifier):
        async def verify(self, call: VerifyCall):
            await asyncio.sleep(0.002)
            return replace(await super().verify(call), ahead_us=1000)

    seen: list[int] = []
    async with pair(FakeDrafter(), Boasting()) as pools:
        text, learned = new_text(), Static(OFF_ARM)
        learned.learn = lambda arm, tree, verdict: seen.append(verdict.ahead_us)
        ran = await run(text, *pools, policy=learned, stays_off=lambda: announced)
    assert is_plain(ran) and seen[0] == 0 and set(seen[1:]) == {0 if bounded else 1000}


FACTS = Facts(
    folder=Path("toy"),
    layout="transformers",
    config={"model_type": "toy"},
    rows=VOCABULARY,
    positions=None,
    named_end_ids=frozenset({END}),
    tokens=TokenTable({token: str(token) for token in range(VOCABULARY)}, frozenset()),
    unpadded=None,
    digest="toy-facts",
)


async def test_a_drafter_with_another_tokenizer_than_its_target_is_used_if_its_facts_are_the_routers():
    """Whether the pair fits was checked by their facts before the cluster started."""
    drafter, verifier = FakeDrafter(tokenizer="another", facts_digest="toy-facts"), FakeVerifier()
    gate = opened_first(verifier)
    async with pair(drafter, verifier) as pools:
        ran = await run(new_text(), *pools, gate=gate, drafting={"facts": FACTS})
    assert is_plain(ran) and drafter.calls > 0 and not ran.drafter.fallbacks["mismatch"]
    assert drafter.vocabularies == {VOCABULARY}  # the target's, sent with the opening


async def test_a_drafter_loaded_from_another_checkpoint_gets_no_call(caplog):
    drafter, verifier = FakeDrafter(tokenizer="another", facts_digest="other-facts"), FakeVerifier()
    gate = opened_first(verifier)
    async with pair(drafter, verifier) as pools:
        ran = await run(new_text(), *pools, gate=gate, drafting={"facts": FACTS})
    assert is_plain(ran) and drafter.calls == drafter.opens == 0
    assert ran.drafter.fallbacks["mismatch"] == ran.asked > 30
    assert "loaded from another checkpoint: its tokenizer is another" in caplog.text


async def test_a_verifier_loaded_from_another_checkpoint_gets_no_text():
    verifier = FakeVerifier(facts_digest="other-facts")
    async with pair(FakeDrafter(), verifier) as pools:
        with pytest.raises(PeerLost) as lost:
            await run(new_text(), *pools, facts=FACTS, patience_s=0.2)
    assert verifier.opens == 0
    assert "loaded from another checkpoint: its tokenizer is toy-tokens" in str(lost.value.__cause__)


async def test_a_verifier_that_names_more_tokens_than_the_routers_checkpoint_has_gets_no_text():
    """It could emit tokens that the router cannot write."""

    class NamesMoreTokens(FakeVerifier):
        async def hello(self) -> Hello:
            return replace(await super().hello(), vocabulary=VOCABULARY + 1)

    verifier = NamesMoreTokens(tokenizer=FACTS.tokenizer)
    async with pair(FakeDrafter(), verifier) as pools:
        with pytest.raises(PeerLost) as lost:
            await run(new_text(), *pools, facts=FACTS, patience_s=0.2)
    assert verifier.opens == 0
    assert "loaded from another checkpoint: its vocabulary is 102, here 101" in str(lost.value.__cause__)


class Pauses(Static):
    """Chooses `off` until the lease is released, then a chain again."""

    def __init__(self) -> None:
        self.round = 0

    def choose(self, offer: object = None) -> Arm:
        self.round += 1
        return OFF_ARM if 2 < self.round < 40 else CHAIN


@virtual_time
async def test_an_idle_drafter_is_released_and_leased_again_when_a_tree_is_chosen():
    drafter = FakeDrafter()
    held: list[int] = []

    async def look(number: int) -> None:
        await asyncio.sleep(0.002)
        held.append(len(drafter.held))

    ran = await run(new_text(count=150), FakePool(drafter), FakePool(FakeVerifier()), policy=Pauses(), each=look)
    assert is_plain(ran) and ran.drafter.leases == 2
    released = 2 + IDLE_ROUNDS
    assert held == [1] * (released - 1) + [0] * (39 - released + 1) + [1] * (len(held) - 39)
    assert max(ran.lengths[-10:]) > 1


@virtual_time
async def test_a_drafter_that_is_leased_again_is_told_of_the_state_that_it_saved_when_it_was_released():
    """It then processes the tokens since, and not the whole text."""

    class KeepsMarks(FakeDrafter):
        marks: tuple[tuple[int, ...], ...] = ()

        async def open(self, call: OpenCall):
            self.marks = (*self.marks, call.parameters.marks)
            return await super().open(call)

    drafter = KeepsMarks()

    async def look(number: int) -> None:
        await asyncio.sleep(0.002)

    ran = await run(new_text(count=150), FakePool(drafter), FakePool(FakeVerifier()), policy=Pauses(), each=look)
    assert is_plain(ran) and ran.drafter.leases == 2
    assert drafter.marks == ((), (drafter.closed_with[0],))


class LateChain(Static):
    """Chooses a chain after `after` rounds of `off`."""

    def __init__(self, after: int) -> None:
        self.left = after

    def choose(self, offer: object = None) -> Arm:
        self.left -= 1
        return CHAIN if self.left < 0 else OFF_ARM


async def test_a_request_without_a_drafted_shape_leases_opens_and_closes_no_drafter():
    drafter = FakeDrafter()
    async with pair(drafter, FakeVerifier()) as pools:
        ran = await run(new_text(), *pools, policy=Static(OFF_ARM))
    assert is_plain(ran) and ran.drafter.leases == 0 and ran.drafter.opened is None
    assert (drafter.opens, drafter.closes, drafter.calls) == (0, 0, 0)


@virtual_time
async def test_a_drafter_first_needed_in_a_later_round_is_opened_without_a_round_waiting_for_it():
    drafter = FakeDrafter()
    drafter.open_pause_s = 0.05
    opens: list[int] = []

    async def look(number: int) -> None:
        await asyncio.sleep(0.005)
        opens.append(drafter.opens)

    ran = await run(new_text(count=100), FakePool(drafter), FakePool(FakeVerifier()), policy=LateChain(10), each=look)
    assert is_plain(ran) and ran.drafter.leases == 1
    assert opens == [0] * 19 + [1] * (len(opens) - 19), "opened at 10 rounds of 5 ms after the first chain"
    assert ran.drafter.fallbacks == {"opening": 10} and max(ran.lengths[-10:]) > 1
    assert ran.drafter.saved == len(ran.text) - 1


async def test_without_a_drafter_replica_every_round_is_plain_decoding():
    async with verifier_at(FakeVerifier()) as (_, verifiers):
        ran = await run(new_text(), RemotePool("drafter", []), verifiers)
    assert is_plain(ran) and set(ran.lengths) == {1} and ran.drafter.fallbacks["opening"] == 40


async def test_a_killed_drafter_costs_only_speculation_until_another_is_leased():
    first, address = await process("drafter")
    second, other = await process("drafter")
    drafters = RemotePool("drafter", [address])

    async def kill(number: int) -> None:
        if number == 5:
            os.kill(first.pid, signal.SIGKILL)
            drafters.addresses = [other]

    try:
        verifier = FakeVerifier(pause_s=0.005)
        gate = opened_first(verifier)
        async with verifier_at(verifier) as (_, verifiers):
            ran = await run(new_text(count=400), drafters, verifiers, each=kill, gate=gate, drafting=PATIENT)
    finally:
        await drafters.streams.close()
        await end(first, second)
    assert is_plain(ran) and ran.drafter.leases >= 2
    assert ran.drafter.fallbacks["lost"] + ran.drafter.fallbacks["opening"] >= 1
    assert max(ran.lengths[:5]) > 1 and max(ran.lengths[-10:]) > 1


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_killed_or_frozen_verifier_is_replaced_without_changing_a_token(sign):
    first, address = await process("verifier")
    second, other = await process("verifier")
    verifiers = RemotePool("verifier", [other, address])  # the first lease is of the second address

    async def signal_verifier(number: int) -> None:
        if number == 3:
            os.kill(first.pid, sign)

    sampling = Sampling(temperature=0.7, seed=11)
    try:
        async with drafter_at(FakeDrafter()) as (_, drafters):
            ran = await run(new_text(sampling=sampling), drafters, verifiers, each=signal_verifier, step_s=1.0)
    finally:
        await verifiers.streams.close()
        await end(first, second)
    assert is_plain(ran) and len(ran.text.answer) == 40 and ran.verifier.moves == 1


@virtual_time
async def test_a_verifier_without_a_verdict_in_time_is_said_not_to_answer():
    verifier = FakeVerifier()

    async def stop(number: int) -> None:
        verifier.pause_s = 1000.0

    with pytest.raises(PeerLost, match="^verifier: does not answer$"):
        await run(new_text(), FakePool(FakeDrafter()), FakePool(verifier), each=stop, step_s=1.0, patience_s=0.5)


async def test_a_text_that_its_verifier_forgot_is_opened_again_at_the_same_replica():
    verifier = FakeVerifier()

    async def forget(number: int) -> None:
        if number in (2, 5):
            verifier.forget()

    async with pair(FakeDrafter(), verifier) as pools:
        ran = await run(new_text(), *pools, each=forget)
    assert is_plain(ran) and ran.verifier.reopened == 2 and ran.verifier.moves == 0
    assert verifier.opens == 3 and verifier.held == {}


OTHER_FACTS = {
    "fingerprint": "other-weights",
    "dtype": "bfloat16",
    "exactness": "margin",
    "tokenizer": "other-tokens",
    "vocabulary": VOCABULARY + 1,
    "end_ids": (END, END - 1),
}


class OtherFactsVerifier(FakeVerifier):
    """Overrides facts in its hello."""

    def __init__(self, **facts: object) -> None:
        super().__init__()
        self.facts = facts

    async def hello(self):
        return replace(await super().hello(), **self.facts)


def test_every_fact_of_a_target_is_tested():
    assert set(OTHER_FACTS) == set(TARGET_FACTS)


@pytest.mark.parametrize("fact", TARGET_FACTS)
async def test_a_text_is_not_opened_at_a_verifier_with_a_different_target_fact(fact):
    first, other = FakeVerifier(), OtherFactsVerifier(**{fact: OTHER_FACTS[fact]})
    async with AsyncExitStack() as stack:
        _, drafters = await stack.enter_async_context(drafter_at(FakeDrafter()))
        replica, pool = await stack.enter_async_context(verifier_at(first))
        alike, _ = await stack.enter_async_context(verifier_at(other))

        async def lose(number: int) -> None:
            if number == 2:
                pool.addresses = [alike.address]
                first.forget()
                await (await pool.streams.to(replica.address)).close()

        with pytest.raises(PeerLost, match="none opens the text in time") as lost:
            await run(new_text(), drafters, pool, each=lose, patience_s=0.5)
    assert fact in str(lost.value.__cause__)
    assert other.opens == 0


async def test_a_text_refused_by_a_verifier_of_tighter_limits_is_opened_at_another():
    """The refusal is not the request's fault: another verifier of the same target accepted it."""

    class Tight(FakeVerifier):
        async def open(self, call: OpenCall):
            self.opens += 1
            raise BadRequest("limits.max_length", "43 tokens; a text here has at most 20")

    first, tight, roomy = FakeVerifier(), Tight(), FakeVerifier()
    async with AsyncExitStack() as stack:
        _, drafters = await stack.enter_async_context(drafter_at(FakeDrafter()))
        replica, pool = await stack.enter_async_context(verifier_at(first))
        others = [(await stack.enter_async_context(verifier_at(each)))[0] for each in (tight, roomy)]

        async def lose(number: int) -> None:
            if number == 2:
                await (await pool.streams.to(replica.address)).close()
                in_turn = others if pool.leases % 2 else others[::-1]  # the next lease is of `tight`
                pool.addresses = [each.address for each in in_turn]

        ran = await run(new_text(), drafters, pool, each=lose)
    assert is_plain(ran) and (tight.opens, roomy.opens) == (1, 1)


class FailingVerifier(FakeVerifier):
    """Fails in every round."""

    async def verify(self, call: VerifyCall):
        raise RuntimeError("internal detail")


async def test_a_second_failed_round_ends_the_request_and_frees_both_peers():
    drafter, verifier = FakeDrafter(), FailingVerifier()
    async with pair(drafter, verifier) as pools:
        with pytest.raises(EngineFailed) as failed:
            await run(new_text(), *pools)
        await until(lambda: not drafter.held and not verifier.held)
    assert "internal detail" not in str(failed.value)


@virtual_time
async def test_a_text_may_take_as_long_to_open_as_its_request_may_take():
    """A prompt of 16,000 tokens takes a large target on a processor many minutes; so may the wait for a place."""
    verifier = FakeVerifier()
    verifier.open_pause_s = 500.0
    assert is_plain(await run(new_text(), FakePool(FakeDrafter()), FakePool(verifier)))
    assert verifier.opens == 1


class FailingToOpen(FakeVerifier):
    """Fails in every opening."""

    async def open(self, call: OpenCall):
        self.opens += 1
        raise EngineFailed("verifier: internal detail")


@pytest.mark.parametrize("near", [True, False], ids=["near", "far"])
async def test_a_second_failed_opening_ends_the_request(near):
    verifier = FailingToOpen()
    async with asyncio.timeout(20):  # of a patience of 60 s
        with pytest.raises(EngineFailed):
            if near:
                await run(new_text(), FakePool(FakeDrafter()), FakePool(verifier))
            else:
                async with pair(FakeDrafter(), verifier) as pools:
                    await run(new_text(), *pools)
    assert verifier.opens == 2


async def test_two_faults_in_a_row_end_the_request_and_faults_with_a_verdict_between_do_not():
    class SometimesFailing(FakeVerifier):
        """Fails in the calls with these numbers; openings and rounds count together."""

        def __init__(self, *faults: int) -> None:
            super().__init__()
            self.faults, self.number = faults, 0

        def fail_now(self) -> None:
            self.number += 1
            if self.number in self.faults:
                raise EngineFailed("verifier: internal detail")

        async def open(self, call: OpenCall):
            self.fail_now()
            return await super().open(call)

        async def verify(self, call: VerifyCall):
            self.fail_now()
            return await super().verify(call)

    with pytest.raises(EngineFailed):
        await run(new_text(), FakePool(FakeDrafter()), FakePool(both := SometimesFailing(4, 5)))
    assert both.number == 5
    ran = await run(new_text(), FakePool(FakeDrafter()), FakePool(SometimesFailing(1, 4, 8)), Static(OFF_ARM))
    assert is_plain(ran) and len(ran.text.answer) == 40


@pytest.mark.parametrize("lie", [{"length": 9}, {"trimmed": 4}, {"ranks": (0,) * 5}], ids=str)
async def test_a_verdict_whose_numbers_do_not_fit_the_tree_is_the_verifiers_fault(lie):
    """The round account is computed from them, and its identities must hold."""

    class LyingVerdict(FakeVerifier):
        async def verify(self, call: VerifyCall):
            return replace(await super().verify(call), **lie)

    with pytest.raises(EngineFailed, match="its verdict has"):
        await run(new_text(), FakePool(FakeDrafter()), FakePool(LyingVerdict()))


@pytest.mark.parametrize(
    ("lie", "fault"),
    [
        (lambda verdict: {"tokens": (*verdict.tokens[:-1], VOCABULARY)}, f"emits {VOCABULARY}"),
        (lambda verdict: {"finish": Finish.END_OF_TEXT}, "finish end_of_text"),
        (lambda verdict: {"finish": Finish.LENGTH}, "finish length"),
        (lambda verdict: {"finish": Finish.STOP_STRING}, "finish stop_string"),
        (lambda verdict: {"finish": None}, "finish None"),
    ],
    ids=[
        "a token past the vocabulary",
        "end of text without its token",
        "a limit that is not reached",
        "a stop string, which it cannot see",
        "no end at the limit",
    ],
)
async def test_a_verdict_with_an_impossible_token_or_finish_is_the_verifiers_fault(lie, fault):
    class Lying(FakeVerifier):
        async def verify(self, call: VerifyCall):
            verdict = await super().verify(call)
            return replace(verdict, **lie(verdict))

    with pytest.raises(EngineFailed, match=fault):
        await run(new_text(), FakePool(FakeDrafter()), FakePool(Lying()))


async def test_a_client_that_leaves_frees_both_peers():
    drafter, verifier = FakeDrafter(), FakeVerifier(pause_s=0.01)
    async with pair(drafter, verifier) as pools:
        task = asyncio.create_task(run(new_text(count=1000), *pools))
        await until(lambda: verifier.calls > 3 and drafter.held and verifier.held)
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: not drafter.held and not verifier.held)


async def test_a_text_whose_stream_breaks_while_it_is_closed_is_closed_with_its_whole_text():
    """An engine saves the state of a text while it closes it. A text that was merely open is closed, too."""
    verifier, began, go_on = FakeVerifier(), asyncio.Event(), asyncio.Event()
    close, one, other = verifier.close, new_text(), new_text((5, 6))

    async def slow(call):
        if call.update.base == len(one):
            began.set()
            await go_on.wait()
        return await close(call)

    verifier.close = slow
    async with verifier_at(verifier) as (replica, pool):
        openings = [Opening(await pool.lease(), text) for text in (one, other)]
        for opening, text in zip(openings, (one, other), strict=True):
            await opening.open(text)
        one.commit(Verdict((7,), (0,), (), None, 1))
        closing = asyncio.create_task(openings[0].close(one))
        await began.wait()
        await pool.streams.close()
        assert await closing == 0
        await until(lambda: verifier.closed_with == [len(other)])
        assert replica.stats()["open_openings"] == 1
        go_on.set()
        await until(lambda: not replica.stats()["open_openings"])
    assert verifier.closed_with == [len(other), len(one)]


async def test_a_client_that_leaves_before_the_text_is_open_frees_both_peers():
    drafter, verifier = FakeDrafter(), FakeVerifier()
    drafter.open_pause_s = verifier.open_pause_s = 30.0
    async with pair(drafter, verifier) as pools:
        task = asyncio.create_task(run(new_text(), *pools))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait({task})
        assert not drafter.held and not verifier.held


async def test_the_first_round_waits_for_the_drafter_no_longer_than_for_the_verifier():
    drafter = FakeDrafter()
    drafter.open_pause_s = 30.0
    async with pair(drafter, FakeVerifier()) as pools:
        async with asyncio.timeout(10):
            ran = await run(new_text(), *pools)
    assert is_plain(ran) and ran.drafter.fallbacks["opening"] == 40


@pytest.mark.parametrize(
    "draft_level_s, verify_s, depth, deadline_s",
    [
        (0.0, 0.0, 3, 0.5),
        (0.001, 0.0, 3, 0.02),
        (0.02, 0.0, 3, 0.18),
        (0.02, 0.1, 3, 0.18),
        (0.2, 0.01, 3, 0.06),
        (0.2, 0.1, 3, 0.2),
        (9.0, 9.0, 3, 0.5),
    ],
)
def test_a_drafts_deadline_follows_usual_draft_and_round_times(draft_level_s, verify_s, depth, deadline_s):
    pace = Pace(verify_s, {"mamba": draft_level_s, "other": 1.0})
    assert pace.deadline_s("mamba", depth, 0.5) == pytest.approx(deadline_s)


async def test_corrupt_frames_end_neither_the_replica_nor_other_streams():
    verifier = FakeVerifier()
    rng = np.random.default_rng(3)
    good = verifier_pb2.VerifyFrame(
        greeting=calls_pb2.Greeting(protocol=PROTOCOL_VERSION),
        calls=[
            verifier_pb2.VerifierCall(call=1, update=calls_pb2.TextUpdate(opening=new_opening(), base=1, tokens=[3]))
        ],
    ).SerializeToString()
    async with pair(FakeDrafter(), verifier) as (drafters, verifiers):
        bystander = asyncio.create_task(run(new_text(count=300), drafters, verifiers))
        async with grpc.aio.insecure_channel(verifiers.addresses[0]) as channel:
            method = channel.stream_stream("/dendro.internal.v1.VerifierService/Rounds")  # type: ignore[call-arg]
            for _ in range(40):
                frame = bytearray(good)
                for _ in range(int(rng.integers(1, 6))):
                    frame[int(rng.integers(len(frame)))] ^= 1 << int(rng.integers(8))
                for sent in (bytes(frame), rng.bytes(int(rng.integers(1, 80)))):
                    stream = method()  # type: ignore[call-arg]
                    try:
                        await stream.write(good)
                        await stream.write(sent)
                        await stream.done_writing()
                        async for _ in stream:
                            pass
                    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                        continue
        ran = await bystander
        assert is_plain(ran) and ran.verifier.moves == 0
        assert is_plain(await run(new_text(), drafters, verifiers))


@pytest.mark.parametrize(
    "frame",
    [verifier_pb2.VerifyFrame(), verifier_pb2.VerifyFrame(greeting=calls_pb2.Greeting(protocol=PROTOCOL_VERSION + 1))],
    ids=["no greeting", "another protocol"],
)
async def test_a_stream_without_a_greeting_or_of_another_protocol_is_refused(frame):
    async with verifier_at(FakeVerifier()) as (replica, _), grpc.aio.insecure_channel(replica.address) as channel:
        method = channel.stream_stream(  # type: ignore[call-arg]
            "/dendro.internal.v1.VerifierService/Rounds", request_serializer=verifier_pb2.VerifyFrame.SerializeToString
        )
        stream = method()  # type: ignore[call-arg]
        await stream.write(frame)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stream:
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_for_an_opening_of_another_stream_is_not_found():
    async with verifier_at(FakeVerifier()) as (replica, pool):
        text = new_text()
        opening = Opening(await pool.lease(), text)
        await opening.open(text)
        thief = await PeerStream.connect(replica.address, stream.VERIFIER)
        with pytest.raises(NotFound):
            await thief.call(VerifyCall(opening.update(text), DraftTree.root_only(text.root)))
        await thief.close()


async def test_a_replica_reports_its_health():
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with verifier_at(FakeVerifier()) as (replica, _), grpc.aio.insecure_channel(replica.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        await replica.drain()
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.NOT_SERVING
