"""The marginal rule of `until(auto,...)`: its arithmetic, what it learns from, and the wrapper that applies it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from dendro.shapes import DynamicShape, LevelShape, MarginalShape, UntilShape
from dendro.text import Limits, Sampling, Text, Verdict
from dendro.tree import DraftTree

from cluster.arms import OFF_ARM, Arm
from cluster.policies import Experience, Static
from cluster.policies.costs import FIRST_ACCEPT, KEPT, PRIOR_ROUNDS, Marginal, Rate, StoppedDrafts
from cluster.policies.experience import Concurrency
from cluster.policies.step_time import TargetSteps
from cluster.policies.stopping import FIRST_H, StopRule
from cluster.router.request_speculation import RequestSpeculation
from cluster.router.speculation import SpeculationPlan
from tests.support.fakes import NoDrafter

CHAIN = MarginalShape(DynamicShape(1, 8, 8))
ARM = Arm("mamba", CHAIN)
FIXED = Arm("mamba", LevelShape((1, 1, 1, 1)))


def chain(guesses: int, draft_us: int = 0) -> DraftTree:
    values = [-0.1 * row for row in range(guesses + 1)]
    return replace(DraftTree.of(range(guesses + 1), range(-1, guesses), values), draft_us=draft_us)


def verdict(length: int, rows: int, step_us: int, texts: int = 1) -> Verdict:
    return Verdict(
        (1,) * length, tuple(range(length)), (0,) * (length - 1), None, length, step_us, texts=texts, step_rows=rows
    )


def test_the_numbers_of_a_hand_example():
    """The rule of docs/design/stopping.md#the-marginal-rule with the paper's times, in seconds: t_d = 0.0234, a step
    costs no more for another row."""
    found = Marginal(rate=16.84, level_us=0.0234, row_us=0.0, guesses=1.0, accept=0.85)
    assert found.h == pytest.approx(1 - 16.84 * 0.0234 / 0.85) == pytest.approx(0.5364, abs=1e-4)
    assert found.least == 0.0
    tree = Marginal(rate=16.84, level_us=0.0234, row_us=0.002, guesses=3.0, accept=0.85)
    assert tree.h == pytest.approx(1 - 16.84 * 0.0294 / 0.85) == pytest.approx(0.4175, abs=1e-4)
    assert tree.least == pytest.approx(0.03368)


def simulated(stops, tokens: int, seed: int) -> float:
    """Tokens a second of chains in the simulation of docs/design/stopping.md#the-marginal-rule: a text is by turns easy
    and hard to guess.

    stops(V, guesses, rate): whether a draft of so many guesses stops, where V is the chance that all are right
    """
    rng, level_s, step_s = np.random.default_rng(seed), 0.0234, 0.112
    emitted, seconds, hard, rate = 0, 0.0, False, 1 / step_s
    while emitted < tokens:
        guesses, chance, alive, accepted = 0, 1.0, True, 0
        while guesses < 20 and not stops(chance, guesses, rate):
            own = rng.beta(4.5, 5.5) if hard else rng.beta(19, 1)
            guesses, seconds, chance = guesses + 1, seconds + level_s, chance * own
            alive = alive and rng.random() < own
            accepted += alive
            hard ^= rng.random() < (0.3 if hard else 0.15)
        seconds, emitted = seconds + step_s, emitted + accepted + 1
        rate = emitted / seconds
    return rate


def test_the_marginal_rule_emits_what_the_simulation_of_the_design_says():
    """docs/design/stopping.md#the-marginal-rule: the best fixed length, 5, 16.59 tokens/s; the best swept h, 0.5,
    16.91; the marginal rule 16.84.

    Standard deviation of a run of 40,000 tokens: 0.06.
    """
    shape = MarginalShape(DynamicShape(1, 20, 20))

    def marginal(chance: float, guesses: int, rate: float) -> bool:
        found = Marginal(rate, 0.0234, 0.0, 1.0, FIRST_ACCEPT)
        return guesses > 0 and not 1 - chance < shape.at(found.h, found.least).h

    fixed = simulated(lambda chance, guesses, rate: guesses >= 5, 40_000, 1)
    swept = simulated(lambda chance, guesses, rate: guesses > 0 and not 1 - chance < 0.5, 40_000, 1)
    found = simulated(marginal, 40_000, 1)
    assert fixed == pytest.approx(16.59, abs=0.15)
    assert swept == pytest.approx(16.91, abs=0.15)
    assert found == pytest.approx(16.84, abs=0.15)
    assert found > fixed and found > 0.99 * swept


def measured(level_us: int = 2000, rounds: int = 12) -> Experience:
    """A step takes 20 ms and 0.4 ms a row; a draft 2 ms a level; chains of 4 emit 3 tokens."""
    experience = Experience(Concurrency(target=TargetSteps((1, 5, 9, 16))))
    for round_ in range(rounds):
        rows = (5, 1, 9)[round_ % 3]
        arm = {5: FIXED, 1: Arm.parse("off"), 9: Arm("mamba", LevelShape((1,) * 8))}[rows]
        tree = chain(rows - 1, level_us * (rows - 1))
        found = verdict(1 if rows == 1 else 3, rows, 20_000 + 400 * rows)
        experience.learn(arm, tree, found)
        experience.learn_rate(found.length, experience.share_us(tree, found, tree.draft_us + found.verify_us))
    return experience


def test_nothing_is_computed_before_a_round_was_measured():
    rule = StopRule(Experience())
    assert rule.resolved(ARM) == Arm(ARM.maker, UntilShape(CHAIN.tree, FIRST_H))


def test_h_and_least_follow_from_measured_rounds():
    """Level and row costs are read off the fits of other arms' drafts and of steps; the rate is that of the rounds."""
    experience = measured()
    rule = StopRule(experience)
    shape = rule.resolved(ARM).shape
    assert isinstance(shape, UntilShape)
    rate = experience.costs.rate.tokens / experience.costs.rate.us
    assert shape.least == pytest.approx(rate * 400, abs=1e-4)
    assert shape.h == pytest.approx(1 - rate * (2000 + 400) / FIRST_ACCEPT, abs=1e-4)


