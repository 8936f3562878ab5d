"""The fit of step times: a line for state-space targets, a parabola with attention layers, never decreasing."""

from __future__ import annotations

import dataclasses
import random
from itertools import combinations

import numpy as np
import pytest
from dendro.calls import PROTOCOL_VERSION, Hello
from dendro.measured import OUTLIER
from dendro.text import Verdict
from dendro.tree import DraftTree
from dendro.wire import MAX_US

from cluster.api.local import LocalClient
from cluster.arms import OFF_ARM, Arm
from cluster.policies import Experience, step_time
from cluster.policies.costs import Costs
from cluster.policies.experience import Concurrency
from cluster.policies.prior import unpack_prior
from cluster.policies.step_time import (
    MOST_SIZES,
    STEP,
    StepTime,
    TargetSteps,
    fit_steps,
    nonnegative_fit,
    step_at,
    usual_step_time,
)
from tests.support.edge import HELLO, EdgePeers, ingress
from tests.support.toy_edge import RecordedPriors

RECORDED: list[tuple[int, float]] = [
    (8, 53720),
    (8, 56280),
    (8, 60870),
    (8, 61960),
    (16, 82120),
    (32, 140790),
    (48, 194540),
]
"""Rows and microseconds of docs/speed-mamba2.md."""
TARGETS = {1: TargetSteps(), 2: TargetSteps(attends=True)}
"""Targets by the degree of their polynomial."""
CHAIN, TREE = Arm.parse("mamba:(1,1,1,1)"), Arm.parse("mamba:(3,2,2,1,1)")


def reference(samples: list[tuple[int, float]], weights: list[float], degree: int) -> np.ndarray:
    """Least squares by numpy over all choices of powers, no coefficient below zero."""
    rows, us = (np.array(each, np.float64) for each in zip(*samples, strict=True))
    root = np.sqrt(np.array(weights))
    design = np.stack([(rows / 64) ** power for power in range(degree + 1)], 1)
    best, least = np.zeros(degree + 1), np.inf
    for count in range(1, degree + 2):
        for chosen in combinations(range(degree + 1), count):
            found = np.linalg.lstsq(design[:, chosen] * root[:, None], us * root, rcond=None)[0]
            error = np.square(root * (design[:, chosen] @ found - us)).sum()
            if (found >= 0).all() and error < least:
                best, least = np.zeros(degree + 1), error
                best[list(chosen)] = found
    return best / 64.0 ** np.arange(degree + 1)


def made(kind: str) -> list[tuple[int, float]]:
    rng = random.Random(kind)
    if kind == "recorded":
        return RECORDED
    costs = {"line": (8e3, 90.0, 0.0), "parabola": (8e3, 20.0, 3.0), "falling": (9e3, -30.0, 0.0), "steep": (0, 1, 9.0)}
    c, k, k2 = costs[kind]
    rows = [rng.choice((8, 16, 24, 64, 256)) for _ in range(300)]
    return [(n, (c + k * n + k2 * n * n) * rng.uniform(0.8, 1.2)) for n in rows]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", ["recorded", "line", "parabola", "falling", "steep"])
def test_the_fit_is_the_least_squares_of_all_steps_so_far(kind: str, degree: int):
    step, kept = StepTime(), list[tuple[int, float]]()
    for rows, us in made(kind):
        kept.append((rows, min(us, OUTLIER * step.at(rows, TARGETS[degree])) if kept else us))
        step.learn(rows, us, TARGETS[degree])
        if len(kept) > 5 and len({rows for rows, _ in kept}) > degree:
            weights = [(1 - STEP) ** age for age in reversed(range(len(kept)))]
            solved = StepTime(step.sizes).coefficients(TARGETS[degree])
            assert solved == pytest.approx(reference(kept, weights, degree), rel=1e-5, abs=0.1)


