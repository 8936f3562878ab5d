"""What clients choose freely is kept for their tenant alone or not at all; no number in the store fails a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from dendro.shapes import NodeShape
from dendro.text import Sampling, Verdict
from dendro.tree import DraftTree
from dendro.v1 import generation_pb2 as pb
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.arms import OFF_ARM, Arm
from cluster.policies import Experience, Experiences, make_policy, with_chain_and_off
from cluster.policies.costs import Costs, usual_costs
from cluster.policies.experience import TENANTS
from cluster.policies.prior import MAX_PRIOR_BYTES, Prior, PriorKey, pack_prior, unpack_prior
from cluster.policies.step_time import StepTime, TargetSteps
from tests.support.edge import EdgePeers, ingress, plain_answer

ARMS = with_chain_and_off([Arm.parse("mamba:(1,1,1)"), Arm.parse("mamba:(2,1)")])
WALK = list(b"walk")


class SlowPeers(EdgePeers):
    """Steps and drafts take 1 s per token of the text. Trees have values."""

    def verifier(self, target, text, *terms):
        verifier = super().verifier(target, text, *terms)
        verify = verifier.verify

        async def slow_verify(text, tree):
            return replace(await verify(text, tree), verify_us=1_000_000 * len(text), step_rows=tree.rows)

        verifier.verify = slow_verify
        return verifier

    def drafters(self, target, text, *terms):
        drafter = super().drafters(target, text, *terms)
        draft = drafter.draft

        async def slow_draft(text, arm):
            tree = await draft(text, arm)
            if not tree.guesses:
                return tree
            return replace(tree, draft_us=1_000_000 * len(text), values=(-0.1 * tree.depths).astype(np.float32))

        drafter.draft = slow_draft
        return drafter


async def test_shapes_that_clients_fix_are_not_kept_by_a_router():
    edge = ingress(SlowPeers())
    for one in range(1, 8):
        for two in range(1, 8):
            fixed = pb.Speculation(mode=pb.Speculation.MODE_FIXED, shape=f"({one},{two})")
            request = pb.GenerateRequest(text="walk", max_new_tokens=4, speculation=fixed)
            assert [event async for event in edge.generate(request)]
    experience = edge.experience["demo"].of("")
    assert all(not prior.lengths for prior in edge._priors._known.values())
    assert all(not costs.draft and not costs.rows for costs in experience._by_load.values())


async def test_shapes_that_a_policy_chose_are_kept():
    edge = ingress(EdgePeers())
    request = pb.GenerateRequest(text="walk", max_new_tokens=60)
    assert [event async for event in edge.generate(request)]
    (key, prior), _ = edge._priors._known.items()
    stranger = await edge._priors.of(replace(key, tenant="stranger"), Experience())
    assert prior.lengths and set(prior.lengths) == set(stranger.lengths)
    assert set(prior.lengths) <= set(edge.config.arms_of("demo")) | set(ARMS)


async def shapes_of(edge, tenant: str, prompt: str) -> list[str]:
    """The shapes that a policy chose for a request, round by round."""
    request = pb.GenerateRequest(text=prompt, max_new_tokens=60)
    return [event.chunk.shape async for event in edge.generate(request, tenant) if event.HasField("chunk")]


def test_a_new_tenants_costs_are_those_of_the_tenant_in_the_middle():
    experiences = Experiences()
    for tenant, us in (("one", 10_000), ("hostile", 1_000_000), ("two", 11_000)):
        for _ in range(4):
            experiences.of(tenant).learn(
                OFF_ARM, DraftTree.root_only(1), Verdict((1,), (0,), (), None, 1, us, step_rows=1)
            )
    assert experiences.of("new").prices().predicted_us(OFF_ARM) < 11_100
    assert experiences.of("one").prices().predicted_us(OFF_ARM) == pytest.approx(10_000, rel=0.01)


def test_a_thousand_new_tenants_make_medians_for_few_of_them(monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []

    def counted(measured: Sequence[Costs], target: TargetSteps) -> Costs:
        made[-1] += 1
        return usual_costs(measured, target)

    monkeypatch.setattr("cluster.policies.experience.usual_costs", counted)
    experiences, loads = Experiences(), (1, 2, 4, 8)  # running requests, each of a load class of its own
    plain = Verdict((1,), (0,), (), None, 1, 10_000, step_rows=1)
    for number in range(1000):
        made.append(0)
        experience = experiences.of(str(number))
        for running in loads:
            experiences.concurrency.requests = running
            experience.learn(OFF_ARM, DraftTree.root_only(1), plain)
    assert max(made[2:]) == 1, "one load class for a tenant, once all are known"
    assert sum(made) < 200, "not for each of the tenants"
    experiences.concurrency.expected = 8
    assert experiences.of("new").costs.rounds and experiences.of("new").costs.step.sizes


def test_a_new_tenant_begins_with_costs_measured_since_the_last_one_came():
    experiences, tenants = Experiences(), ("one", "two", "three", "four")
    for tenant, us in zip(tenants, (10_000, 20_000, 30_000, 40_000), strict=True):
        for _ in range(20):
            experiences.of(tenant).learn(
                OFF_ARM, DraftTree.root_only(1), Verdict((1,), (0,), (), None, 1, us, step_rows=1)
            )
    second = sorted(experiences.of(tenant).prices().predicted_us(OFF_ARM) or 0.0 for tenant in tenants)[1]
    # A tenant predicts by a fit that an eighth of its steps may be missing from.
    assert experiences.of("new").prices().predicted_us(OFF_ARM) == pytest.approx(second, rel=1 / 8)


async def test_a_tenants_requests_share_their_costs():
    edge = ingress(SlowPeers())
    played = [*await shapes_of(edge, "acme", "walk"), *await shapes_of(edge, "acme", "walk")]
    assert edge.experience["demo"].of("acme").costs.rounds == len(played)


def test_a_router_keeps_the_experience_of_a_bounded_number_of_tenants():
    experiences = Experiences()
    kept = [experiences.of(str(number)) for number in range(TENANTS)]
    assert experiences.of("0") is kept[0]
    experiences.of("another")
    assert len(experiences._by_tenant) == TENANTS
    assert experiences.of("0") is kept[0] and experiences.of("1") is not kept[1], "the least recently used was dropped"


def learned() -> bytes:
    """A prior with costs of one load, as a router writes it."""
    notes, experience = Prior(), Experience()
    for _ in range(20):
        for arm in ARMS:
            plain = DraftTree.of(range(arm.rows), range(-1, arm.rows - 1))
            tree = replace(plain, draft_us=0 if arm.off else 100 + 300 * arm.depth)
            emitted = min(2, arm.rows)
            found = Verdict((1,) * emitted, tuple(range(emitted)), (0,) * (emitted - 1), None, emitted, 10_000)
            found = replace(found, step_rows=arm.rows)
            experience.learn(arm, tree, found)
            notes.learn(arm, tree, found, chosen=True)
            experience.learn_time(arm, tree, found, 15_000)
    return pack_prior(Prior(notes.lengths, notes.ranks, experience.hints()))


class Store:
    """Returns one blob for every kind of request."""

    def __init__(self, blob: bytes) -> None:
        self.blob = blob

    async def load(self, key: PriorKey) -> Prior | None:
        return unpack_prior(self.blob)

    async def save(self, key: PriorKey, prior: Prior) -> bool:
        return True


def numbers_of(value: object, path: tuple = ()) -> list[tuple]:
    """The paths of all numbers in a JSON value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place for key, part in parts for place in numbers_of(part, (*path, key))]
    return found if parts else [path] if isinstance(value, int | float) else []


