"""Priors: their weights, their storage, and that faulty stores and malformed blobs do no harm."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import redis.asyncio
from dendro.shapes import TreeShape
from dendro.text import Verdict
from dendro.tree import RANKED, DraftTree

from cluster import redis_server
from cluster.api.local import LocalClient
from cluster.arms import OFF_ARM, Arm
from cluster.drafter_figures import DrafterFigures, RankFigures
from cluster.policies import ConservativeUCB, Experience, make_policy, with_chain_and_off
from cluster.policies.costs import ROUND_KINDS, Cost, DraftPlane, EmittedLength
from cluster.policies.prior import FORMAT, Prior, PriorKey, no_ranks, pack_prior, tenant_tag, unpack_prior
from cluster.policies.step_time import TargetSteps
from cluster.redis_server import RedisServer
from cluster.router.priors import KINDS, WAIT_S, WRITES, Priors
from cluster.state_store import PRIOR_PREFIX, CircuitBreaker, RedisPriors
from tests.support.edge import EdgePeers, ingress

OFF = OFF_ARM
PAIR, CHAIN, BUSHY = Arm.parse("mamba:(1,1)"), Arm.parse("mamba:(1,1,1,1)"), Arm.parse("mamba:(3,2,2,1,1)")
KEY = PriorKey.of("target", ("mamba",), 0.0, "first-tenant")


@pytest.fixture(scope="module")
def server():
    with RedisServer(memory_mb=16) as server:
        yield server


@pytest.fixture
async def store(server: RedisServer):
    store = RedisPriors(server.url, ttl_s=30, budget_s=2.0)
    yield store
    await store.close()


def verdict(emitted: int, rows: int = 1) -> Verdict:
    path, ranks = tuple(range(emitted)), (0,) * (emitted - 1)
    return Verdict((1,) * emitted, path, ranks, None, emitted, 10_000 + 100 * rows, step_rows=rows)


def tree(arm: Arm, trace: tuple[int, ...] = ()) -> DraftTree:
    plain = DraftTree.of(range(arm.rows), range(-1, arm.rows - 1))
    draft_us = 100 + 300 * arm.depth + 40 * arm.shape.forwarded
    return replace(plain, trace=np.array(trace, np.int32), draft_us=0 if arm.off else draft_us)


def answer(emit: int, rounds: int, arm: Arm = CHAIN, rank: int = 0) -> tuple[Prior, Experience]:
    """The statistics of a request whose rounds all emitted `emit` tokens, and its router's experience."""
    notes, experience = Prior(), Experience()
    trace: tuple[int, ...] = ()
    for _ in range(rounds):
        played = tree(arm, trace), verdict(emit, arm.rows)
        notes.learn(arm, *played, chosen=True)
        experience.learn(arm, *played)
        trace = (rank,) * (emit - 1) + (RANKED,)
    return notes, experience


def prior_of(emit: int, rounds: int, arm: Arm = CHAIN) -> Prior:
    notes, experience = answer(emit, rounds, arm)
    return replace(notes, costs=experience.hints())


def length(prior: Prior, arm: Arm) -> EmittedLength | None:
    """A new request's prior of this arm alone."""
    return prior.lengths_of([arm]).get(arm)


# -- the weight of a prior --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ConservativeUCB])
def test_a_prior_of_a_thousand_rounds_weighs_eight(policy):
    prior = prior_of(4, 1000)
    begun = policy([OFF, CHAIN], Experience(), prior)
    assert begun.lengths[CHAIN].rounds == 8 and begun.lengths[CHAIN].mean == 4
    for _ in range(8):
        begun.learn(CHAIN, tree(CHAIN), verdict(2))
    assert begun.lengths[CHAIN].mean == pytest.approx(3)
    assert prior.lengths[CHAIN].rounds == 1000, "a request does not change its kind's prior"


def test_costs_of_a_thousand_rounds_weigh_eight():
    experience = Experience()
    experience.take(prior_of(4, 1000).costs)
    costs = experience.costs
    assert costs.draft[CHAIN].count == costs.rounds == costs.step.weight == 8
    assert experience.prices().predicted_us(CHAIN) == pytest.approx(10_000 + 100 * 5 + 100 + 300 * 4 + 40 * 4)


def test_costs_that_a_router_measured_are_not_replaced():
    _, experience = answer(2, 20)
    before = experience.prices().predicted_us(CHAIN)
    slow = prior_of(2, 20).costs
    slow[0].draft[CHAIN].us = 1e6
    experience.take(slow)
    assert experience.prices().predicted_us(CHAIN) == before


