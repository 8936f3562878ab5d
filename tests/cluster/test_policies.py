import contextlib
import copy
import math
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from dendro.errors import BadRequest
from dendro.text import Verdict
from dendro.tree import RANKED, DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies import ConservativeUCB, Experience, PaperUCB, make_policy
from cluster.policies.costs import EmittedLength
from cluster.policies.experience import Concurrency
from cluster.policies.prior import Prior
from cluster.policies.step_time import StepTime, TargetSteps
from cluster.policies.trial import FIRST_REST, LONGEST_REST, SPECULATION_MARGIN, SpeculationTrial, pilot_share

OFF, CHAIN = OFF_ARM, Arm.parse("mamba:(1,1,1,1)")
BUSHY = Arm.parse("mamba:(3,2,2,1,1)")
PROPOSED = Arm.parse("lookup:proposed(47)")


def verdict(emitted: int, verify_us: int = 10_000, texts: int = 1, step_rows: int = 1) -> Verdict:
    path, ranks = tuple(range(emitted)), (0,) * (emitted - 1)
    return Verdict((1,) * emitted, path, ranks, None, emitted, verify_us, texts=texts, step_rows=step_rows)


def step_us(rows: int) -> int:
    """A step of 20 ms and 0.4 ms for each row."""
    return 20_000 + 400 * rows


def test_a_cold_step_is_not_learned():
    experience, warm = Experience(), Experience()
    for each in (experience, warm):
        each.learn(OFF, tree(1), verdict(1, 20_000))
        each.learn(OFF, tree(1), verdict(1, 20_000))
    experience.learn(OFF, tree(1), replace(verdict(1, 20_000_000), cold=True))
    found, expected = (each.costs.step.at(8, each.concurrency.target) for each in (experience, warm))
    assert found == expected > 0


def tree(rows: int, draft_us: int = 0, texts: int = 1) -> DraftTree:
    plain = DraftTree.of(range(rows), range(-1, rows - 1))
    return DraftTree(plain.tokens, plain.parents, plain.values, draft_us=draft_us, texts=texts)


def test_paper_ucb_follows_equations_1_and_2_on_a_hand_example():
    bandit = PaperUCB([CHAIN, BUSHY], lambda_gamma=0.1, lambda_ucb=0.2)
    assert bandit.choose() == CHAIN  # every arm once, in order
    bandit.learn(CHAIN, tree(5), verdict(2))  # r = -(1 + 0.4) / 2 = -0.7
    assert bandit.choose() == BUSHY
    bandit.learn(BUSHY, tree(46), verdict(3))  # r = -(1 + 0.5) / 3 = -0.5
    assert bandit.index(CHAIN) == pytest.approx(-0.7 + 0.2 * math.sqrt(2 * math.log(2)))
    assert bandit.index(BUSHY) == pytest.approx(-0.5 + 0.2 * math.sqrt(2 * math.log(2)))
    assert bandit.choose() == BUSHY
    bandit.learn(BUSHY, tree(46), verdict(1))  # r = -1.5; the mean is -1.0
    assert bandit.index(BUSHY) == pytest.approx(-1.0 + 0.2 * math.sqrt(2 * math.log(3) / 2))
    assert bandit.choose() == CHAIN


def test_the_papers_reward_is_minus_one_over_the_speedup_of_equations_3_to_6():
    """A target forward of 20 ms and a drafter level of 2 ms: by hand, at depth 4 and 3 tokens."""
    experience = Experience()
    for _ in range(3):
        experience.learn(OFF, tree(1), verdict(1, 20_000))
        experience.learn(CHAIN, tree(5, 8_000), verdict(3, 20_000))
    assert experience.draft_ratio == pytest.approx(0.1)
    total_ms = 20 + 4 * 2  # (3), the target's forward as long as a plain one
    speedup = 3 * 20 / total_ms  # (4)
    assert 1 / speedup == pytest.approx((1 / 3) * (20 / 20) + (4 / 3) * (2 / 20))  # (5)
    bandit = PaperUCB([CHAIN], experience.draft_ratio)
    bandit.learn(CHAIN, tree(5), verdict(3))
    assert bandit.rewards[CHAIN] == pytest.approx(-1 / speedup) == pytest.approx(-7 / 15)  # (6) and (2)


def test_ties_go_to_the_smaller_tree():
    bandit = PaperUCB([BUSHY, CHAIN], lambda_gamma=0.0)
    for arm in (BUSHY, CHAIN):
        bandit.learn(arm, tree(arm.rows), verdict(2))
    assert bandit.choose() == CHAIN


def play(policy: PaperUCB | ConservativeUCB, emit: dict[Arm, list[int]], rounds: int) -> dict[Arm, int]:
    rng, pulls = random.Random(0), dict.fromkeys(emit, 0)
    for _ in range(rounds):
        arm = policy.choose()
        pulls[arm] += 1
        policy.learn(arm, tree(arm.rows), verdict(rng.choice(emit[arm])))
    return pulls


