"""Several drafters of one target: each has its own lease, opening and deadline, and misses its own trees alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise

import pytest
from dendro.answer import Complete, complete_from
from dendro.calls import IDLE_ROUNDS, DraftCall, DrafterPeer, Hello, OpenCall, Opened
from dendro.errors import PeerLost
from dendro.text import Text, Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb

from cluster.arms import OFF_ARM, Arm
from cluster.peers.drafter import DrafterHandles
from cluster.peers.opening import Pool
from cluster.peers.pools import Peers
from cluster.policies.experience import Concurrency, RunningRequest
from cluster.proposers import PROPOSERS
from cluster.router.ingress import Ingress
from cluster.router.rounds import rounds
from cluster.sessions import MemorySessions
from cluster.showing import account_lines, drafter_line
from tests.support.edge import SERVED, config
from tests.support.fakes import (
    VOCABULARY,
    EmptyPool,
    FakeDrafter,
    FakePool,
    FakeVerifier,
    RemotePool,
    new_text,
    plain,
    toy_token,
)
from tests.support.sockets import end, process
from tests.support.virtual_time import virtual_time

ONE, OTHER = Arm.parse("mamba:(1,1,1)"), Arm.parse("small:(1,1,1)")
CONFIG = config(
    drafters={"mamba": {"checkpoint": "mamba"}, "small": {"checkpoint": "small"}},
    targets={"demo": {"checkpoint": "target"}},
)


class Script:
    """A policy that plays arms in order, over and over. Keeps the tokens of each round, and whether its tree came."""

    next_arm: Arm | None = None

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = cycle(arms)
        self.played: list[tuple[Arm, int, bool]] = []

    def choose(self, offer: object = None) -> Arm:
        return next(self._arms)

    def learn(self, arm: Arm, tree: DraftTree, verdict: Verdict) -> None:
        self.played.append((arm, verdict.length, not tree.missed))

    def came(self, arm: Arm) -> list[bool]:
        return [came for each, _, came in self.played if each == arm]


@dataclass
class TwoDrafters:
    """Two drafters and a verifier in this process."""

    one: FakeDrafter = field(default_factory=FakeDrafter)
    other: FakeDrafter = field(default_factory=FakeDrafter)
    verifier: FakeVerifier = field(default_factory=FakeVerifier)
    patient: bool = False  # whether rounds wait for their trees on a busy machine, too
    ended_s: list[float] = field(default_factory=list)  # of each round

    def __post_init__(self) -> None:
        self.pools = {"mamba": FakePool(self.one), "small": FakePool(self.other)}
        self.peers: Peers | None = None

    async def run(
        self, arms: Sequence[Arm], count: int = 150, each: Callable[[int], None] = lambda number: None
    ) -> tuple[Text, DrafterHandles, Script]:
        """An answer of `count` tokens with the arms in turn; `each` is called after every round with its number."""
        clock = asyncio.get_running_loop().time
        self.peers = self.peers or Peers(CONFIG, {"demo": FakePool(self.verifier)}, self.pools, clock=clock)
        text, policy = new_text(count=count), Script(arms)
        verifier = self.peers.verifier("demo", text)
        gate = RunningRequest(Concurrency(), fixed=True)
        drafters = self.peers.drafters("demo", text, gate, adaptive=not self.patient)
        assert isinstance(drafters, DrafterHandles)
        try:
            await verifier.first_hello()
            async for _ in rounds(text, drafters, verifier, policy):
                self.ended_s.append(clock())
                each(len(policy.played))
        finally:
            await asyncio.gather(drafters.close(text), verifier.close(text))
        assert text.answer == plain(text.ids[: text.prompt_length], count, text.sampling)
        return text, drafters, policy


@virtual_time
async def test_each_drafter_has_a_lease_and_an_opening_of_its_own_closed_with_the_whole_text():
    pair = TwoDrafters()
    text, drafters, policy = await pair.run([ONE, OTHER, OFF_ARM])
    assert [pool.leases for pool in pair.pools.values()] == [1, 1]
    assert pair.one.closed_with == pair.other.closed_with == [len(text)]
    assert [handle.saved for handle in drafters.handles.values()] == [len(text) - 1] * 2
    assert policy.came(ONE)[3:].count(False) == policy.came(OTHER)[3:].count(False) == 0
    assert drafters.openings == {name: handle.opened for name, handle in drafters.handles.items()}
    assert drafters.openings.keys() == {"mamba", "small"}


@virtual_time
async def test_a_drafter_whose_arms_are_not_chosen_is_not_leased():
    pair = TwoDrafters()
    await pair.run([OTHER])
    assert [pool.leases for pool in pair.pools.values()] == [0, 1] and pair.one.opens == 0


@virtual_time
async def test_a_second_drafter_is_opened_without_a_round_waiting_for_it():
    """It takes a second to open the text; a round takes 2 ms, and 1 ms more with a tree of the first drafter."""
    pair = TwoDrafters(FakeDrafter(pause_s=0.001), FakeDrafter(pause_s=0.001), FakeVerifier(pause_s=0.002))
    pair.other.open_pause_s = 1.0
    _, drafters, policy = await pair.run([ONE, OTHER], count=60)
    took_ms = {round(1e3 * (later - sooner), 3) for sooner, later in pairwise(pair.ended_s)}
    assert took_ms <= {2.0, 3.0}
    assert not any(policy.came(OTHER)) and all(policy.came(ONE)[1:])
    assert drafters.handles["small"].fallbacks == {"opening": len(policy.came(OTHER))}
    assert pair.one.held == {}, "the opening that is not done is closed when the answer is"


@virtual_time
async def test_a_drafter_not_chosen_for_32_rounds_gives_its_lease_back_and_the_other_keeps_its_own():
    pair, held = TwoDrafters(), list[int]()
    arms = [ONE, OTHER, *[ONE] * (IDLE_ROUNDS + 3)]
    _, drafters, policy = await pair.run(arms * 2, count=220, each=lambda number: held.append(pair.other.sessions))
    released = held.index(0, 2) + 1
    assert released == 2 + IDLE_ROUNDS, "it was requested in the second round"
    assert pair.pools["mamba"].leases == 1 and pair.pools["small"].leases >= 2
    assert policy.came(OTHER)[1:2] == [False], "the round that requests it again does not wait"


@virtual_time
async def test_a_slow_drafter_is_late_by_its_own_deadline_alone():
    """A draft takes 10 ms at one and 50 ms at the other, which is late by three times the first one's usual time."""
    pair = TwoDrafters(FakeDrafter(pause_s=0.01), FakeDrafter(pause_s=0.05), FakeVerifier(pause_s=0.05))
    _, _, policy = await pair.run([ONE, OTHER], count=200)
    assert all(policy.came(ONE)[2:]) and all(policy.came(OTHER)[2:])
    assert pair.peers is not None
    pace = pair.peers._paces["demo"]
    assert pace.draft_level_s["mamba"] == pytest.approx(0.01 / 3, rel=1e-3)
    assert pace.draft_level_s["small"] == pytest.approx(0.05 / 3, rel=1e-3)
    assert pace.deadline_s("mamba", 3, 1.0) == pytest.approx(0.03, rel=1e-3)
    assert pace.deadline_s("small", 3, 1.0) == pytest.approx(0.1, rel=1e-2), "two usual rounds of the verifier"