def test_a_kinds_earlier_rounds_weigh_at_most_64_beside_a_new_request():
    prior = prior_of(4, 1000)
    prior.add(answer(2, 64)[0])
    assert prior.lengths[CHAIN].mean == pytest.approx(3) and prior.lengths[CHAIN].rounds == 128


@pytest.mark.parametrize("arm", [PAIR, BUSHY, Arm.parse("mamba:nodes(2,2,0,1)")], ids=str)
def test_ranks_predict_arms_never_played(arm: Arm):
    """20,000 rounds of another arm with independent ranks: E[N] = 1 + sum_d prod a_i(N_i)."""
    rng, chances = random.Random(0), [0.5, 0.2, 0.1] + [0.02] * 5 + [0.1]
    notes = Prior()
    trace: tuple[int, ...] = ()
    for _ in range(20_000):
        ranks = []
        while len(ranks) < 5 and (not ranks or ranks[-1] == 0):
            ranks.append(rng.choices(range(RANKED + 1), chances)[0])
        notes.learn(CHAIN, tree(CHAIN, trace), verdict(len(ranks)), len(ranks))
        trace = tuple(ranks)
    expected: dict[Arm, float] = {
        PAIR: 1 + 0.5 + 0.25,
        BUSHY: 1 + 0.8 + 0.8 * 0.7 * (1 + 0.7 + 0.7 * 0.5 + 0.7 * 0.25),
    }
    below = 0.7 + 0.5 * 0.7 + 0.5 * 0.5 * 0.5  # two children; the first has two; the first of these one
    expected[Arm.parse("mamba:nodes(2,2,0,1)")] = 1 + below
    found = length(notes, arm)
    assert found.mean == pytest.approx(expected[arm], rel=0.03) and found.rounds == 8


def test_a_depth_never_reached_has_the_ranks_of_the_one_above():
    notes = Prior()
    ranks = notes.ranks["mamba"] = no_ranks()
    ranks[0, 0], ranks[0, RANKED] = 3, 1
    assert length(notes, PAIR).mean == pytest.approx(1 + 0.75 + 0.75**2)
    assert length(notes, PAIR).rounds == 4


def test_arms_asked_for_together_have_the_priors_that_each_has_alone():
    """Two drafters, one without ranks; arms played often, seldom and never; one whose tokens depend on values."""
    notes = prior_of(2, 20, PAIR)
    notes.ranks["mamba"] = no_ranks() + np.arange(RANKED + 1)[::-1]
    notes.lengths[CHAIN] = EmittedLength(3.0, 2.0)
    other, free = Arm("llama", PAIR.shape), Arm.parse("mamba:dynamic(4,5,15)")
    found = notes.lengths_of([PAIR, CHAIN, BUSHY, other, free, OFF])
    assert found == {arm: length(notes, arm) for arm in (PAIR, CHAIN, BUSHY)}
    assert found[PAIR].mean == 2 and found[CHAIN].mean != 3


def test_a_round_whose_tree_did_not_come_does_not_count_for_its_arm():
    notes = Prior()
    notes.learn(CHAIN, DraftTree.root_only(1), verdict(1), True)
    assert length(notes, CHAIN) is None


# -- draft times of shapes never played -------------------------------------------------------------------------------


def test_the_draft_time_of_a_shape_never_played_is_read_off_the_plane():
    experience = Experience()
    for arm in (PAIR, CHAIN, Arm.parse("mamba:(4,2,1)"), Arm.parse("mamba:nodes(2,1)")):
        for _ in range(3):
            experience.learn(arm, tree(arm), verdict(1, arm.rows))
    for arm in (
        BUSHY,
        Arm.parse("mamba:beam(4,3)"),
        Arm.parse("mamba:dynamic(4,4,20)"),
        Arm.parse("mamba:nodes(3,2,1,1)"),
    ):
        draft_us = 100 + 300 * arm.depth + 40 * arm.shape.forwarded
        assert experience.costs.draft_us(arm) == pytest.approx(draft_us, rel=1e-6)
        verify_us = experience.costs.verify_us(arm.rows, TargetSteps())
        assert experience.prices().predicted_us(arm) == pytest.approx(draft_us + verify_us)
    assert experience.prices().predicted_us(OFF) is not None


