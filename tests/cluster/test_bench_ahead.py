"""`dendro bench ahead`: what a simulated round comes to, and rounds recorded of real engines."""

from __future__ import annotations

import pytest
from dendro.calls import Hello
from dendro.shapes import TreeShape
from dendro.text import Sampling

from cluster.bench.ahead import (
    TEXTS,
    AheadRound,
    PreparedSpan,
    SteppedDrafter,
    far_rounds,
    policy_over_off,
    recorded,
    simulated,
)
from cluster.config import DEMO_MODELS
from cluster.demo.prompts import held_out_prompts
from cluster.measure.in_process import verifier_of
from cluster.measure.targets import DEMO, target_config

STEPS = (100.0, 200.0, 300.0, 400.0)
SPANS = PreparedSpan(0, 200, 0.8), PreparedSpan(200, 400, 0.1)


def round_of(used: int | None) -> AheadRound:
    return AheadRound(2, 250.0, 180.0, STEPS, SPANS, used)


@pytest.mark.parametrize(
    "used, free_us, hits, wait_us, prepared_us",
    [
        (None, 1000, False, 180, (400, 0)),  # nothing runs, and nothing fits
        (None, 150, False, 50 + 180, (150, 0)),  # after the step that runs
        (0, 1000, True, 0, (400, 200)),
        (0, 150, True, 50, (150, 150)),  # what is left of it
        (1, 150, False, 50 + 180, (150, 0)),  # not begun
        (1, 250, True, 150, (250, 50)),
        (0, 250, True, 50, (250, 200)),  # complete, but another tree's step runs
    ],
)
def test_a_call_waits_for_the_step_that_runs_and_for_what_is_left_of_its_tree(
    used, free_us, hits, wait_us, prepared_us
):
    found = round_of(used)
    assert (found.hits(free_us), found.wait_us(free_us), found.prepared_us(free_us)) == (hits, wait_us, prepared_us)


def test_a_simulated_row_adds_the_way_to_rounds_and_gives_the_time_before_a_call_to_preparing():
    rounds = [round_of(None), round_of(0), round_of(None)]
    row = simulated(rounds, 0.05)  # a drafter is free for 250 + 2 * 50 us
    assert row["hit_rate"] == 0.5
    waits = (50, 50 + 180)  # the step up to 400 runs
    assert row["hidden"] == pytest.approx(1 - sum(waits) / 360)
    assert row["round_ms"] == pytest.approx((2 * 350 + sum(waits)) / 2 / 1e3)
    assert row["hit_round_ms"] == pytest.approx(0.4)
    assert row["thrown_away"] == pytest.approx(1 - 200 / 700)


def test_a_round_begins_with_its_verdict_where_its_tree_was_sent_before_and_else_when_the_tree_is_there():
    rounds = [round_of(None), round_of(0), round_of(0), round_of(1), round_of(None)]
    far = far_rounds(rounds, 150)
    assert [each.waited_us for each in far] == [
        0,  # the tree is there 350 us after the first was answered, the verdict after 400
        200 + 300 - 250,  # the drafter was asked 250 us before this verdict, and is as far away as the verifier
        300,  # too unlikely to be sent: asked for as without, and complete by then
        300 + 180,
    ]
    assert [each.free_us for each in far] == [550, 250, 450, 550]
    near = far_rounds(rounds, 50)
    assert near[0].waited_us == 150, "a message costs more than such a way: nothing is sent"
    row = simulated(rounds, 0.15)
    assert row["at_once"] == 0.25 and row["hit_rate"] == 0.75
    assert row["hidden"] == pytest.approx(1 - 180 / (4 * 180))


@pytest.mark.parametrize("way_ms, least, most", [(0.1, 2.2, 3 * 7 / 9.3), (50, 0.98, 1.0)], ids=["near", "far"])
def test_a_policy_stays_off_where_rounds_of_trees_are_slower_and_drafts_where_they_are_not(way_ms, least, most):
    hello = Hello(1, "m", "f", "t", 4096, 2048, 64, 16, "float32", "bitwise", 1, attends=True, step_sizes=(1, 8))
    rounds = [AheadRound(3, 9_000, 100.0, (), (), None)] * 9
    assert least <= policy_over_off({TreeShape.parse("(1,1,1,1)"): rounds}, 7_000, way_ms, hello) <= most


async def test_recorded_rounds_have_the_targets_tokens_and_the_trees_that_are_used():
    (prompt,) = held_out_prompts(1, 64)
    target, checkpoint = target_config(DEMO_MODELS, DEMO).targets[DEMO], DEMO_MODELS / "mamba2"
    drafters = [SteppedDrafter(checkpoint, prepares) for prepares in (True, False)]
    async with verifier_of(DEMO, target, 256) as verifier:
        found = []
        for seed in range(4):
            given = prompt.token_ids, Sampling(temperature=1.0, seed=seed), TreeShape.parse("(3,2,1)"), 40
            found += await recorded(verifier, drafters, *given)
    assert drafters[0].scheduler.counters.prepared_used == sum(each.used is not None for each in found) > 0
    for each in found:
        assert all(span.begin_us < span.end_us for span in each.spans)
        assert each.steps_us == tuple(sorted(each.steps_us)) and {span.end_us for span in each.spans} <= {
            *each.steps_us
        }
    for drafter in drafters:
        assert drafter.scheduler.texts.free == 2 * TEXTS and drafter.scheduler.sessions == 0