@virtual_time
@pytest.mark.parametrize("fault", ["lost", "late", "malformed"])
async def test_a_bad_drafter_misses_its_own_trees_alone(fault: str):
    pair = TwoDrafters(FakeDrafter(pause_s=0.001), FakeDrafter(pause_s=0.001), FakeVerifier(pause_s=0.002))

    def fail(number: int) -> None:
        if number != 8:
            return
        if fault == "late":
            pair.other.pause_s = 30.0
        elif fault == "malformed":
            pair.other.spoil = DraftTree.of([99, 1], [-1, 0])
        else:
            pair.other.forget()
            pair.other.draft = lost

    async def lost(call: object) -> DraftTree:
        raise PeerLost("it is gone")

    _, drafters, policy = await pair.run([ONE, OTHER], count=150, each=fail)
    before, after = policy.played[:8], policy.played[8:]
    assert all(came for arm, _, came in before[2:])
    assert all(came for arm, _, came in after if arm == ONE)
    assert not any(came for arm, _, came in after if arm == OTHER) and len(after) > 20
    assert drafters.handles["mamba"].fallbacks.keys() <= {"opening"}


@virtual_time
async def test_a_tree_that_the_verifier_refuses_counts_against_the_drafter_that_made_it():
    pair = TwoDrafters()
    pair.other.spoil = DraftTree.of([7, 101], [-1, 0])  # outside the vocabulary; the text ends with 7
    _, drafters, _ = await pair.run([ONE, OTHER], count=100)
    assert drafters.handles["small"]._given_up == "struck" and not drafters.handles["mamba"]._given_up