def test_the_ratio_prefers_1_or_7_over_always_3_where_the_mean_of_1_over_n_does_not():
    steady, swinging = Arm.parse("mamba:(2,1,1,1,1,1)"), Arm.parse("mamba:(1,1,1,1,1,1)")
    lengths: dict[Arm, list[int]] = {OFF: [1], steady: [3], swinging: [1, 7]}
    ratio = play(ConservativeUCB([OFF, steady, swinging], Experience()), lengths, 400)
    paper = play(PaperUCB([steady, swinging], lambda_gamma=0.0), lengths, 400)
    assert ratio[swinging] > 350
    assert paper[steady] > 350


def test_guesses_that_are_never_right_cost_at_most_two_percent_of_an_answer():
    experience = Experience()
    pulls: dict[Arm, int] = {OFF: 0, CHAIN: 0, BUSHY: 0}
    spent: dict[Arm, int] = {OFF: 10_500, CHAIN: 14_000, BUSHY: 26_000}
    policy = ConservativeUCB(list(pulls), experience)
    for _ in range(1000):
        arm = policy.choose()
        pulls[arm] += 1
        took = spent[arm] - 3_000 * (not arm.off)
        policy.learn(arm, tree(arm.rows, 3_000 * (not arm.off)), verdict(1, took, step_rows=arm.rows))
    wasted = sum(pulls[arm] * (spent[arm] - spent[OFF]) for arm in pulls)
    assert wasted <= 0.02 * pulls[OFF] * spent[OFF]