def test_one_shape_gives_a_draft_time_per_level_and_none_gives_no_prediction():
    experience = Experience()
    assert experience.prices().predicted_us(CHAIN) is None
    for _ in range(3):
        experience.learn(OFF, tree(OFF), verdict(1))
    assert experience.prices().predicted_us(CHAIN) is None and experience.prices().predicted_us(OFF) is not None
    for _ in range(2):
        experience.learn(CHAIN, tree(CHAIN), verdict(1, 5))
    assert experience.costs.draft_us(PAIR) == pytest.approx(tree(CHAIN).draft_us / 2)


def test_no_draft_is_predicted_to_take_negative_time():
    rng, experience = random.Random(0), Experience()
    for arm in (PAIR, CHAIN, BUSHY, Arm.parse("mamba:(8)")):
        for _ in range(2):
            experience.costs.learn_draft(arm, rng.uniform(100, 5000))
    plane: DraftPlane = experience.costs._planes["mamba"]
    assert experience.costs.draft_us(Arm.parse("mamba:(63)")) >= 0
    assert min(plane.coefficients) >= 0


def test_a_round_of_proposals_alone_does_not_count_for_a_drafted_shape():
    notes = Prior()
    notes.learn(CHAIN, replace(tree(CHAIN), missed=True), verdict(5, 5), True)
    assert notes.lengths == {}
    notes.learn(CHAIN, tree(CHAIN), verdict(2, 5), True)
    assert notes.lengths[CHAIN].mean == 2


@pytest.mark.parametrize(
    "text, rows",
    [
        ("off", 0),
        ("(3,2,1)", 10),
        ("(1,1,1)", 3),
        ("nodes(2,1)", 2),
        ("nodes(3,0,1)", 2),
        ("beam(4,3)", 10),
        ("dynamic(6,3,24)", 13),
    ],
)
def test_a_shapes_forwarded_rows_are_those_that_the_drafter_processes(text: str, rows: int):
    assert TreeShape.parse(text).forwarded == rows


# -- blobs ------------------------------------------------------------------------------------------------------------


def test_a_prior_is_unchanged_by_packing_and_unpacking():
    prior = prior_of(3, 20)
    prior.add(answer(2, 5, BUSHY)[0])
    prior.gains = {4: 0.8, 1: 1.5}
    again = unpack_prior(pack_prior(prior))
    assert again.lengths == prior.lengths and again.ranks.keys() == prior.ranks.keys() == {"mamba"}
    assert (again.ranks["mamba"] == prior.ranks["mamba"].round(3)).all()
    assert again.costs == prior.costs and again.gains == prior.gains
    assert len(pack_prior(prior)) < 4096


def test_a_stored_prior_has_every_cost_with_which_a_request_begins():
    _, experience = answer(3, 20)
    for count, each in enumerate(("ahead", "opening"), start=1):
        setattr(experience.costs, each, Cost(100.0 * count, count))
    for count, each in enumerate(ROUND_KINDS, start=3):
        experience.costs.hops[each] = Cost(100.0 * count, count)
    hints = experience.hints()
    assert unpack_prior(pack_prior(Prior(costs=hints))).costs == hints


def test_a_prior_whose_rounds_went_deeper_than_their_arm_is_valid():
    prior = answer(9, 5, BUSHY)[0]
    assert BUSHY.depth + 1 < prior.lengths[BUSHY].mean
    assert unpack_prior(pack_prior(prior)).lengths == prior.lengths


def test_a_router_reads_the_prior_that_it_wrote_of_steps_that_were_reported_to_take_0_us():
    """The first times come from a verifier that reports 0; later ones are learned all the same."""
    experience = Experience()
    for us in (0, 0, 0):
        experience.learn(OFF, tree(OFF), replace(verdict(1), verify_us=us))
    assert unpack_prior(pack_prior(Prior(costs=experience.hints()))) is not None
    for _ in range(300):
        experience.learn(OFF, tree(OFF), replace(verdict(1), verify_us=10_000))
    assert experience.prices().predicted_us(OFF) > 9_000