def test_shapes_with_numbers_are_passed_on():
    rule = StopRule(measured())
    for shape in (LevelShape((1, 1)), UntilShape(CHAIN.tree, 0.3)):
        arm = Arm("mamba", shape)
        assert rule.resolved(arm) == arm


def test_a_slower_drafter_stops_sooner():
    found = []
    for level_us in (500, 2000, 8000):
        rule = StopRule(measured(level_us))
        shape = rule.resolved(ARM).shape
        assert isinstance(shape, UntilShape)
        found.append(shape.h)
    assert found[0] > found[1] > found[2]


def test_the_requests_own_rounds_outweigh_those_of_others():
    others, own = Rate(), Rate()
    for _ in range(1000):
        others.learn(1, 1000.0, KEPT)
    assert own.begun_with(others, PRIOR_ROUNDS) == pytest.approx(1e-3)
    for _ in range(8):
        own.learn(4, 1000.0)
    assert own.begun_with(others, PRIOR_ROUNDS) == pytest.approx((8 + 32) / 16_000)
    assert Rate().begun_with(Rate(), PRIOR_ROUNDS) == 0.0


def test_an_until_arm_learns_its_levels_and_their_acceptance_from_its_drafts():
    """Levels below an accepted guess: 3 of the first draft, all accepted; of the second one, which was wrong."""
    drafts = StoppedDrafts()
    before = drafts.tried, drafts.accepted
    drafts.learn(chain(4, 8000), verdict(5, 5, 1))
    assert not drafts.level.known
    drafts.learn(chain(3, 6600), verdict(2, 4, 1))
    assert drafts.level.known and drafts.level.us == 2000  # the lesser of the first two, as of every `Cost`
    drafts.learn(chain(1, 2000), verdict(1, 2, 1))
    kept = KEPT**3
    assert drafts.tried == pytest.approx(kept * before[0] + KEPT**2 * 3 + KEPT * 1)
    assert drafts.accepted == pytest.approx(kept * before[1] + KEPT**2 * 3)
    assert drafts.guesses_per_level == 1.0
    before = drafts.accept
    drafts.learn(chain(4, 8000), replace(verdict(2, 3, 1), trimmed=2))
    assert drafts.accept == before, "it is not known whether the levels that were left out had the text's tokens"