@pytest.mark.parametrize("texts, best", [(1, CHAIN), (16, OFF)])
def test_a_text_does_not_speculate_where_that_slows_the_texts_that_share_its_steps(texts, best):
    """A draft of 10 ms, for a quarter of the texts; two tokens a round instead of one. All texts do the same."""
    policy, pulls = ConservativeUCB([OFF, CHAIN], Experience()), Counter()
    for _ in range(100):
        arm = policy.choose()
        pulls[arm] += 1
        guesses, rows = tree(arm.rows, 0 if arm.off else 10_000, max(texts // 4, 1)), texts * arm.rows
        policy.learn(arm, guesses, verdict(1 if arm.off else 2, step_us(rows), texts, rows))
    assert pulls[best] > 90


def test_guesses_of_other_texts_do_not_raise_the_predicted_cost_of_off():
    """Fifteen texts speculate and one does not; `off` is the better choice for all of them."""
    experience = Experience()
    for _ in range(200):
        experience.learn(CHAIN, tree(5, 10_000, 4), verdict(2, step_us(76), 16, 76))
        experience.learn(OFF, tree(1), verdict(1, step_us(76), 16, 76))
        experience.learn(OFF, tree(1), verdict(1, step_us(40), 16, 40))
    assert experience.prices().predicted_us(OFF) == pytest.approx(step_us(16) / 16, rel=0.1)
    assert 2 / experience.prices().predicted_us(CHAIN) < 1 / experience.prices().predicted_us(OFF)


def test_the_fit_of_steps_follows_a_change_of_speed():
    line, target = StepTime(), TargetSteps()
    for _ in range(300):
        for rows in (8, 16, 64):
            line.learn(rows, step_us(rows), target)
    assert line.at(128, target) == pytest.approx(step_us(128), rel=0.01)
    for _ in range(2000):
        for rows in (8, 16, 64):
            line.learn(rows, 2 * step_us(rows), target)
    assert line.at(128, target) == pytest.approx(2 * step_us(128), rel=0.02)


def test_an_arm_given_up_at_high_concurrency_is_tried_again_by_a_text_that_runs_alone():
    """Among 16 requests no guess is right; alone, all are."""
    experience, pulls = Experience(), {1: Counter(), 16: Counter()}
    with contextlib.ExitStack() as running:
        for _ in range(16):
            running.enter_context(experience.concurrency.running())
        for requests in (16, 1):
            if requests == 1:
                running.close()
            with experience.concurrency.running():
                policy = ConservativeUCB([OFF, BUSHY], experience)
                for _ in range(200 if requests > 1 else 400):  # the expected concurrency decays over half a second
                    arm = policy.choose()
                    pulls[requests][arm] += 1
                    right = requests == 1 and not arm.off
                    guesses, found = tree(arm.rows, 0 if arm.off else 10_000), verdict(5 if right else 1)
                    policy.learn(arm, guesses, found)
                    for _ in range(requests):
                        experience.learn_time(arm, guesses, found, 10_000 + guesses.draft_us)
    assert pulls[16][OFF] > 120
    assert pulls[1][BUSHY] > 250
    assert experience.concurrency.requests == 0


def test_one_slow_round_does_not_condemn_an_arm():
    experience = Experience()
    for us in [10_000] * 50 + [1_000_000]:
        experience.learn(CHAIN, tree(5, 2_000), verdict(3, us))
    assert experience.prices().predicted_us(CHAIN) < 1.3 * 13_000


@pytest.mark.parametrize("name, arms, field", [("greedy", [OFF], "policy"), ("conservative_ucb", [], "arms")])
def test_an_unknown_policy_or_no_arms_is_refused_by_name(name, arms, field):
    with pytest.raises(BadRequest, match=field):
        make_policy(name, arms, Experience())


class ConcurrentRequests:
    """Sixteen concurrent requests of one router, with given round times."""

    def __init__(self, experience: Experience, off_us: float, tree_us: float, fixed: bool = False) -> None:
        self.experience = experience
        self.us = {True: off_us, False: tree_us}  # of a round of all, by whether all chose off
        self.fixed = fixed
        self.tokens = 0
        self.spent_us = 0.0
        self.chosen: list[Arm] = []

    def round_us(self, shapes: list[Arm]) -> float:
        """A round of all takes as long as the slowest."""
        return max(self.us[shape.off] for shape in shapes)

    def answer(self, rounds: int, texts: int = 16) -> None:
        """Run them concurrently."""
        with contextlib.ExitStack() as running:
            for _ in range(texts):
                running.enter_context(self.experience.concurrency.running(self.fixed))
            policies = [ConservativeUCB([OFF, CHAIN, BUSHY], self.experience) for _ in range(texts)]
            for _ in range(rounds):
                shapes = [policy.choose() for policy in policies]
                took_us = self.round_us(shapes)
                for policy, shape in zip(policies, shapes, strict=True):
                    guesses = tree(shape.rows, 0 if shape.off else 1_000, texts)
                    found = verdict(1 if shape.off else 2, 20_000, texts, texts * shape.rows)
                    policy.learn(shape, guesses, found)
                    self.experience.learn_time(shape, guesses, found, took_us)
                    self.tokens += found.length
                self.chosen += shapes
                self.spent_us += took_us


def test_an_experienced_router_loses_two_percent_at_most_against_off():
    """Drafts and steps look cheap, yet two tokens take more than twice the time, which no predicted cost shows."""
    experience = Experience()
    ConcurrentRequests(experience, off_us=30_000, tree_us=70_000).answer(100)
    requests = ConcurrentRequests(experience, off_us=30_000, tree_us=70_000)
    for _ in range(20):
        requests.answer(64)
    assert requests.tokens / requests.spent_us > 0.98 * 16 / 30_000


def test_concurrent_requests_keep_speculating_where_that_emits_more():
    experience = Experience()
    requests = ConcurrentRequests(experience, off_us=30_000, tree_us=40_000)
    for _ in range(20):
        requests.answer(64)
    assert requests.tokens / requests.spent_us > 0.97 * 32 / 40_000


def test_new_requests_explore_nothing_while_speculation_does_not_pay():
    experience = Experience()
    ConcurrentRequests(experience, off_us=30_000, tree_us=70_000).answer(100)
    later = ConcurrentRequests(experience, off_us=30_000, tree_us=70_000)
    later.answer(64)
    assert set(later.chosen) == {OFF}


@pytest.mark.parametrize("name", ["conservative_ucb"])
def test_while_a_trial_rests_a_round_makes_no_offer_and_is_learned_by_the_trial_alone(name):
    experience = Experience()
    ConcurrentRequests(experience, off_us=30_000, tree_us=70_000).answer(100)
    with contextlib.ExitStack() as running:
        for _ in range(16):
            running.enter_context(experience.concurrency.running())
        trial = experience.concurrency.trial
        assert trial is not None and trial.resting
        policy = make_policy(name, [CHAIN, PROPOSED], experience)
        before, rounds = copy.deepcopy(experience.costs), trial.rounds
        for _ in range(3):
            assert policy.choose(lambda least: pytest.fail("an offer was made")) == OFF
            policy.learn(OFF, tree(1), verdict(1, 20_000, 16, 16))
        assert experience.costs == before
        experience.learn_time(OFF, tree(1), verdict(1, 20_000, 16, 16), 30_000)
        assert trial.rounds == rounds + 1 / 16


def test_a_text_that_runs_alone_decides_regardless_of_trials_under_load():
    experience = Experience()
    ConcurrentRequests(experience, off_us=30_000, tree_us=70_000).answer(100)
    alone = ConcurrentRequests(experience, off_us=30_000, tree_us=40_000)
    alone.answer(64, texts=1)
    assert Counter(shape.off for shape in alone.chosen)[False] > 50


def test_the_first_of_many_requests_to_return_is_not_treated_as_alone_but_one_that_stays_alone_is():
    experience = Experience()
    ConcurrentRequests(experience, off_us=30_000, tree_us=70_000).answer(100)
    with experience.concurrency.running() as request:
        assert experience.concurrency.trial is not None and not request.speculates
        for _ in range(60):  # of 30 ms
            experience.learn_time(OFF, tree(1), verdict(1), 30_000)
        assert experience.concurrency.trial is None and request.speculates
        with experience.concurrency.running(fixed=True) as other:
            assert other.speculates, "its client fixed the shape"


def test_speculation_is_resumed_by_the_next_trial_after_it_has_become_faster():
    experience = Experience()
    ConcurrentRequests(experience, off_us=30_000, tree_us=70_000).answer(100)
    changed = ConcurrentRequests(experience, off_us=30_000, tree_us=40_000)
    changed.answer(int(FIRST_REST) + 100)
    assert not any(shape.off for shape in changed.chosen[-16:])


def test_the_time_to_the_next_trial_doubles_up_to_a_limit():
    trial, rests, rested = SpeculationTrial(), [], 0
    for _ in range(40_000):
        trial.learn(2 if trial.speculating else 1, 70_000 if trial.speculating else 30_000, 1)
        rested += not trial.turns_left
        if trial.turns_left and rested:
            rests.append(rested)
            rested = 0
    assert rests[:4] == pytest.approx([FIRST_REST * 2**k for k in range(4)], abs=5)
    assert rests[-1] == pytest.approx(LONGEST_REST, abs=5) and len(rests) > 5


@pytest.mark.parametrize("change", range(16, 101, 4))
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)], ids=["slower", "faster"])
def test_a_change_of_the_machines_speed_during_a_trial_does_not_decide_it(before, after, change):
    """By a factor of two from some round on: more than the difference that speculation makes."""
    trial = SpeculationTrial()
    for number in range(110):
        pace = before if number < change else after
        trial.learn(2 if trial.speculating else 1, pace * (50_000 if trial.speculating else 30_000), 1)
    assert trial.settled