def malformed() -> list[bytes]:
    good = json.loads(pack_prior(prior_of(3, 20)))
    (size,) = good["costs"]["0"]["step"]
    blobs = [b"", b"{", b"null", b"[]", b"7", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}']
    for path, wrong in (
        (("format",), FORMAT + 1),
        (("lengths",), []),
        (("lengths",), {"mamba:(1,": [1, 1]}),
        (("lengths",), {"(1,1)": [1, 1]}),
        (("lengths",), {"mamba:off": [1, 1]}),
        (("lengths", "mamba:(1,1,1,1)"), [65.0, 3]),  # more than any tree has
        (("lengths", "mamba:(1,1,1,1)"), [3.0, -1]),
        (("lengths", "mamba:(1,1,1,1)"), [3.0, "many"]),
        (("lengths", "mamba:(1,1,1,1)"), [float("nan"), 3]),
        (("lengths", "mamba:(1,1,1,1)"), [3.0]),
        (("ranks",), [[1.0]]),
        (("ranks", "mamba"), [[1.0]]),
        (("ranks",), {str(number): [[1.0]] for number in range(300)}),
        (("ranks", "mamba", 0, 0), -1.0),
        (("ranks", "mamba", 0, 0), float("inf")),
        (("costs", "0", "step", size, 1), float("inf")),
        (("costs", "0", "step", size, 0), 0),
        (("costs", "0", "step"), {"weight": 8.0}),
        (("costs", "0", "step", "0"), [8.0, 1e4]),
        (("costs", "0", "step", str(1 << 40)), [8.0, 1e4]),
        (("costs", "0", "step"), {str(8 * size): [1.0, 1e4] for size in range(1, 66)}),
        (("costs", "0", "hops"), 3),
        (("costs", "0", "hops"), {"sideways": [3, 3]}),
        (("costs", "0", "texts"), 0),
        (("costs", "0", "draft"), {"mamba:(9,9)": [1.0, 2]}),
        (("costs", "0", "draft"), {"(1,1)": [1.0, 2]}),
        (("costs", "0", "draft"), {"off": [1.0, 2]}),
        (("costs",), {"light": {}}),
        (("gains",), {"0": -1.0}),
        (("gains",), {"0": float("nan")}),
        (("gains",), {"99": 1.2}),
        (("costs",), {"-5": good["costs"]["0"]}),
        (("costs",), {"99": good["costs"]["0"]}),
        (("gains",), [1.2]),
    ):
        content = json.loads(json.dumps(good))
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = wrong
        blobs.append(json.dumps(content).encode())
    return blobs


def test_a_prior_of_an_older_format_counts_as_missing():
    """Format 2 had the sums of a fit of step times, format 3 times by number of rows, but shapes in place of arms."""
    content = json.loads(pack_prior(prior_of(3, 20)))
    for older in (1, 2, 3):
        assert unpack_prior(json.dumps({**content, "format": older}).encode()) is None
    shapes = json.dumps({**content, "ranks": content["ranks"]["mamba"]}).replace("mamba:", "")
    assert unpack_prior(shapes.encode()) is None, "its arms have no drafter"
    for costs in content["costs"].values():
        costs["step"] = dict.fromkeys(("weight", "n", "n2", "n3", "n4", "us", "n_us", "n2_us"), 1.0)
    content["format"] = FORMAT
    assert unpack_prior(json.dumps(content).encode()) is None, "its steps are not in the form of the current format"


@pytest.mark.parametrize("blob", malformed(), ids=lambda blob: blob[:12].hex() + str(len(blob)))
async def test_a_malformed_prior_counts_as_missing(store: RedisPriors, server: RedisServer, blob: bytes):
    raw = redis.asyncio.Redis.from_url(server.url)
    await raw.set(PRIOR_PREFIX + KEY.name, blob)
    await raw.aclose()
    assert await store.load(KEY) is None
    assert length(await Priors(store).of(KEY, Experience()), CHAIN) is None


async def test_a_prior_is_found_by_its_key_alone_and_expires(store: RedisPriors, server: RedisServer):
    assert await store.save(KEY, prior_of(3, 20))
    assert (await store.load(KEY)).lengths[CHAIN].mean == 3
    for other in (
        replace(KEY, target="other"),
        replace(KEY, drafters=("mamba", "mamba2")),
        replace(KEY, temperature="warm"),
        replace(KEY, tenant=tenant_tag("second-tenant")),
    ):
        assert await store.load(other) is None
    raw = redis.asyncio.Redis.from_url(server.url)
    assert 0 < await raw.ttl(PRIOR_PREFIX + KEY.name) <= 30
    assert not [key for key in await raw.keys("*") if b"first-tenant" in key]
    await raw.aclose()


# -- a router's priors ------------------------------------------------------------------------------------------------