def test_a_share_of_a_step_with_other_texts_counts_as_the_cost_of_a_row():
    """Of four texts whose step takes 4 times as long: the rate of the text's share is that of a text alone."""
    alone, together = Experience(), Experience()
    tree = chain(4, 8000)
    assert alone.share_us(tree, verdict(3, 5, 22_000), 30_000) == 30_000
    shared = replace(tree, texts=4, draft_us=32_000)
    assert together.share_us(shared, verdict(3, 20, 88_000, texts=4), 120_000) == 30_000


class ScriptedDrafters(NoDrafter):
    def __init__(self, tree: DraftTree) -> None:
        self.tree, self.asked = tree, list[Arm]()

    async def draft(self, text: Text, arm: Arm) -> DraftTree:
        self.asked.append(arm)
        return self.tree


async def test_the_drafter_is_asked_for_a_shape_with_numbers_and_its_tree_is_learned():
    experience, text = measured(), Text((1, 2, 3), Sampling(), Limits(64))
    inner = ScriptedDrafters(chain(3, 6000))
    with experience.concurrency.running() as running:
        plan = SpeculationPlan("fixed", Static(ARM), stops=True)
        speculation = RequestSpeculation(plan, experience, running, text, inner)
        for _ in range(3):
            assert speculation.choose() == ARM and (await speculation.draft(text, ARM)).guesses == 3
            speculation.learn(ARM, inner.tree, verdict(2, 4, 21_600))
    assert all(isinstance(arm.shape, UntilShape) for arm in inner.asked)
    assert experience.costs.stopped[ARM].level.us == 2000


async def test_a_fixed_shape_that_stops_by_the_marginal_rule_learns_its_numbers_from_its_own_rounds():
    """No policy chose the shape, so the time of its whole drafts is not kept: clients can name any number of shapes."""
    experience, text = Experience(), Text((1, 2, 3), Sampling(), Limits(64))
    inner = ScriptedDrafters(chain(3, 6000))
    with experience.concurrency.running() as running:
        plan = SpeculationPlan("fixed", Static(ARM), stops=True, adaptive=False)
        speculation = RequestSpeculation(plan, experience, running, text, inner)
        for _ in range(5):
            await speculation.draft(text, speculation.choose())
            speculation.learn(ARM, inner.tree, verdict(2, 4, 21_600))
    numbers = [arm.shape.h for arm in inner.asked if isinstance(arm.shape, UntilShape)]
    assert numbers[0] == FIRST_H and numbers[-1] != FIRST_H
    assert not experience.costs.draft and not experience.costs.rows


async def test_a_plain_round_after_a_stopped_draft_teaches_nothing_of_its_tree():
    experience, text = measured(), Text((1, 2, 3), Sampling(), Limits(64))
    inner, alone = ScriptedDrafters(chain(3, 6000)), DraftTree.root_only(3)
    with experience.concurrency.running() as running:
        plan = SpeculationPlan("fixed", Static(ARM), stops=True)
        speculation = RequestSpeculation(plan, experience, running, text, inner)
        speculation.choose()
        speculation.learn(ARM, await speculation.draft(text, ARM), verdict(2, 4, 21_600))
        levels = experience.costs.stopped[ARM].levels
        await speculation.draft(text, OFF_ARM)
        speculation.learn(OFF_ARM, alone, verdict(1, 1, 20_000))
    assert experience.costs.stopped[ARM].levels == levels


def test_rounds_change_the_rate_of_a_stop_rule():
    rule = StopRule(measured())
    for _ in range(3):
        rule.drafted(chain(3, 6000))
        rule.learn(verdict(2, 4, 21_600), 27_600.0)
    assert rule.rate == Rate(3.0, 6.0, 82_800.0)


def test_a_late_draft_teaches_no_cost():
    experience = measured()
    rule, late = StopRule(experience), replace(DraftTree.root_only(3), draft_us=60_000, missed=True)
    rule.resolved(ARM)
    rule.drafted(late)
    rule.learn(verdict(1, 1, 20_000), None)
    assert ARM not in experience.costs.stopped and rule.rate == Rate()


def test_no_cost_makes_the_shape_invalid():
    for rate, level_us in ((1e9, 1e9), (0.0, 0.0), (1e-30, 1e300)):
        found = Marginal(rate, level_us, level_us, 3.0, 1e-3)
        shape = CHAIN.at(found.h, found.least)
        assert 0 < shape.h < 1 and 0 <= shape.least < 1
        assert math.isfinite(shape.h)