@pytest.mark.parametrize("judged", [True, False])
def test_prefills_that_slow_only_rounds_with_speculation_do_not_decide_a_trial(judged):
    """Nine in ten rounds with speculation are beside another text's prefill, and slow."""
    trial = SpeculationTrial()
    for number in range(400):
        slow = trial.speculating and number % 10 > 0
        took_us = 400_000 if slow else 40_000 if trial.speculating else 30_000
        trial.learn(2 if trial.speculating else 1, took_us, 1, disturbed=slow and not judged)
    assert trial.settled is not judged


def test_frequent_waits_for_late_drafts_count_in_full():
    """One round in three waits. By the median of its rounds, speculation would emit a third more tokens a second."""
    trial = SpeculationTrial()
    for number in range(110):
        took_us = 30_000 if not trial.speculating else 130_000 if number % 3 == 0 else 44_000
        trial.learn(2 if trial.speculating else 1, took_us, 1)
    assert trial.settled is False


def test_speculation_does_not_pay_where_drafters_are_being_opened_all_the_time():
    trial = SpeculationTrial()
    while trial.settled is None:
        trial.learn(2 if trial.speculating else 1, 30_000, 16, disturbed=trial.speculating)
    assert trial.settled is False


def test_a_trial_of_16_texts_takes_at_most_two_thirds_of_the_rounds_of_one_of_2():
    def rounds_until_settled(texts: int) -> int:
        trial, rounds = SpeculationTrial(), 0
        while trial.settled is None:
            rounds += 1
            for _ in range(texts):
                trial.learn(2 if trial.speculating else 1, 50_000 if trial.speculating else 30_000, texts)
        return rounds

    assert rounds_until_settled(16) <= 2 / 3 * rounds_until_settled(2)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_trial_whose_rounds_are_all_beside_prefills_is_judged_by_them(tokens):
    trial, rounds = SpeculationTrial(), 0
    while trial.settled is None and rounds < 300:
        rounds += 1
        trial.learn(tokens if trial.speculating else 1, 30_000, 1, disturbed=True)
    assert trial.settled is (tokens > 1)


def test_prefills_that_slow_all_texts_as_a_pilot_begins_do_not_fail_it():
    """A router's first texts open one after the other, so its steps become longer with every text that is open."""
    trial = SpeculationTrial(pilots=0.25)
    while trial.pilot is not None:
        us = 30_000 if trial.rounds < 0 else 90_000
        for place in range(8):
            guesses = trial.includes(place / 8)
            trial.learn(2 if guesses else 1, us, 8, disturbed=True, guessed=guesses)
    assert trial.turns_left and trial.settled is None


def pilots_that_succeed(mean: float, texts: int = 32, pilots: int = 200) -> float:
    """Their share, where a text that guesses emits 1 to 5 tokens a round, `mean` in all, in the time of any other."""
    generator, succeeded = random.Random(7), 0
    for _ in range(pilots):
        trial = SpeculationTrial(pilots=pilot_share(texts))
        while trial.pilot is not None:
            for place in range(texts):
                guesses = trial.includes(place / texts)
                tokens = 1 + guesses * sum(generator.random() < (mean - 1) / 4 for _ in range(4))
                trial.learn(tokens, 30_000, texts, guessed=guesses)
        succeeded += trial.settled is None
    return succeeded / pilots


@pytest.mark.parametrize("texts", [4, 8, 32])
def test_a_pilot_rarely_succeeds_by_chance_and_does_where_guesses_gain_much(texts):
    assert pilots_that_succeed(1.05, texts) <= 0.05
    assert pilots_that_succeed(SPECULATION_MARGIN, texts) <= 0.2
    assert pilots_that_succeed(1.5, texts) >= 0.9
    assert pilots_that_succeed(2.0, texts) >= 0.98


class SharedSteps(ConcurrentRequests):
    """A round of all takes the longer, the more of them guess: as given, where none or all do."""

    def __init__(self, experience: Experience, off_us: float, tree_us: float) -> None:
        super().__init__(experience, off_us, tree_us)
        self.guessing: list[int] = []  # texts, of each round

    def round_us(self, shapes: list[Arm]) -> float:
        self.guessing.append(sum(not shape.off for shape in shapes))
        return self.us[True] + (self.us[False] - self.us[True]) * self.guessing[-1] / len(shapes)