async def test_a_new_router_begins_where_another_ended(store: RedisPriors):
    key = replace(KEY, target="handed-on")
    first, notes_of = Priors(store), answer(4, 30)
    await first.of(key, Experience())
    first.learn(key, *notes_of)
    await first.settled()
    experience = Experience()
    second = Priors(store)
    await second.of(key, experience)
    await second.settled()
    prior = await second.of(key, experience)
    assert length(prior, CHAIN) == EmittedLength(4.0, 8.0)
    policy = make_policy("conservative_ucb", [OFF, CHAIN, BUSHY], experience, prior)
    assert policy.choose() == CHAIN, "in its first round"


async def test_a_tenant_whose_experience_was_dropped_begins_with_the_costs_of_its_prior():
    priors = Priors()
    await priors.of(KEY, Experience())
    priors.learn(KEY, *answer(2, 20))
    dropped = Experience()
    await priors.of(KEY, dropped)
    assert dropped.costs.rounds == 8
    await priors.settled()


async def test_rounds_recorded_before_the_prior_was_loaded_are_kept():
    class Slow:
        def __init__(self) -> None:
            self.ready = asyncio.Event()
            self.saved: list[Prior] = []

        async def load(self, key: PriorKey) -> Prior | None:
            await self.ready.wait()
            return prior_of(4, 64)

        async def save(self, key: PriorKey, prior: Prior) -> bool:
            self.saved.append(prior)
            return True

    store = Slow()
    priors = Priors(store)
    assert length(await priors.of(KEY, Experience()), CHAIN) is None
    priors.learn(KEY, *answer(2, 64))
    assert not store.saved, "saving now would overwrite the stored prior"
    store.ready.set()
    await priors.settled()
    assert store.saved[0].lengths[CHAIN].mean == pytest.approx(3)
    assert (await priors.of(KEY, Experience())).lengths[CHAIN].mean == pytest.approx(3)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_redis_costs_a_kinds_first_request_ten_milliseconds_at_most(fault, monkeypatch):
    """Counts waits instead of timing them: only the first request of each kind waits, with a time limit."""
    monkeypatch.setattr(redis_server, "RESTART_S", 60.0)
    bounds: list[float] = []
    wait, request = asyncio.wait, asyncio.current_task()

    async def counted(tasks, *, timeout=None, **options):  # asyncio's parameter
        if asyncio.current_task() is request:  # not the waits of the store in the background
            bounds.append(timeout)
        return await wait(tasks, timeout=timeout, **options)

    with RedisServer(memory_mb=16) as server:
        store = RedisPriors(server.url, 30, budget_s=0.05)
        store.blobs.breaker = CircuitBreaker(3, 60.0)
        os.kill(server.pid, fault)
        priors = Priors(store)
        monkeypatch.setattr(asyncio, "wait", counted)
        for number in range(6):
            key = replace(KEY, target=str(number))
            assert length(await priors.of(key, Experience()), CHAIN) is None
            priors.learn(key, *answer(2, 3))
        monkeypatch.setattr(asyncio, "wait", wait)
        await priors.settled()
        assert len(bounds) <= 6 and set(bounds) == {WAIT_S}
        for number in range(6, 12):
            await priors.of(replace(KEY, target=str(number)), Experience())
            await priors.settled()
        assert store.blobs.counters.skipped > 0, "the circuit breaker skips calls"
        assert length(await priors.of(replace(KEY, target="0"), Experience()), CHAIN).mean == 2
        await store.close()
        if fault is signal.SIGSTOP:
            os.kill(server.pid, signal.SIGCONT)


async def test_concurrent_writes_and_kinds_are_bounded():
    class Stuck:
        saves = 0

        async def load(self, key: PriorKey) -> Prior | None:
            return None

        async def save(self, key: PriorKey, prior: Prior) -> bool:
            self.saves += 1
            await asyncio.sleep(0)
            return True

    store = Stuck()
    priors = Priors(store)
    for number in range(KINDS + 10):
        priors.learn(replace(KEY, target=str(number)), *answer(2, 1))
    await asyncio.sleep(0)
    assert store.saves == WRITES
    assert len(priors._known) == KINDS
    await priors.settled()
    assert store.saves == KINDS + WRITES, "only kinds that are still known at their turn are written"


# -- at the ingress ---------------------------------------------------------------------------------------------------


