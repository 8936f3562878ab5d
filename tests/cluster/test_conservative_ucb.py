"""The served policy: no text pays much for finding out, and a stranger begins with what all tenants found."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from dendro.errors import BadRequest
from dendro.shapes import TreeShape
from dendro.text import Verdict
from dendro.tree import RANKED, DraftTree
from pydantic import ValidationError

from cluster.arms import OFF_ARM, Arm
from cluster.config import SpeculationConfig
from cluster.policies import POLICIES, REPLACED, ConservativeUCB, Experience, Experiences, make_policy
from cluster.policies.conservative_ucb import HELD_ROUNDS, STAYING
from cluster.policies.costs import EmittedLength
from cluster.policies.experience import Concurrency
from cluster.policies.prior import Prior, pair_prior
from cluster.policies.replay import static_path
from cluster.policies.step_time import TargetSteps
from cluster.proposers.proposals import Chances, Count, usual_chances

OFF_US, LEVEL_US, ROW_US = 10_000, 800, 300
ARMS = [OFF_ARM, *(Arm.parse(f"mamba:{shape}") for shape in ("(1,1,1,1)", "(2,1,1)", "(3,2,2,1,1)", "dynamic(4,5,15)"))]
SHORT_ARMS = [OFF_ARM, *(Arm.parse(f"mamba:{shape}") for shape in ("(1)", "(1,1)", "(2,1,1)", "(1,1,1,1)"))]
TOKENS = 160


def shared() -> Concurrency:
    """Of a target whose steps are not padded."""
    return Concurrency(target=TargetSteps(tuple(range(1, 65))))


def answer(
    policy: ConservativeUCB, right: float, seed: int, notes: Prior | None = None, tokens: int = TOKENS
) -> tuple[float, list[Arm]]:
    """The time of an answer over that without speculation, and its arms. right: chance that a token ranks first"""
    rng = random.Random(seed)
    ranks = [0 if rng.random() < right else RANKED for _ in range(tokens + 64)]
    place = traced = 0
    spent, played = 0.0, []
    while place < tokens:
        arm = policy.choose(lambda least: DraftTree.root_only(1))
        played.append(arm)
        shape = TreeShape.parse("(3,2,2,1,1)") if str(arm.shape).startswith("dynamic") else arm.shape
        length = len(static_path(shape, ranks[place : place + arm.depth])) if arm.drafted else 1
        tree = DraftTree.root_only(1)
        if arm.drafted:
            tree = DraftTree.of(range(arm.rows), range(-1, arm.rows - 1))
            trace, traced = ranks[max(traced, place - 64) : place], place
            tree = replace(tree, draft_us=LEVEL_US * arm.depth, trace=np.array(trace, np.int32))
        step_us = OFF_US + ROW_US * (arm.rows - 1)
        found = Verdict((1,) * length, tuple(range(length)), (0,) * (length - 1), None, length, step_us)
        found = replace(found, step_rows=arm.rows)
        policy.learn(arm, tree, found)
        if notes is not None:
            notes.learn(arm, tree, found, chosen=True)
        spent += tree.draft_us + step_us
        place += length
    return spent / (OFF_US * place), played


@pytest.mark.parametrize("right", [0.0, 0.1, 0.2])
def test_a_strangers_first_answer_pays_three_percent_at_most_to_find_a_drafter_useless(right):
    """The first answer of all: nothing is known, not even what a draft costs."""
    for seed in range(8):
        slower, _ = answer(ConservativeUCB(ARMS, Experience(shared())), right, seed)
        assert slower <= 1.03, seed


def test_the_calls_of_a_round_with_a_tree_count_as_lost():
    lost = []
    for call_us in (0, 3_000):
        policy = ConservativeUCB(ARMS, Experience(shared()))
        plain = Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=1)
        tree = replace(DraftTree.of(range(5), range(-1, 4)), draft_us=2_000)
        found = Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=5)
        for _ in range(8):
            policy.learn(OFF_ARM, DraftTree.root_only(1), plain)
            policy.experience.learn_time(OFF_ARM, DraftTree.root_only(1), plain, OFF_US)
        for _ in range(4):
            policy.experience.learn(ARMS[1], tree, found)
            policy.experience.learn_time(ARMS[1], tree, found, 2_000 + OFF_US + 2 * call_us)
        before = policy._lost_us
        policy.learn(ARMS[1], tree, found)
        lost.append(policy._lost_us - before)
    assert lost == pytest.approx([2_000, 2_000 + 2 * 3_000])


def test_rounds_after_a_tree_that_were_not_begun_ahead_count_as_lost():
    policy, ahead_us = ConservativeUCB(ARMS, Experience(shared())), 4_000
    plain = Verdict((1,), (0,), (), None, 1, OFF_US - ahead_us, step_rows=1, ahead_us=ahead_us)
    for _ in range(8):
        policy.learn(OFF_ARM, DraftTree.root_only(1), plain)
        policy.experience.learn_time(OFF_ARM, DraftTree.root_only(1), plain, OFF_US - ahead_us)
    before = policy._lost_us
    tree = replace(DraftTree.of(range(5), range(-1, 4)), draft_us=0)
    policy.learn(ARMS[1], tree, Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=5))
    lost_by_the_tree = policy._lost_us - before
    for _ in range(8):
        policy.learn(OFF_ARM, DraftTree.root_only(1), plain)
    assert policy._lost_us - before == pytest.approx(lost_by_the_tree + STAYING * ahead_us)


@pytest.mark.parametrize("right", [0.0, 0.2, 0.3])
def test_later_strangers_pay_one_and_a_half_percent_at_most(right):
    experiences, priors = Experiences(shared()), []
    for number in range(10):
        notes, begun = Prior(), pair_prior(priors).begun()
        policy = ConservativeUCB(ARMS, experiences.of(str(number)), begun)
        slower, _ = answer(policy, right, number, notes)
        assert number == 0 or slower <= 1.015, number
        begun.add(notes)
        priors.append(begun)


def test_a_stranger_speculates_from_the_first_round_where_others_gained():
    experiences, prior = Experiences(shared()), Prior()
    faster, _ = answer(ConservativeUCB(ARMS, experiences.of("one"), prior), 0.9, 1, prior)
    assert faster < 0.7
    stranger = ConservativeUCB(ARMS, experiences.of("two"), pair_prior([prior]).begun())
    assert stranger.choose().drafted
    slower, played = answer(ConservativeUCB(ARMS, experiences.of("three"), pair_prior([prior]).begun()), 0.0, 2)
    assert slower < 1.07, "whose text is of another kind"
    assert sum(arm.drafted for arm in played[-40:]) <= 2


@pytest.mark.parametrize("lengths", [{}, {Arm.parse("lookup:proposed(7)"): EmittedLength(3.0, 16.0)}])
def test_one_unguessable_first_text_keeps_no_later_stranger_from_a_good_drafter(lengths):
    """Neither alone nor beside proposals that gained when they were played; none is offered here."""
    experiences, priors, took = Experiences(shared()), [], []
    for number in range(61):
        notes, begun = Prior(), pair_prior(priors[-32:]).begun()
        begun.lengths |= lengths
        policy = ConservativeUCB([*ARMS, *lengths], experiences.of(str(number)), begun)
        slower, _ = answer(policy, 0.03 if not number else 0.9, number, notes, tokens=128)
        took.append(slower)
        priors += [notes] if notes.guessed else []
    assert len(took[31:]) / sum(took[31:]) > 1.3


def test_one_cheap_trees_ranks_tell_of_arms_that_were_not_played():
    policy = ConservativeUCB(ARMS[:4], Experience(shared()))
    for _ in range(4):
        policy.learn(OFF_ARM, DraftTree.root_only(1), Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=1))
    chain, bushy = ARMS[1], ARMS[3]
    tree = DraftTree.of(range(5), range(-1, 4))
    for _ in range(26):
        policy.learn(OFF_ARM, DraftTree.root_only(1), Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=1))
    found = Verdict((1,) * 5, tuple(range(5)), (0,) * 4, None, 5, OFF_US, step_rows=5)
    policy.learn(chain, replace(tree, trace=np.array((0,) * 30, np.int32), draft_us=9), found)
    assert policy.lengths[bushy].mean == bushy.depth + 1 and policy.lengths[bushy].rounds == 5


def test_an_arm_that_no_replay_covers_is_judged_by_its_latest_rounds():
    dynamic = ARMS[4]
    policy, tree = ConservativeUCB([OFF_ARM, dynamic], Experience(shared())), DraftTree.of(range(16), range(-1, 15))
    for length, rounds in ((5, 300), (1, 64)):
        for _ in range(rounds):
            path, ranks = tuple(range(length)), (0,) * (length - 1)
            found = Verdict((1,) * length, path, ranks, None, length, OFF_US, step_rows=16)
            policy.learn(dynamic, replace(tree, draft_us=LEVEL_US), found)
    assert policy.lengths[dynamic].mean < 2


def test_proposals_that_promise_too_much_cost_a_text_little():
    """Every offer promises three tokens, none comes, and their rows make a round half again as long."""
    proposed = Arm.parse("lookup:proposed(15)")
    experience, offer = Experience(shared()), DraftTree.of(range(16), range(-1, 15), [0.0] * 4 + [-9.0] * 12)
    policy, spent = ConservativeUCB([OFF_ARM, proposed], experience), 0
    for _ in range(TOKENS):
        arm = policy.choose(lambda least: offer)
        tree, us = (DraftTree.root_only(1), OFF_US) if arm.off else (offer, OFF_US + 15 * ROW_US)
        policy.learn(arm, tree, Verdict((1,), (0,), (), None, 1, us, step_rows=tree.rows))
        spent += us
    assert spent <= 1.05 * TOKENS * OFF_US


def test_one_tenant_of_three_moves_no_strangers_prior():
    chain = ARMS[1]
    tables = []
    for right in (30, 28, 0):
        counts = np.zeros((16, RANKED + 1))
        counts[0, 0], counts[0, RANKED] = right, 40 - right
        tables.append(counts)
    means = (3.0, 3.2, 1.0)
    honest = [
        Prior({chain: EmittedLength(mean, 40.0)}, {"mamba": table}) for mean, table in zip(means, tables, strict=True)
    ]
    for hostile in (Prior({chain: EmittedLength(5.0, 1e9)}, {"mamba": 1e6 * tables[0]}), honest[2]):
        pair = pair_prior([*honest[:2], hostile])
        assert 3.0 <= pair.lengths[chain].mean <= 3.2
        first = pair.ranks["mamba"][0]
        assert 28 / 40 <= first[0] / first.sum() <= 30 / 40
        assert pair.begun().lengths[chain].rounds == 8


def test_a_tenants_proposals_count_16_times_at_most_for_a_new_tenant():
    kind = ("lookup", 2, 1, 1)
    many = [Chances({kind: Count(0.0, 500.0)}), *(Chances({kind: Count(8.0, 16.0)}) for _ in range(3))]
    usual = usual_chances(many).counts[kind]
    assert usual.right / usual.of == pytest.approx(24 / 64) and usual.of == 32


@pytest.mark.parametrize("name", REPLACED)
def test_a_former_policys_name_is_refused_with_the_one_that_replaces_it(name):
    with pytest.raises(BadRequest, match=f"speculation.policy: '{name}' was replaced by 'conservative_ucb'"):
        make_policy(name, ARMS, Experience(shared()))
    with pytest.raises(ValidationError, match=f"'{name}' was replaced by 'conservative_ucb'"):
        SpeculationConfig(policy=name)
    assert name not in POLICIES


def test_the_opening_of_a_drafter_must_be_earned_back_before_its_first_tree():
    """A chain gains 0.28 of a round each time, 2.2 in eight rounds: it earns back an opening of two rounds, and none of
    three."""
    chain = ARMS[1]
    for opening_us, expected in ((0.0, chain), (2 * OFF_US, chain), (3 * OFF_US, OFF_ARM)):
        experience = Experience(shared())
        for rows in (1, 5):
            experience.costs.step.learn(rows, OFF_US, experience.concurrency.target)
        for _ in range(3):
            experience.costs.learn_draft(chain, 4 * LEVEL_US)
            experience.costs.opening.learn(opening_us)
        policy = ConservativeUCB([OFF_ARM, chain], experience, Prior({chain: EmittedLength(1.6, 8.0)}))
        assert policy.choose() == expected


@pytest.mark.parametrize("right, mean", [(0.59, 1.4), (0.43, 1.12), (0.2, 0.99)])
def test_strangers_with_short_answers_take_what_most_texts_gain(right, mean):
    """Answers of 64 tokens of one tenant each, whose texts differ, after an opening of two rounds. mean: over `off`, of
    twelve routers' 24 answers; one answer in twenty may lose more than 3 %, and none more than 15 %"""
    ratios = []
    for router in range(12):
        experience, tenants, drawn = Experience(shared()), [], np.random.default_rng(router)
        experience.costs.opening.learn(2 * OFF_US)
        for number in range(24):
            prior, notes = pair_prior(tenants).begun() if tenants else Prior(), Prior()
            own = float(np.clip(drawn.normal(right, 0.12), 0, 1))
            policy = ConservativeUCB(SHORT_ARMS, experience, prior)
            slower, played = answer(policy, own, 100 * router + number, notes, tokens=64)
            opened = 2 * OFF_US * any(arm.drafted for arm in played)
            ratios.append(1 / (slower + opened / (64 * OFF_US)))
            tenants.append(notes)
    found = np.array(ratios)
    assert found.mean() > mean and (found < 0.97).mean() < 0.05 and found.min() > 0.85