def test_a_fit_is_solved_again_after_an_eighth_of_its_weight_and_at_once_for_a_new_number_of_rows(monkeypatch):
    solved = []
    monkeypatch.setattr(step_time, "fit_steps", lambda *args: solved.append(args) or fit_steps(*args))
    step = StepTime()
    for number in range(1000):
        step.learn(8 if number % 2 else 16, 10_000 + number, TARGETS[1])
    assert 1000 / 16 < len(solved) < 1000 / 8
    fresh = StepTime(step.sizes).at(8, TARGETS[1])
    assert step.at(8, TARGETS[1]) == pytest.approx(fresh, rel=0.01)
    step.learn(64, 90_000, TARGETS[1])
    assert step.coefficients(TARGETS[1]) == StepTime(step.sizes).coefficients(TARGETS[1])


@pytest.mark.parametrize("degree", [1, 2])
def test_steps_of_equal_weight_are_fitted_by_least_squares(degree: int):
    rows, us = zip(*RECORDED, strict=True)
    found = fit_steps(rows, us, degree)
    assert found == pytest.approx(reference(RECORDED, [1.0] * len(RECORDED), degree), rel=1e-6)


def test_a_parabola_is_found_by_degree_two_and_not_by_a_line():
    step = StepTime()
    for _ in range(50):
        for rows in (8, 16, 32, 64):
            step.learn(rows, 5000 + 20 * rows + 3 * rows * rows, TARGETS[2])
    assert step.coefficients(TARGETS[2]) == pytest.approx((5000, 20, 3), rel=1e-4)
    assert step.at(128, TARGETS[2]) == pytest.approx(5000 + 20 * 128 + 3 * 128**2, rel=1e-4)
    assert step.at(128, TARGETS[1]) < 0.7 * step.at(128, TARGETS[2])


def test_measured_numbers_of_rows_cost_what_was_measured_where_no_parabola_goes():
    """Steps of a target whose rows are dear up to 5, and cheap from 8 on. 4 rows, which no step had, lie between 3
    and 5; 32 rows are as many times 16 as the fit has them."""
    means = {1: 6_800.0, 2: 7_300.0, 3: 8_400.0, 5: 11_400.0, 8: 12_100.0, 16: 20_000.0}
    step, rng = StepTime(), random.Random(0)
    for _ in range(400):
        rows = rng.choice(list(means))
        step.learn(rows, means[rows] * rng.uniform(0.97, 1.03), TARGETS[2])
    fit = step.coefficients(TARGETS[2])
    assert step_at(fit, 2) > 1.05 * means[2] and step_at(fit, 5) < 0.95 * means[5]
    for rows, us in means.items():
        assert step.at(rows, TARGETS[2]) == pytest.approx(us, rel=0.02)
    assert step.at(4, TARGETS[2]) == pytest.approx(9_900, rel=0.02)
    assert step.at(32, TARGETS[2]) == pytest.approx(step.at(16, TARGETS[2]) * step_at(fit, 32) / step_at(fit, 16))


LOADED = ((1, 6_000), (2, 6_300), (3, 7_200), (5, 9_900), (8, 10_500), (16, 18_000))
"""Steps that a verifier timed while it loaded, with texts of few tokens."""


@pytest.mark.parametrize("attends", [False, True])
def test_rows_that_no_step_had_cost_what_was_timed_while_loading_in_proportion(attends: bool):
    """Texts are longer now: each step takes a fifth more. A line or parabola through 1 and 5 rows has 2 at 8.1 ms."""
    target = TargetSteps(attends=attends, loaded=LOADED)
    step = StepTime()
    for _ in range(50):
        step.learn(1, 7_200, target)
    for rows, us in LOADED:
        assert step.at(rows, target) == pytest.approx(1.2 * us)
    assert step.at(4, target) == pytest.approx(1.2 * (7_200 + 9_900) / 2)
    for _ in range(50):
        step.learn(5, 11_880, target)
    assert step.at(2, target) == pytest.approx(1.2 * 6_300, rel=0.01)
    assert step.at(32, target) > step.at(16, target)
    assert step.at(2, TargetSteps(attends=attends)) > 8_000