class MarkedDrafter(FakeDrafter):
    """Restores `restored` tokens, so that its opening is known from others."""

    def __init__(self, restored: int) -> None:
        super().__init__()
        self.restored = restored

    async def open(self, call: OpenCall) -> Opened:
        return replace(await super().open(call), restored=self.restored)


class WrongDrafter(FakeDrafter):
    """Guesses the token that the target does not draw."""

    async def draft(self, call: DraftCall) -> DraftTree:
        held = await self._follow(call)
        wrong = (toy_token(held.text.ids, held.parameters.sampling) + 1) % VOCABULARY
        return DraftTree.of([held.text.ids[-1], wrong], [-1, 0])


async def completed(
    pools: dict[str, Pool[DrafterPeer]], arms: Sequence[Arm], monkeypatch, proposers: Sequence[str] = ()
) -> Complete:
    """The end of an answer of which the rounds but the first play these arms in turn; the first has no tree, whatever
    its policy chooses."""
    monkeypatch.setattr("cluster.router.speculation.policy_named", lambda *_: Script([arms[-1], *arms]))
    settings = config(
        drafters={"mamba": {"checkpoint": "mamba"}, "small": {"checkpoint": "small"}},
        speculation={"arms": ["off", "(1,1,1)"], "proposers": proposers},
    )
    peers = Peers(settings, {"demo": FakePool(FakeVerifier())}, pools)
    router = Ingress(settings, peers, MemorySessions(), SERVED)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), max_new_tokens=200, ignore_end=True)
    return complete_from([event async for event in router.generate(request)][-1].complete)


async def test_complete_reports_every_drafter_and_the_opening_of_the_one_with_the_most_rounds(monkeypatch):
    pools = {"mamba": FakePool(MarkedDrafter(1)), "small": FakePool(MarkedDrafter(2))}
    complete = await completed(pools, [ONE, OTHER, OTHER, OFF_ARM], monkeypatch)
    stats, (one, other) = complete.speculation, complete.drafters
    assert (one.name, other.name) == ("mamba", "small") and 0 < one.rounds < other.rounds
    for each in (one, other):
        assert each.rounds + each.late_drafts == stats.rounds_by_shape[f"{each.name}:(1,1,1)"]
        assert each.drafted_tokens == 3 * each.rounds and 0 < each.accepted_tokens < each.drafted_tokens
    assert one.late_drafts + other.late_drafts == stats.late_drafts
    assert one.drafted_tokens + other.drafted_tokens == stats.drafted_tokens
    assert one.accepted_tokens + other.accepted_tokens == stats.accepted_tokens
    assert one.opening is not None and one.opening.restored_tokens == 1
    assert other.opening is not None and other.opening.restored_tokens == 2
    assert complete.drafter == other.opening
    assert [line.split(":")[0] for line in account_lines(complete)[-2:]] == ["drafter mamba", "drafter small"]