def test_estimates_of_one_load_are_not_used_at_another():
    """Beside another text nothing is timed, so all arms seem to take no time. Alone again, plain steps are timed."""
    experience = Experience(shared())
    policy = ConservativeUCB([OFF_ARM, ARMS[1]], experience, Prior({ARMS[1]: EmittedLength(1.1, 8.0)}))
    with experience.concurrency.running(), experience.concurrency.running():
        policy.choose()
        policy.learn(OFF_ARM, DraftTree.root_only(1), Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=1))
    with experience.concurrency.running():
        experience.concurrency.learn(1, 1e9, True, False, True)  # one text is expected from now on
        experience.costs.step.learn(1, OFF_US, experience.concurrency.target)
        assert policy.choose() == OFF_ARM


def test_rounds_during_an_opening_teach_what_it_costs():
    experience, root = Experience(shared()), DraftTree.root_only(1)
    found = Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=1)
    with experience.concurrency.running():
        for us, disturbed in ((OFF_US, False), (OFF_US, False), (2 * OFF_US, True), (OFF_US, False)):
            experience.learn(OFF_ARM, root, found)
            experience.learn_time(OFF_ARM, root, found, us, disturbed)
    opening = experience.costs.opening
    assert (opening.us, opening.count) == (pytest.approx(OFF_US), 1)