CONTENT = json.loads(learned())
COSTS = [path for path in numbers_of(CONTENT) if path[0] == "costs"]


def changed(paths: list[tuple], number: object) -> bytes:
    content = json.loads(json.dumps(CONTENT))
    for path in paths:
        part = content
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = number
    return json.dumps(content).encode()


async def check_answer(blob: bytes, policy: str) -> None:
    edge = ingress(EdgePeers(), priors=Store(blob))
    request = pb.GenerateRequest(text="walk", max_new_tokens=20, speculation=pb.Speculation(policy=policy))
    tokens = [token async for event in edge.generate(request) for token in event.chunk.token_ids]
    assert tokens == plain_answer(WALK, Sampling(), 20)


@pytest.mark.parametrize("policy", ["conservative_ucb", "paper_ucb"])
@pytest.mark.parametrize("number", [0, 1e15, 1e-300])
async def test_costs_that_are_all_one_number_fail_no_request(policy, number):
    await check_answer(changed(COSTS, number), policy)
    await check_answer(
        changed([path for path in COSTS if "rounds" not in path and "texts" not in path], number), policy
    )


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.sampled_from(numbers_of(CONTENT)), min_size=1, max_size=4), st.data())
def test_a_prior_of_any_numbers_counts_as_missing_or_predicts_times_above_zero(paths, data):
    number = data.draw(
        st.sampled_from([0, -1, 1e-300, 1e15, 1e16, 1e308, 2**70, True, None, "x", [], float("nan"), float("inf")])
        | st.floats()
    )
    prior = unpack_prior(changed(paths, number))
    if prior is None:
        return
    experience = Experience()
    experience.take(prior.costs)
    for arm in ARMS:
        us = experience.prices().predicted_us(arm)
        assert us is None or (np.isfinite(us) and us > 0)
    policy = make_policy("conservative_ucb", ARMS, experience, prior)
    assert policy.choose() in ARMS


def test_a_prior_of_too_many_arms_counts_as_missing():
    shapes = {f"mamba:{NodeShape((one, two))}": [1.0, 1.0] for one in range(2, 30) for two in range(1, 30)}
    blob = json.dumps({**CONTENT, "lengths": shapes}).encode()
    assert len(blob) <= MAX_PRIOR_BYTES and len(shapes) > 256
    assert unpack_prior(blob) is None


def test_a_prior_whose_steps_took_no_time_counts_as_missing():
    (load,) = CONTENT["costs"]
    for rows, (weight, us) in CONTENT["costs"][load]["step"].items():
        assert weight and us
        assert unpack_prior(changed([("costs", load, "step", rows, 1)], 0)) is None
    assert StepTime().at(8, 1) == 0, "no step was measured"


@pytest.mark.parametrize("arm", ["off", "lookup:proposed(7)"])
def test_a_prior_with_the_draft_time_of_an_arm_that_is_not_drafted_counts_as_missing(arm: str):
    """paper_ucb divides draft times by depths, and `off` has the depth 0."""
    (load,) = CONTENT["costs"]
    content = json.loads(json.dumps(CONTENT))
    content["costs"][load]["draft"][arm] = [100.0, 2]
    assert unpack_prior(json.dumps(content).encode()) is None
