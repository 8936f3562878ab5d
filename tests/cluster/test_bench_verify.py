"""`dendro bench verify`: every mode answers with its trees, and the report is computed correctly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dendro.errors import BadRequest
from dendro.state import NoStates
from dendro.text import Sampling

from cluster.bench.verify import (
    ARMS,
    VERIFY,
    VerifiedAnswer,
    VerifiedArm,
    VerifyOptions,
    arm_rows,
    claim_rows,
    verified_answer,
)
from cluster.measure.bench import draw
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.support import tiny_models
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

PROMPT = [(7 * at * at + 3 * at) % 250 for at in range(40)]


def answers_of(emitted: float, seconds: float) -> dict[tuple[int, int], VerifiedAnswer]:
    """Six answers of 60 tokens, 2 to each of 3 prompts."""
    rounds = round(60 / emitted)
    return {(prompt, each): VerifiedAnswer(60, rounds, seconds) for prompt in range(3) for each in range(2)}


def found() -> dict[VerifiedArm, dict[tuple[int, int], VerifiedAnswer]]:
    """By mode and children: coupled 2, others 3; a second for coupled answers, half of one for others."""
    return {arm: answers_of(*((2, 1.0) if arm.mode == "coupled" else (3, 0.5))) for arm in ARMS}


def test_rows_are_paired_with_the_coupled_mode_of_the_same_tree():
    rows = arm_rows(found(), 1.0)
    assert len(rows) == len(ARMS) == 10
    for row in rows:
        coupled = row["mode"] == "coupled"
        assert row["emitted_per_round"]["median"] == (2 if coupled else 3)
        assert row["emitted_over_coupled"]["median"] == (1 if coupled else 1.5)
        assert row["speed_over_coupled"]["median"] == (1 if coupled else 2)


def test_a_claim_is_missed_where_its_interval_lies_below_1(tmp_path: Path):
    report = {"rows": arm_rows(found(), 1.0) + arm_rows(found(), 0.6), "claims": claim_rows(found(), 1.0)}
    aims = [row for aim in VERIFY.aims for row in aim.judged(report)]
    assert [row["met"] for row in aims] == [True, True, False, False]  # coupled is below both others
    titles = [title for title, *_ in VERIFY.all_tables(report | {"aims": aims})]
    assert titles == ["Temperature 1", "Temperature 0.6", "Aims"]
    draw(VERIFY.plots, report, tmp_path / "verify.png")
    assert (tmp_path / "verify.png").stat().st_size > 1000


def test_temperature_0_is_refused():
    with pytest.raises(BadRequest, match="^temperatures: must be above 0"):
        VerifyOptions(temperatures=(0.0, 1.0))


@pytest.mark.slow
async def test_every_arm_answers_and_a_drafter_of_the_same_weights_is_accepted_more_than_one_of_others(tmp_path: Path):
    (tmp_path / "other").mkdir()
    tiny_models.make_checkpoint(tmp_path)
    tiny_models.make_checkpoint(tmp_path / "other", seed=1)
    verifier = VerifierEngine.load(tmp_path, VerifierOptions(name="t", max_length=256, max_sessions=2))
    mean = {}
    for name, folder in (("same", tmp_path), ("other", tmp_path / "other")):
        options = DrafterOptions(name="d", dtype=torch.float32, max_sessions=2)
        drafter = DrafterEngine.load(folder, options, states=NoStates())
        again = VerifierEngine(verifier.scheduler, verifier.runner, await verifier.hello())
        await again.start()
        await drafter.start()
        try:
            for arm in ARMS:
                sampling = Sampling(0.3, seed=4, mode=arm.mode)
                answer = await verified_answer(drafter, again, arm, PROMPT, sampling, 16)
                assert 16 <= answer.tokens <= 16 + arm.shape.depth
                mean[name, arm] = answer.tokens / answer.rounds
        finally:
            await drafter.stop()
            await again.stop()
        assert again.sessions == 0
    assert sum(mean["same", arm] for arm in ARMS) > sum(mean["other", arm] for arm in ARMS)