@pytest.mark.parametrize("texts", [4, 8, 16, 32])
def test_a_fresh_router_loses_two_percent_at_most_of_its_first_minute(texts):
    """Two tokens a round that takes more than twice as long, which no predicted cost shows; 2000 rounds of 30 ms."""
    requests = SharedSteps(Experience(), off_us=30_000, tree_us=70_000)
    requests.answer(2000, texts)
    assert requests.tokens / requests.spent_us > 0.98 * texts / 30_000
    assert any(requests.guessing)


@pytest.mark.parametrize("texts", [4, 8, 16, 32])
def test_a_fresh_router_speculates_soon_where_that_emits_more(texts):
    requests = SharedSteps(Experience(), off_us=30_000, tree_us=40_000)
    requests.answer(2000, texts)
    assert requests.tokens / requests.spent_us > 0.96 * 2 * texts / 40_000


def test_a_fresh_routers_first_guesses_are_those_of_an_eighth_of_32_texts():
    requests = SharedSteps(Experience(), off_us=30_000, tree_us=70_000)
    requests.answer(16, texts=32)
    assert requests.guessing[:4] == [0] * 4, "for comparison"
    assert set(requests.guessing[4:]) <= {3, 4, 5}


@pytest.mark.parametrize("share, texts", [(1 / 2, 4), (1 / 4, 8), (1 / 8, 16), (1 / 8, 32)])
def test_places_of_requests_in_a_row_are_spread_over_any_share(share, texts):
    concurrency = Concurrency()
    places = [concurrency.next_place() for _ in range(500)]
    for start in range(500 - texts):
        chosen = sum(place < share for place in places[start : start + texts])
        assert 1 <= chosen <= share * texts + 1.5


@pytest.mark.parametrize(
    ("known", "gain", "load", "speculates"),
    [
        (3, 0.7, 5, False),  # fewer texts lose by it
        (3, 0.7, 2, None),
        (4, 1.6, 2, True),  # more texts gain by it
        (4, 1.6, 5, None),
    ],
)
def test_a_new_loads_trial_begins_with_the_outcome_of_another_that_implies_its_own(known, gain, load, speculates):
    concurrency = Concurrency()
    concurrency.trials[known] = SpeculationTrial.begun(1.0, gain)
    trial = concurrency.trial_at(load)
    assert trial.settled is speculates
    assert (trial.pilot is None) is (speculates is not None)
    assert trial.resting is (speculates is False)


def test_a_prior_begins_trials_without_an_outcome_and_their_own_measurement_replaces_its_gain():
    experience = Experience()
    ConcurrentRequests(experience, off_us=30_000, tree_us=70_000).answer(100)
    gains = experience.concurrency.gains()
    assert gains[4] < 0.9
    other = Experience()
    other.concurrency.begin_trials(gains)
    changed = ConcurrentRequests(other, off_us=30_000, tree_us=40_000)
    changed.answer(100)
    assert set(changed.chosen) == {OFF}
    changed.answer(int(FIRST_REST))
    trial = other.concurrency.trials[4]
    assert trial.speculating and trial.gain == pytest.approx(2 * 30 / 40)
    other.concurrency.begin_trials(gains)
    assert other.concurrency.trials[4] is trial


def test_a_text_that_first_guesses_late_begins_with_what_others_learned_meanwhile():
    experience, prior = Experience(), Prior()
    late = ConservativeUCB([OFF, CHAIN], experience, prior)
    with experience.concurrency.running(), experience.concurrency.running():
        for _ in range(20):
            prior.learn(CHAIN, tree(5, 2_000), verdict(4), chosen=True)
        late.choose()
    assert (late.lengths[CHAIN].mean, late.lengths[CHAIN].rounds) == (4, 8)


def test_a_request_counts_as_opening_until_its_text_is_open_or_it_ends():
    experience = Experience()
    with experience.concurrency.running() as first:
        first.begun()
        first.begun()
        with experience.concurrency.running():
            assert experience.concurrency.opening == 1
        assert experience.concurrency.opening == 0
        with first.opening():
            assert experience.concurrency.opening == 1, "a drafter's prefill slows all requests"
        assert experience.concurrency.opening == 0


def test_rounds_beside_client_fixed_shapes_do_not_advance_a_trial():
    experience = Experience()
    ConcurrentRequests(experience, off_us=30_000, tree_us=70_000, fixed=True).answer(100)
    with contextlib.ExitStack() as running:
        for _ in range(16):
            running.enter_context(experience.concurrency.running())
        assert experience.concurrency.trial is not None and experience.concurrency.trial.gain is None
        running.enter_context(experience.concurrency.running(fixed=True))
        assert experience.concurrency.trial is None, (
            "no gain is known, and none can be measured: each text decides separately"
        )