async def test_accepted_proposals_of_the_router_are_not_a_drafters(monkeypatch):
    pools = {"mamba": FakePool(WrongDrafter()), "small": FakePool(WrongDrafter())}
    complete = await completed(pools, [ONE, OTHER], monkeypatch, PROPOSERS)
    assert complete.speculation.accepted_tokens > 0
    for each in complete.drafters:
        assert each.drafted_tokens == each.rounds > 0 and each.accepted_tokens == 0


async def test_complete_reports_a_drafter_without_a_replica_as_not_opened(monkeypatch):
    pools = {"mamba": EmptyPool(), "small": FakePool(MarkedDrafter(2))}
    complete = await completed(pools, [ONE, OTHER], monkeypatch)
    lost, other = complete.drafters
    assert lost.opening is None and lost.rounds == lost.drafted_tokens == 0
    assert lost.late_drafts == complete.speculation.rounds_by_shape["mamba:(1,1,1)"]
    assert complete.drafter is not None and complete.drafter == other.opening
    assert "memory of the text: not opened" in drafter_line(lost)


async def test_complete_names_no_drafter_where_none_was_asked(monkeypatch):
    complete = await completed({"mamba": EmptyPool(), "small": EmptyPool()}, [OFF_ARM], monkeypatch)
    assert complete.drafters == () and complete.drafter is None


async def test_a_killed_drafter_of_two_changes_no_token_and_the_others_arms_go_on():
    """Both are processes; one is killed in the twentieth round."""
    children = [await process("drafter") for _ in range(2)]
    pair = TwoDrafters(patient=True)
    pools = {
        name: RemotePool("drafter", [address]) for name, (_, address) in zip(("mamba", "small"), children, strict=True)
    }
    pair.peers = Peers(CONFIG, {"demo": FakePool(pair.verifier)}, pools)
    pair.verifier.pause_s = 0.005
    try:
        _, _, policy = await pair.run(
            [ONE, OTHER], count=200, each=lambda number: children[1][0].kill() if number == 20 else None
        )
    finally:
        for pool in pools.values():
            await pool.streams.close()
        await end(*(child for child, _ in children))
    after = policy.played[22:]
    assert any(came for arm, _, came in policy.played[:20] if arm == OTHER)
    assert not any(came for arm, _, came in after if arm == OTHER)
    assert sum(came for arm, _, came in after if arm == ONE) > 10


class OtherVerifier(FakeVerifier):
    """The verifier of a target of a larger vocabulary."""

    async def hello(self) -> Hello:
        return replace(await super().hello(), vocabulary=VOCABULARY + 9)


@virtual_time
async def test_one_pool_drafts_for_texts_of_two_targets_at_once_each_with_its_vocabulary():
    drafter, clock = FakeDrafter(pause_s=0.001), asyncio.get_running_loop().time
    two = config(targets={"demo": {"checkpoint": "target"}, "other": {"checkpoint": "other"}})
    pools = {"demo": FakePool(FakeVerifier(pause_s=0.002)), "other": FakePool(OtherVerifier(pause_s=0.002))}
    peers = Peers(two, pools, {"mamba": FakePool(drafter)}, clock=clock)
    texts = {target: new_text(count=60) for target in pools}

    async def run(target: str, text: Text) -> None:
        verifier = peers.verifier(target, text)
        drafters = peers.drafters(target, text, RunningRequest(Concurrency(), fixed=True))
        await verifier.first_hello()
        async for _ in rounds(text, drafters, verifier, Script([ONE])):
            pass
        await asyncio.gather(drafters.close(text), verifier.close(text))

    await asyncio.gather(*(run(target, text) for target, text in texts.items()))
    assert drafter.vocabularies == {VOCABULARY, VOCABULARY + 9} and drafter.largest_batch == 2
    for text in texts.values():
        assert text.answer == plain(text.ids[: text.prompt_length], 60, text.sampling)