def test_what_is_measured_here_outweighs_what_was_timed_while_loading():
    target = TargetSteps(attends=True, loaded=LOADED)
    step = StepTime()
    for _ in range(100):
        for rows, us in ((1, 6_000), (2, 9_000)):
            step.learn(rows, us, target)
    assert step.at(1, target) == pytest.approx(6_000, rel=0.05) and step.at(2, target) == pytest.approx(9_000, rel=0.05)


@pytest.mark.parametrize(
    "loaded",
    [
        ((2, 1_000), (3, 2_000)),
        ((8, 9_000), (16, 20_000)),
        ((2, 1), (3, MAX_US)),
        ((2**31 - 2, 1), (2**31 - 1, MAX_US)),
    ],
)
def test_fewer_rows_than_any_timed_while_loading_take_some_time(loaded):
    """The line through the first two would take 1 row in 0 or less."""
    target = TargetSteps(sizes=(1, 2, 64), loaded=loaded)
    step = StepTime()
    step.learn(1, 1_000.0, target)
    assert step.at(1, target) == pytest.approx(1_000)
    assert 0 < step.at(1, target) <= step.at(2, target) <= step.at(64, target) < np.inf


def test_without_a_measured_step_none_is_predicted_from_those_timed_while_loading():
    """A policy begins with a plain round, whose step is measured."""
    assert StepTime().at(2, TargetSteps(loaded=LOADED)) == 0


def test_a_number_of_rows_that_few_steps_had_counts_half_by_the_fit():
    step = StepTime({8: (63.0, 8_000.0), 16: (63.0, 16_000.0), 32: (2.0, 64_000.0)})
    assert step.at(32, TARGETS[1]) == pytest.approx((64_000 + step_at(step.coefficients(TARGETS[1]), 32)) / 2)


@pytest.mark.parametrize("loaded", [(), LOADED], ids=["nothing loaded", "timed while loading"])
def test_more_rows_never_cost_less(loaded):
    rng = random.Random(0)
    targets = [TargetSteps(attends=attends, loaded=loaded) for attends in (False, True)]
    for _ in range(200):
        step = StepTime()
        for _ in range(rng.randrange(1, 12)):
            step.learn(rng.choice((8, 16, 24, 48, 64, 96)), rng.uniform(1e3, 1e5), targets[1])
        for target in targets:
            assert min(step.coefficients(target)) >= 0
            predicted = [step.at(rows, target) for rows in (*range(1, 8), *range(8, 257, 8))]
            assert min(np.diff(predicted)) >= -1e-9 * predicted[-1], "but for rounding"


@pytest.mark.parametrize("degree", [1, 2])
def test_too_few_different_numbers_of_rows_give_the_simplest_fit(degree: int):
    step = StepTime()
    assert step.at(8, TARGETS[degree]) == 0.0
    for _ in range(50):
        step.learn(8, 10_000, TARGETS[degree])
    found = step.coefficients(TARGETS[degree])
    assert found == pytest.approx((10_000, 0, 0)[: degree + 1]), "one number of rows determines a constant"
    for _ in range(50):
        step.learn(16, 12_000, TARGETS[degree])
    assert step.coefficients(TARGETS[degree]) == pytest.approx((8_000, 250, 0)[: degree + 1], rel=1e-6), (
        "two determine a line"
    )


def test_no_coefficient_of_a_fit_is_negative():
    assert nonnegative_fit([[1, 0], [1, 1], [1, 2]], [3, 2, 1]) == pytest.approx((2, 0))
    assert nonnegative_fit([[1, 1], [1, 2], [1, 3]], [1, 3, 5]) == pytest.approx((0, 11 / 7))
    assert nonnegative_fit([[1, 1], [1, 2]], [3, 5]) == pytest.approx((1, 2))


def test_a_peer_that_reports_any_number_of_rows_makes_a_bounded_number_of_sizes():
    step = StepTime()
    for rows in range(8, 8 * 300, 8):
        step.learn(rows, 1000 + rows, TARGETS[1])
    assert len(step.sizes) == MOST_SIZES
    assert step.at(64, TARGETS[1]) == pytest.approx(1064, rel=1e-6)


