"""What `dendro check` says of a drafter's worth: by its figures, by timed steps and drafts, or by both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dendro.shapes import TreeShape
from dendro.state import NoStates

from cluster.drafter_figures import figures_of
from cluster.measure.engine_times import ROWS, WorthTimer
from cluster.worth import SHAPES, needed, worth_of
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.support.tuned_pair import make_pair
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

CHAIN = TreeShape.parse("(1,1,1,1)")
STEPS = {1: 1000.0, 2: 1000.0, 3: 1100.0, 5: 1200.0, 16: 2000.0}
RIGHT, WRONG = figures_of("big", {0.0: [[0] * 400]}), figures_of("big", {0.0: [[99] * 400]})


def test_a_tree_needs_the_tokens_that_its_draft_and_step_take_over_a_step_of_one_row():
    assert needed(CHAIN, STEPS, {CHAIN: 800.0}) == 2.0
    assert needed(TreeShape.parse("(2,1,1)"), STEPS, {TreeShape.parse("(2,1,1)"): 0.0}) == 2.0, "7 rows, padded to 16"
    assert needed(TreeShape.parse("(4,4)"), STEPS, {TreeShape.parse("(4,4)"): 0.0}) is None, "21 rows were not timed"
    assert needed(CHAIN, {}, {CHAIN: 1.0}) is None and needed(CHAIN, STEPS, {}) is None


@pytest.mark.parametrize(
    ("figures", "timed", "words"),
    [
        (RIGHT, True, "temperature 0: 5.00 tokens a round of (1,1,1,1), which needs 1.60 here: at most 3.12 of off"),
        (WRONG, True, "temperature 0: 1.00 tokens a round of (1), which needs 1.10 here: cannot pay"),
        (RIGHT, False, "by its checkpoint alone: nothing was timed"),
        (
            None,
            True,
            "its checkpoint has no figures of its guesses; a round of (1,1,1,1) needs 1.60 tokens to pay here",
        ),
        (None, False, "its checkpoint has no figures of its guesses"),
    ],
)
def test_what_a_drafter_is_worth_follows_from_what_is_known(figures, timed: bool, words: str):
    drafts = {shape: 100.0 * shape.depth for shape in SHAPES} if timed else {}
    assert words in worth_of(figures, STEPS if timed else {}, drafts)


@pytest.mark.parametrize("max_length", [256, 64, 2])
async def test_every_shape_and_every_number_of_rows_within_the_limit_is_timed_and_no_text_stays(
    tmp_path: Path, max_length: int
):
    """At a target of any `max_length`, which the texts that are timed must not make unservable."""
    target, path = make_pair(tmp_path)
    options = VerifierOptions(name="t", dtype=torch.float32, max_length=max_length, max_sessions=1)
    verifier = VerifierEngine.load(target, options)
    drafter = DrafterEngine.load(path, DrafterOptions(name="d", max_sessions=1), states=NoStates())
    steps, drafts = await WorthTimer().steps(verifier, 5), await WorthTimer().drafts(drafter)
    assert set(steps) == {rows for rows in ROWS if rows <= 5} and set(drafts) == set(SHAPES)
    assert min(*steps.values(), *drafts.values()) > 0
    assert verifier.stats()["sessions"] == drafter.sessions == 0