@pytest.mark.parametrize("gain, follows", [(0.4, False), (1.4, True)])
def test_beside_client_fixed_shapes_texts_follow_a_trials_last_outcome_and_not_its_turn(gain, follows):
    concurrency = Concurrency()
    with contextlib.ExitStack() as running:
        request = [running.enter_context(concurrency.running()) for _ in range(3)][0]
        trial = SpeculationTrial.begun(1.0, gain)
        concurrency.trials[concurrency.load] = trial
        while not trial.turns_left or trial.speculating is follows:  # until a turn that contradicts the outcome
            trial.learn(1, 10_000, texts=1)
        assert request.speculates is not follows
        policy = ConservativeUCB([OFF, CHAIN], Experience(concurrency))
        with concurrency.running(fixed=True):
            assert request.speculates is follows and request.rests is not follows
            assert follows or policy.choose() == OFF
        assert request.speculates is not follows, "the turn goes on"


def test_rounds_of_requests_without_speculation_do_not_advance_a_trial():
    """They would make turns with and without speculation seem alike."""
    experience = Experience()
    with contextlib.ExitStack() as running:
        for _ in range(2):
            running.enter_context(experience.concurrency.running())
        trial = experience.concurrency.trial
        assert trial is not None
        for judged in (False, True):
            before = trial.rounds
            experience.learn_time(OFF, tree(1), verdict(1), 10_000, judged=judged)
            assert trial.rounds == before + (0.5 if judged else 0)
        for _ in range(14):
            running.enter_context(experience.concurrency.running(off=True))
        beside = experience.concurrency.trial_at(experience.concurrency.load)
        before = beside.rounds
        experience.learn_time(OFF, tree(1), verdict(1), 10_000)
        assert beside.rounds == before + 0.5, "a trial takes no longer beside them"
        assert experience.concurrency.may_guess(beside, 0.99), "two texts that may guess need no pilot"


def test_a_pilot_fails_by_the_mean_prediction_and_its_size_does_not_grow_with_their_number():
    trial = SpeculationTrial(pilots=0.5)
    assert trial.pilot is not None
    trial.rounds = 0.0
    trial.predict(0.5)
    size = len(pickle.dumps(trial))
    for _ in range(999):
        trial.predict(1.5)
    assert trial.pilot.gain() == pytest.approx((0.5 + 999 * 1.5) / 1000)
    assert len(pickle.dumps(trial)) < 2 * size


def test_a_text_whose_rounds_emit_too_little_does_not_speculate_with_the_others():
    trial = SpeculationTrial(gain=1.25, usual_tokens=2.5, turns_left=0)
    assert trial.repays(2.0) and not trial.repays(1.9)


@pytest.mark.parametrize("proposed", [1, 4], ids=["plain", "with proposals"])
def test_rounds_before_the_drafter_is_open_count_for_no_arm_unless_it_never_opens(proposed):
    policy = ConservativeUCB([OFF, CHAIN], Experience())
    early = replace(tree(proposed), missed=True)
    policy.learn(CHAIN, early, verdict(1))
    assert policy.lengths[CHAIN].rounds == 0
    for _ in range(10):
        policy.learn(CHAIN, early, verdict(1))
    assert policy.lengths[CHAIN].rounds > 0


@pytest.mark.parametrize("first", [0, 1, 3], ids="{} rounds before".format)
def test_drafts_that_no_round_waited_for_are_ignored_in_the_cost_of_drafts(first):
    """A draft that was not begun has no time: it must not make its shape look cheap."""
    experience, missed = Experience(), replace(tree(1), missed=True)
    for _ in range(first):
        experience.learn(CHAIN, missed, verdict(1))
    for _ in range(2):
        experience.learn(CHAIN, tree(5, 9_000), verdict(3))
        experience.learn(CHAIN, missed, verdict(1))
    assert experience.costs.draft[CHAIN].us == 9_000
    for _ in range(2):
        experience.learn(BUSHY, missed, verdict(1))
    assert experience.costs.draft_us(BUSHY) == 0, "a known cost, so that the arm is not tried forever"
    assert experience.costs.draft_us(Arm.parse("mamba:(2,1,1,1)")) == pytest.approx(9_000), (
        "predicted from drafts that came"
    )
    assert experience.draft_ratio > 0.1


def test_late_drafts_cost_the_time_that_rounds_waited_for_them():
    experience = Experience()
    late = replace(tree(1), missed=True, draft_us=20_000)
    for _ in range(2):
        experience.learn(CHAIN, tree(5, 9_000), verdict(3))
    for _ in range(60):
        experience.learn(CHAIN, late, verdict(1))
    assert experience.costs.draft[CHAIN].us == pytest.approx(20_000, rel=0.01)


def test_a_round_without_proposals_counts_for_its_arm_and_not_for_the_drafters():
    policy = ConservativeUCB([OFF, CHAIN, PROPOSED], Experience())
    policy.learn(PROPOSED, tree(1), verdict(1))
    assert policy.lengths[PROPOSED].rounds == 1
    policy.learn(CHAIN, replace(tree(1), missed=True), verdict(1))
    assert policy.lengths[CHAIN].rounds == 0, "the drafter may still be opening"