@pytest.mark.parametrize("degree", [1, 2])
def test_a_number_of_rows_that_was_last_measured_thousands_of_steps_ago_is_dropped(degree: int):
    """Its weight of 9,000 steps later, after as many of 128 rows: these alone determine a constant."""
    step = StepTime({8: ((1 - STEP) ** 9_000, 5_000.0), 128: (100.0, 20_000.0)})
    step.learn(128, 20_000, TARGETS[degree])
    assert step.coefficients(TARGETS[degree]) == pytest.approx((20_000, 0, 0)[: degree + 1])
    assert all(weight > 0 for weight, _ in step.at_most(8).sizes.values()), "a prior with a weight of 0 is refused"


# -- the choice of line or parabola -----------------------------------------------------------------------------------


def learned(attends: bool, step_us) -> Experience:
    """An experience of arms of 8 to 24 padded rows."""
    experience = Experience(Concurrency(target=TargetSteps(attends=attends)))
    for _ in range(50):
        for arm in (OFF_ARM, CHAIN, Arm.parse("mamba:(3,2,1)"), Arm.parse("mamba:(4,2,1)")):
            tree = DraftTree.of(range(arm.rows), range(-1, arm.rows - 1))
            rows = -(-arm.rows // 8) * 8
            found = Verdict((1,), (0,), (), None, 1, round(step_us(rows)), step_rows=rows)
            experience.learn(arm, tree, found)
    return experience


def test_with_attention_the_predicted_step_time_is_quadratic_in_rows():
    """Predicts the step of a tree of 48 rows from steps of 8 to 24."""
    step_us = lambda rows: 5000 + 10 * rows * rows  # noqa: E731
    hybrid, states = learned(True, step_us), learned(False, step_us)
    assert hybrid.costs.verify_us(TREE.rows, hybrid.concurrency.target) == pytest.approx(step_us(48), rel=1e-3)
    assert states.costs.verify_us(TREE.rows, states.concurrency.target) < 0.7 * step_us(48)


@pytest.mark.parametrize("attends", [True, False])
async def test_a_router_takes_what_is_said_of_steps_from_the_verifiers_hello(attends: bool):
    peers = EdgePeers()
    hello = Hello(PROTOCOL_VERSION, "demo", "f", "t", 300, 512, 64, 8, "float32", "bitwise", 1, attends=attends)
    peers.hello = dataclasses.replace(hello, step_sizes=(2, 9), timed_steps=((2, 900), (9, 1_000)))
    edge = ingress(peers)
    edge.experience["demo"].concurrency.target = TargetSteps(attends=not attends)
    answer = await LocalClient(edge).generate_text("the snake", max_new_tokens=8)
    assert edge.experience["demo"].concurrency.target == TargetSteps((2, 9), attends, ((2, 900), (9, 1_000)))
    assert answer.complete.speculation.step_sizes == (2, 9)


@pytest.mark.parametrize("sizes", [(20_000,), (2**31 - 1,), (1, 2, 2**31 - 1)])
async def test_what_is_learned_of_a_verifier_with_huge_steps_can_be_read_again(sizes):
    """A verdict reports at most MAX_STEP_ROWS, and a prior with more would replace all that was learned before."""
    peers, priors = EdgePeers(), RecordedPriors()
    peers.hello = dataclasses.replace(HELLO, step_sizes=sizes)
    edge = ingress(peers, priors=priors)
    for _ in range(3):
        await LocalClient(edge).generate_text("the snake", max_new_tokens=16)
    await edge._priors.settled()
    assert priors.blobs
    for blob in priors.blobs.values():
        prior = unpack_prior(blob)
        assert prior is not None and any(costs.step.sizes for costs in prior.costs.values())


@pytest.mark.parametrize(
    ("target", "plain_us", "chain_us"), [(TargetSteps(), 16_000, 16_000), (TargetSteps((1, 5, 8, 64)), 9_000, 13_000)]
)
def test_a_predicted_step_has_the_targets_padding(target: TargetSteps, plain_us: float, chain_us: float):
    """A step takes 8 ms, and 1 ms for each padded row."""
    costs = Costs(step=StepTime({rows: (1.0, 8_000 + 1_000 * rows) for rows in (8, 64)}))
    assert costs.verify_us(1, target) == pytest.approx(plain_us)
    assert costs.verify_us(5, target) == pytest.approx(chain_us)


def test_rounds_after_a_tree_or_beside_an_opening_do_not_make_plain_rounds_seem_longer():
    """They are not begun ahead, so their steps and hops are longer than those of a text without trees."""
    experience = Experience(Concurrency(target=TargetSteps(tuple(range(1, 65)))))
    ahead = Verdict((1,), (0,), (), None, 1, 7_600, step_rows=1, ahead_us=400)
    after = Verdict((1,), (0,), (), None, 1, 9_200, step_rows=1)
    tree = Verdict((1, 1), (0, 1), (0,), None, 2, 10_000, step_rows=5)
    drafted = dataclasses.replace(DraftTree.of(range(5), range(-1, 4)), draft_us=2_000)
    for _ in range(20):
        experience.learn(OFF_ARM, DraftTree.root_only(1), ahead)
        experience.learn_time(OFF_ARM, DraftTree.root_only(1), ahead, 7_700)
    before_us = experience.prices().predicted_us(OFF_ARM)
    for _ in range(20):
        experience.learn(CHAIN, drafted, tree)
        experience.learn_time(CHAIN, drafted, tree, 12_200)
        experience.learn(OFF_ARM, DraftTree.root_only(1), after)
        experience.learn_time(OFF_ARM, DraftTree.root_only(1), after, 9_900)
    assert before_us == pytest.approx(7_700)
    assert experience.prices().predicted_us(OFF_ARM) == pytest.approx(before_us, rel=0.01)


def test_plain_rounds_are_priced_anew_where_the_verifier_no_longer_begins_any_ahead():
    """Rounds that are not begun ahead would be left out of the price for ever."""
    experience = Experience(Concurrency(target=TargetSteps(tuple(range(1, 65)))))
    ahead = Verdict((1,), (0,), (), None, 1, 7_600, step_rows=1, ahead_us=400)
    later = Verdict((1,), (0,), (), None, 1, 16_000, step_rows=1)
    for found, rounds in ((ahead, 20), (later, 400)):
        for _ in range(rounds):
            experience.learn(OFF_ARM, DraftTree.root_only(1), found)
            experience.learn_time(OFF_ARM, DraftTree.root_only(1), found, found.verify_us + 100)
    assert experience.prices().predicted_us(OFF_ARM) == pytest.approx(16_100, rel=0.02)


def test_a_new_tenant_begins_with_ratios_of_steps_that_most_tenants_measured():
    """Steps of long texts take longer, and each measurement may be slow by chance."""
    found = []
    for plain_us, ratio in ((1_000, 1.5), (4_000, 1.5), (1_100, 9.0), (900, 1.6), (1_050, 1.4)):
        found.append(StepTime())
        for _ in range(20):
            found[-1].learn(1, plain_us, TARGETS[1])
            found[-1].learn(9, ratio * plain_us, TARGETS[1])
    usual = usual_step_time(found, TARGETS[1])
    assert usual.at(1, TARGETS[1]) == pytest.approx(1_050, rel=0.02)
    assert usual.at(9, TARGETS[1]) == pytest.approx(1.5 * 1_050, rel=0.02)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (2, 2), (3, 8), (8, 8), (9, 32), (32, 32), (33, 40)])
def test_a_step_is_padded_to_the_next_size_and_above_the_largest_to_a_multiple_of_8(rows, size):
    assert TargetSteps((1, 2, 8, 32)).padded(rows) == size


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (8, 8), (9, 16), (64, 64), (65, 72)])
def test_steps_of_a_verifier_that_reports_no_sizes_count_as_padded_to_multiples_of_8(rows, size):
    assert TargetSteps().padded(rows) == size