async def test_an_answer_saves_a_prior_under_its_tenants_tag_with_which_another_router_begins(store: RedisPriors):
    edge = ingress(EdgePeers(), priors=store)
    done = await LocalClient(edge, "acme").generate_text("hello", max_new_tokens=60, seed=3)
    assert done.complete is not None
    await edge._priors.settled()
    key = PriorKey.of("demo", ("mamba",), 0.0, "acme")
    saved = await store.load(key)
    assert saved.lengths and saved.costs
    assert await store.load(PriorKey.of("demo", ("mamba",), 0.0, "other")) is None
    other = ingress(EdgePeers(), priors=store)
    await other._priors.of(key, other.experience["demo"].of("acme"))
    await other._priors.settled()
    assert other.experience["demo"].of("acme").costs.rounds == 8


# -- arms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named, all_of_them",
    [
        (["off"], ["off"]),
        (["m:(1,1)"], ["off", "m:(1,1)"]),
        (["off", "m:(3,2,1)"], ["m:(1,1,1)", "off", "m:(3,2,1)"]),
        (["m:nodes(1,1)", "off"], ["m:nodes(1,1)", "off"]),
        (["m:(2,1,1,1,1,1)"], ["off", "m:(1,1,1,1)", "m:(2,1,1,1,1,1)"]),
        (["m:(2,1)", "n:(1,1)", "o:(2)"], ["off", "m:(1,1)", "o:(1)", "m:(2,1)", "n:(1,1)", "o:(2)"]),
    ],
)
def test_off_and_a_chain_are_always_among_the_arms(named, all_of_them):
    arms = with_chain_and_off([Arm.parse(text) for text in named])
    assert [str(arm) for arm in arms] == all_of_them


def test_added_arms_keep_the_bounds_of_the_others():
    for own in (BUSHY, Arm.parse("mamba:(63)"), Arm.parse("mamba:nodes(2,1)")):
        for arm in with_chain_and_off([own]):
            assert arm.rows <= own.rows and arm.depth <= own.depth


# -- two drafters of one target ---------------------------------------------------------------------------------------

OTHER = Arm("llama", CHAIN.shape)


def test_two_drafters_share_no_experience():
    """The same shape of another drafter: its drafts take ten times as long, and its guesses are wrong."""
    _, experience = answer(4, 20)
    _, alone = answer(4, 20)
    assert experience.prices().predicted_us(OTHER) is None
    slow = replace(tree(OTHER), draft_us=10 * tree(OTHER).draft_us)
    for _ in range(50):
        experience.learn(OTHER, slow, verdict(1, OTHER.rows))
    assert experience.prices().predicted_us(CHAIN) == pytest.approx(alone.prices().predicted_us(CHAIN))
    assert experience.costs.draft_us(PAIR) == alone.costs.draft_us(PAIR), "predicted from the drafter's own costs"
    assert experience.costs.draft_us(Arm("llama", PAIR.shape)) == pytest.approx(10 * alone.costs.draft_us(PAIR))


def test_two_drafters_share_no_prior():
    """Both rank each token of the text. The chains of one are right, those of the other wrong."""
    notes, ranked = Prior(), {CHAIN: 0, OTHER: RANKED}
    for place in range(40):
        arm = CHAIN if place % 2 else OTHER
        notes.learn(arm, tree(arm, (ranked[arm],) * 2 * bool(place)), verdict(1), True)
    assert notes.ranks["mamba"].sum() == 39 and notes.ranks["mamba"][0, 0] == 39
    assert notes.ranks["llama"].sum() == 38 and notes.ranks["llama"][0, RANKED] == 38
    assert length(notes, PAIR).mean == pytest.approx(3)
    assert length(notes, Arm("llama", PAIR.shape)).mean == pytest.approx(1)
    assert length(notes, Arm("third", PAIR.shape)) is None
    again = unpack_prior(pack_prior(notes))
    assert again.lengths == notes.lengths and again.ranks.keys() == notes.ranks.keys()


def test_a_policy_replays_each_drafters_arms_on_its_own_ranks():
    policy, ranked = ConservativeUCB([OFF, PAIR, CHAIN, OTHER], Experience()), {CHAIN: 0, OTHER: RANKED}
    for place in range(60):
        arm = CHAIN if place % 2 else OTHER
        policy.learn(arm, tree(arm, (ranked[arm],) * min(place, 2)), verdict(1, arm.rows))
    means = [policy.lengths[arm].mean for arm in (CHAIN, PAIR, OTHER)]
    assert means == [5, 3, 1]
    for _ in range(20):
        policy.learn(OTHER, replace(DraftTree.root_only(1), missed=True, draft_us=9), verdict(1))
    assert policy.lengths[CHAIN].mean == 5, "only the other drafter's trees did not come"