def test_what_an_opening_costs_does_not_depend_on_whether_the_rounds_meanwhile_asked_for_a_tree():
    """The predicted round of a chain has its draft, two calls and four guesses more than one whose tree is missing."""
    learned = []
    for arm, tree, waited_us in (
        (OFF_ARM, DraftTree.root_only(1), 0),
        (ARMS[1], replace(DraftTree.root_only(1), missed=True), 0),
        (ARMS[1], replace(DraftTree.root_only(1), missed=True, draft_us=700), 700),
    ):
        experience, found = Experience(shared()), Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=1)
        with experience.concurrency.running():
            for _ in range(3):
                experience.learn(OFF_ARM, DraftTree.root_only(1), found)
                experience.learn_time(OFF_ARM, DraftTree.root_only(1), found, OFF_US + 100)
                drafted = replace(DraftTree.of(range(5), range(-1, 4)), draft_us=4 * LEVEL_US)
                experience.learn(ARMS[1], drafted, replace(found, verify_us=OFF_US + 4 * ROW_US, step_rows=5))
            experience.learn_time(arm, tree, found, 1.5 * OFF_US + waited_us, disturbed=True)
            experience.learn_time(OFF_ARM, DraftTree.root_only(1), found, OFF_US + 100)
        learned.append(experience.costs.opening.us)
    assert learned == [pytest.approx(OFF_US / 2 - 100)] * 3