def test_proposals_cost_their_rows_and_one_call_and_a_drafters_tree_two_calls():
    """PROPOSED may have 48 rows, of which 10 are used."""
    experience = Experience()
    for arm, rows, hops in ((OFF, 1, 1), (PROPOSED, 10, 1), (CHAIN, 5, 2)) * 20:
        guesses = replace(tree(rows), draft_us=0)
        experience.learn(arm, guesses, verdict(1, step_us(rows), step_rows=rows))
        experience.learn_time(arm, guesses, verdict(1, step_us(rows)), step_us(rows) + hops * 30_000)
    assert experience.prices().predicted_us(OFF) == pytest.approx(step_us(1) + 30_000, rel=0.05)
    assert experience.prices().predicted_us(PROPOSED) == pytest.approx(step_us(10) + 30_000, rel=0.05)
    assert experience.prices().predicted_us(CHAIN) == pytest.approx(step_us(5) + 60_000, rel=0.05)
    assert PROPOSED not in experience.costs.draft


def offered(*chances: float):
    """An offer of a chain of guesses, each reached with the given chance."""
    values = np.log(np.array([1.0, *chances], np.float32))
    rows = len(values)
    return lambda least: DraftTree(np.arange(rows), np.arange(rows) - 1, values)


def known(policy_name: str, arms) -> tuple:
    """A policy on an experience in which every arm was played."""
    experience = Experience()
    for arm, emitted in ((OFF, 1), (CHAIN, 3), (PROPOSED, 4)) * 20:
        experience.learn(arm, tree(arm.rows), verdict(emitted, step_us(arm.rows), step_rows=arm.rows))
    return make_policy(policy_name, arms, experience), experience


@pytest.mark.parametrize("name", ["conservative_ucb"])
def test_proposals_are_chosen_by_their_chances_in_this_round(name):
    """So far they emitted 4 tokens a round, and the drafter's chain 3."""
    for _ in range(5):
        policy, _ = known(name, [OFF, CHAIN, PROPOSED])
        assert policy.choose(offered(*[0.99] * 12)) == PROPOSED
        assert policy.choose(offered(0.1, 0.01)) != PROPOSED
        assert policy.choose(offered()) != PROPOSED, "nothing is proposed"


def test_no_offer_is_requested_while_speculation_does_not_pay():
    policy, experience = known("conservative_ucb", [OFF, CHAIN, PROPOSED])
    offers = []
    with contextlib.ExitStack() as running:
        for _ in range(8):
            running.enter_context(experience.concurrency.running())
        experience.concurrency.trial.speculating = False
        assert policy.choose(lambda least: offers.append(1)) == OFF
    assert not offers


def test_the_papers_cost_of_proposals_has_no_draft_time():
    policy = PaperUCB([CHAIN, PROPOSED], lambda_gamma=0.5)
    policy.learn(CHAIN, tree(5), verdict(2))
    policy.learn(PROPOSED, tree(5), verdict(2))
    assert policy.rewards == {CHAIN: -(1 + 0.5 * CHAIN.depth) / 2, PROPOSED: -1 / 2}


def test_a_text_that_chose_off_several_times_is_expected_to_choose_it_again_but_for_a_probe():
    policy = ConservativeUCB([OFF, CHAIN], Experience())
    expected = []
    for _ in range(400):
        arm = policy.choose()
        expected.append((arm.off, policy.next_arm == OFF))
        grown = replace(tree(arm.rows, draft_us=40_000 * arm.drafted), trace=np.full(1, RANKED, np.int32))
        policy.learn(arm, grown, verdict(1))
    assert any(off and stays for off, stays in expected)
    for (_, stays), (off, _) in pairwise(expected):
        assert not stays or off, "a tree never follows a round that was expected to be followed by none"


def test_a_text_that_a_trial_keeps_from_guessing_is_expected_to_stay_off_at_once():
    experience = Experience()
    with experience.concurrency.running(), experience.concurrency.running():
        trial = experience.concurrency.trial
        assert trial is not None
        policy = ConservativeUCB([OFF, CHAIN], experience)
        trial.speculating = False
        assert policy.choose().off and policy.next_arm == OFF
        trial.speculating = True
        policy.choose()
        assert policy.next_arm != OFF


def test_the_way_of_a_round_without_a_tree_says_nothing_of_that_of_one_with_a_tree():
    experience = Experience()
    for arm, rows, hop_us in ((OFF, 1, 300), (PROPOSED, 8, 2_000)) * 20:
        experience.learn(arm, tree(rows), found := verdict(1, 10_000))
        experience.learn_time(arm, tree(rows), found, 10_000 + hop_us)
    assert experience.prices().predicted_us(OFF) == pytest.approx(10_300, rel=0.01)
    assert experience.prices().predicted_us(PROPOSED, 8) == pytest.approx(12_000, rel=0.01)