@pytest.mark.parametrize("text", ["off", "mamba-2.8b:(1,1)", "lookup+suffix:proposed(7)", "m:nodes(2,1)"])
def test_an_arm_is_read_as_it_is_written(text: str):
    assert str(Arm.parse(text)) == text


@pytest.mark.parametrize("text", ["(1,1)", ":(1,1)", "mamba:off", "mamba:", "mamba", "proposed(7)", ""])
def test_an_arm_has_a_maker_unless_it_is_off(text: str):
    with pytest.raises(ValueError, match="arm|shape"):
        Arm.parse(text)


# -- figures of drafters ----------------------------------------------------------------------------------------------


def card(*first: float) -> DrafterFigures:
    """Figures by temperature, 0 and 1: the share of tokens that were the drafter's first choice."""
    tables = [((share, *(0.0,) * (RANKED - 1)),) * 2 for share in first]
    return DrafterFigures(
        target="target",
        by_temperature=[
            RankFigures(temperature=temperature, ranks=(1,) * (RANKED + 1), accepted=table)
            for temperature, table in enumerate(tables)
        ],
    )


@pytest.mark.parametrize(("temperature", "mean"), [(0.0, 1 + 0.5 + 0.25), (1.0, 1 + 0.25 + 0.0625)])
async def test_a_router_without_experience_begins_with_its_drafters_figures(temperature, mean):
    chain, key = Arm.parse("mamba:(1,1)"), PriorKey.of("target", ("mamba", "other"), temperature, "stranger")
    priors = Priors(None, {"mamba": card(0.5, 0.25)})
    await priors.of(key, Experience())
    await priors.settled()
    found = (await priors.of(key, Experience())).lengths_of([chain, Arm.parse("other:(1,1)")])
    assert {arm: (length.mean, length.rounds) for arm, length in found.items()} == {chain: (pytest.approx(mean), 8)}


async def test_drafters_figures_say_nothing_of_modes_that_list_their_guesses():
    key = replace(KEY, mode="lenient")
    priors = Priors(None, {"mamba": card(0.5)})
    await priors.of(key, Experience())
    await priors.settled()
    assert not (await priors.of(key, Experience())).guessed


async def test_drafters_figures_count_as_one_tenant_among_those_that_came():
    priors = Priors(None, {"mamba": card(0.9)})
    for number, right in enumerate((10, 20, 30)):
        key, notes = replace(KEY, tenant=tenant_tag(f"tenant {number}")), Prior(ranks={"mamba": no_ranks()})
        notes.ranks["mamba"][0, 0], notes.ranks["mamba"][0, RANKED] = right, 100 - right
        await priors.of(key, Experience())
        await priors.settled()
        priors.learn(key, notes, Experience())
    key = replace(KEY, tenant=tenant_tag("stranger"))
    await priors.of(key, Experience())
    await priors.settled()
    (length,) = (await priors.of(key, Experience())).lengths_of([Arm.parse("mamba:(1)")]).values()
    assert 1.2 <= length.mean <= 1.3, "the middle of 0.1, 0.2, 0.3 and the card's 0.9"


async def test_a_kind_that_is_dropped_and_asked_for_again_while_it_is_read_is_read_once(monkeypatch):
    monkeypatch.setattr("cluster.router.priors.KINDS", 1)
    monkeypatch.setattr("cluster.router.priors.WAIT_S", 0.0)

    class WaitingReads:
        def __init__(self) -> None:
            self.go = asyncio.Event()
            self.read: list[str] = []

        async def load(self, key: PriorKey) -> Prior | None:
            self.read.append(key.tenant)
            await self.go.wait()
            return None

        async def save(self, key: PriorKey, prior: Prior) -> bool:
            return True

    slow = WaitingReads()
    priors, experience = Priors(slow), Experience()
    first, second = (PriorKey.of("demo", ("d",), 0.0, tenant) for tenant in ("one", "two"))
    for key in (first, second, first):
        await priors.of(key, experience)
    reads = [*priors._reading.values()]
    slow.go.set()
    await priors.settled()
    assert [task.exception() for task in reads] == [None, None]
    assert len(slow.read) == 4, "each kind and its kind of all tenants"