def test_a_tree_that_is_put_off_by_a_round_is_chosen_again():
    """After several rounds of `off` the verifier has begun the next one, so a tree is drafted one round later."""
    proposed = Arm.parse("lookup:proposed(3)")
    policy, offer = ConservativeUCB([OFF_ARM, proposed], Experience(shared())), DraftTree.of(range(4), range(-1, 3))
    plain = Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=1)
    for _ in range(3 * HELD_ROUNDS):
        assert policy.choose(lambda least: DraftTree.root_only(1)).off
        policy.learn(OFF_ARM, DraftTree.root_only(1), plain)
    choices = []
    for _ in range(3):
        choices.append(policy.choose(lambda least: offer).off)
        policy.learn(OFF_ARM, DraftTree.root_only(1), plain)
    assert choices in ([False, False, False], [True, False, False]), "every second round is passed until one is wanted"


def test_a_text_that_stays_off_looks_at_proposals_every_second_round_then_every_fourth():
    """A look takes processor time from the verifier."""
    policy, looked = ConservativeUCB([OFF_ARM, Arm.parse("lookup:proposed(15)")], Experience(shared())), []
    nothing = DraftTree.root_only(1)
    for number in range(12 * HELD_ROUNDS):
        arm = policy.choose(lambda least, number=number: looked.append(number) or nothing)
        assert arm.off
        policy.learn(arm, nothing, Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=1))
    gaps = {number: later - number for number, later in pairwise(looked)}
    assert {gaps[number] for number in looked[1:-1] if number < HELD_ROUNDS} == {1}
    assert {gaps[number] for number in looked[:-1] if 2 * HELD_ROUNDS < number < 4 * HELD_ROUNDS - 2} == {2}
    assert {gaps[number] for number in looked[:-1] if number >= 4 * HELD_ROUNDS} == {4}


