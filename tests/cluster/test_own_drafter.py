"""The drafter service with the target as its model: if a first guess is not what the target emits, certify fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.certify import checks
from cluster.certify.checks import SHAPES_OF_ITS_OWN, the_target_drafts_for_itself
from drafter_service.runner import DraftRunner
from tests.support.tiny_models import make_checkpoint
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

PROMPTS = ((1, 2, 3, 4, 5), (9, 8, 7, 6, 5, 4, 3))


@pytest.fixture
async def verifier(tmp_path: Path):
    make_checkpoint(tmp_path)
    engine = VerifierEngine.load(tmp_path, VerifierOptions(name="tiny", dtype=torch.float32, max_length=64))
    await engine.start()
    yield engine
    await engine.stop()


async def test_every_guess_of_the_targets_own_drafter_is_accepted(verifier):
    promise = await the_target_drafts_for_itself(verifier, PROMPTS, 12, lambda: None)
    assert promise.kept, promise.found
    assert promise.answers == 3 * len(SHAPES_OF_ITS_OWN) * len(PROMPTS)


async def test_a_drafter_that_keys_its_noise_by_another_position_is_noticed(verifier, monkeypatch):
    noise = DraftRunner._noise

    def shifted(self, groups, laws, positions):
        return noise(self, groups, laws, [position + 1 for position in positions])

    shapes = SHAPES_OF_ITS_OWN[::3]
    monkeypatch.setattr(checks, "SHAPES_OF_ITS_OWN", shapes)
    monkeypatch.setattr(DraftRunner, "_noise", shifted)
    promise = await the_target_drafts_for_itself(verifier, PROMPTS, 12, lambda: None)
    assert not promise.kept
    assert len(promise.found) == len(shapes), "temperature 0 has no noise"
    assert len(promise.broken) == 2 * len(shapes)