@pytest.mark.parametrize("nexts", [0, 6])
def test_a_drafters_first_trees_after_plain_rounds_do_not_make_its_later_ones_seem_slower(nexts):
    """A first tree's calls take 2 * 2 ms longer, since the drafter reads what it missed. An arm judged by first trees
    alone would never be played in two rounds one after the other."""
    experience, drafted = Experience(), tree(4, draft_us=2_000)
    for _ in range(6):
        before = ""
        for arm, sent, hop_us in ((OFF, tree(1), 300), (CHAIN, drafted, 2_300), *((CHAIN, drafted, 300),) * nexts):
            found = verdict(1, 10_000)
            experience.learn(arm, sent, found)
            took_us = 10_000 + sent.draft_us + (2 if arm.drafted else 1) * hop_us
            experience.learn_time(arm, sent, found, took_us, last_maker=before)
            before = arm.maker
    prices = experience.prices()
    assert prices.predicted_us(CHAIN) == pytest.approx(12_600, rel=0.01)
    assert prices.switching_us(CHAIN, last_maker="") == pytest.approx(4_000, rel=0.01)
    assert prices.spent_us(CHAIN, drafted, last_maker="") == pytest.approx(16_600, rel=0.01)


def test_rounds_whose_tree_is_missing_tell_nothing_of_the_calls_of_trees():
    """A round that waited for no draft has one call. While a drafter opens the text, several such rounds come first."""
    experience, drafted, before = Experience(), tree(4, draft_us=2_000), ""
    missing = replace(tree(1), missed=True)
    for sent, hop_us in ((missing, 150), (missing, 150), (drafted, 2_300), *((drafted, 300),) * 6):
        experience.learn(CHAIN, sent, verdict(1, 10_000))
        took_us = 10_000 + sent.draft_us + 2 * hop_us
        experience.learn_time(CHAIN, sent, verdict(1, 10_000), took_us, last_maker=before)
        before = "" if sent.missed else CHAIN.maker
    assert experience.costs.hop_us("next") == pytest.approx(300)
    assert experience.costs.hop_us("first") == pytest.approx(2_300)


def test_a_round_whose_tree_is_missing_is_charged_the_wait_for_it_and_the_verifiers_call_alone():
    """Else a text whose drafter opens it slowly would lose the calls of a first tree in each round without one."""
    experience, drafted = Experience(), tree(4, draft_us=2_000)
    for _ in range(6):
        for arm, sent, hop_us in ((OFF, tree(1), 300), (CHAIN, drafted, 2_300)):
            experience.learn(arm, sent, verdict(1, 10_000))
            took_us = 10_000 + sent.draft_us + (2 if arm.drafted else 1) * hop_us
            experience.learn_time(arm, sent, verdict(1, 10_000), took_us)
    for waited_us in (0, 1_500):
        missing = replace(tree(1, waited_us), missed=True)
        assert experience.prices().spent_us(CHAIN, missing, "") == pytest.approx(10_300 + waited_us, rel=0.01)


def test_a_text_plays_no_tree_whose_first_round_costs_more_than_its_budget():
    played = []
    for hop_us in (300, 40_300):
        experience, drafted = Experience(), tree(4, draft_us=2_000)
        for _ in range(6):
            for arm, sent, us in ((OFF, tree(1), 300), (CHAIN, drafted, hop_us)):
                experience.learn(arm, sent, verdict(1, 10_000))
                took_us = 10_000 + sent.draft_us + (2 if arm.drafted else 1) * us
                experience.learn_time(arm, sent, verdict(1, 10_000), took_us)
        policy = ConservativeUCB([OFF, CHAIN], experience, Prior({CHAIN: EmittedLength(2.0, 8.0)}))
        played.append(policy.choose())
    assert played == [CHAIN, OFF]


def test_ordered_rounds_whose_verdict_came_before_their_call_do_not_make_off_cheaper():
    experience, plain = Experience(), DraftTree.root_only(1)
    with experience.concurrency.running():
        for _ in range(5):
            experience.learn(OFF, plain, replace(verdict(1), verify_us=10_000))
            experience.learn_time(OFF, plain, replace(verdict(1), verify_us=10_000), 10_200)
        before = experience.prices().predicted_us(OFF)
        for _ in range(5):
            claimed = replace(verdict(4), verify_us=100, ahead_us=10_400)
            experience.learn(CHAIN, tree(4, draft_us=1000), claimed)
            experience.learn_time(CHAIN, tree(4, draft_us=1000), claimed, 300)
        after = experience.prices().predicted_us(OFF)
    assert before is not None and after is not None and after > 0.5 * before


def test_rounds_begun_ahead_teach_the_whole_step_and_make_off_cheaper_by_what_they_do_not_wait_for():
    experience = Experience()
    for _ in range(6):
        found = replace(verdict(1, verify_us=6_000), ahead_us=4_000)
        experience.learn(OFF, tree(1), found)
        experience.learn_time(OFF, tree(1), found, 9_000)
    target = experience.concurrency.target
    assert experience.costs.step.at(target.padded(1), target) == pytest.approx(10_000)
    assert experience.prices().predicted_us(OFF) == pytest.approx(9_000)


def test_an_arm_from_another_process_equals_the_same_arm_of_this_one():
    code = "import pickle, sys; from cluster.arms import Arm; print(pickle.dumps(Arm.parse(sys.argv[1])).hex())"
    sent = subprocess.run(
        [sys.executable, "-c", code, "mamba:(2,1)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert pickle.loads(bytes.fromhex(sent.stdout)) in {Arm.parse("mamba:(2,1)")}