def test_a_text_that_stays_off_considers_drafted_arms_every_eighth_round():
    chain, experience, root = ARMS[1], Experience(shared()), DraftTree.root_only(1)
    for rows in (1, 5):
        experience.costs.step.learn(rows, OFF_US, experience.concurrency.target)
    for _ in range(3):
        experience.costs.learn_draft(chain, 4 * LEVEL_US)
    policy, chosen = ConservativeUCB([OFF_ARM, chain], experience, Prior({chain: EmittedLength(1.0, 8.0)})), []
    for number in range(3 * HELD_ROUNDS + 1):
        if number > 2 * HELD_ROUNDS:
            policy.lengths[chain] = EmittedLength(5.0, 16.0)
        chosen.append(policy.choose())
        policy.learn(OFF_ARM, root, Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=1))
    assert chosen == [*[OFF_ARM] * 3 * HELD_ROUNDS, chain]


@pytest.mark.parametrize("texts, waited_us", [(1, 900), (2, 0)])
def test_waiting_at_the_verifier_is_part_of_the_price_of_a_text_that_is_alone(texts, waited_us):
    """Others wait for steps with other texts, whatever they choose themselves."""
    experience = Experience(replace(shared(), requests=texts))
    tree, queue_us = replace(DraftTree.of(range(5), range(-1, 4)), draft_us=2_000), 900
    found = Verdict((1,), (0,), (), None, 1, OFF_US, step_rows=5, queue_us=queue_us)
    assert experience.share_us(tree, found, 2_000 + OFF_US + queue_us) == 2_000 + OFF_US + waited_us
