"""Fixtures of several test files of this folder."""

from __future__ import annotations

import pytest
import torch

from drafter_service.confidence import Calibration
from drafter_service.models import load_model
from tests.support.tiny_drafters import DEVICE, DEVICE_LAUNCHES, make_drafter


@pytest.fixture
def first_calibrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts keep the calibration that a drafter starts with: equal texts have equal trees."""
    monkeypatch.setattr(Calibration, "learn", lambda self, scores, rank: self)


@pytest.fixture(scope="module", params=list(DEVICE_LAUNCHES))
def device_family(request):
    return request.param


@pytest.fixture(scope="module")
def device_model(device_family, tmp_path_factory):
    """A drafter whose levels an accelerator's kernels serve."""
    folder = tmp_path_factory.mktemp(device_family)
    make_drafter(folder, device_family)
    return load_model(folder, torch.float32, DEVICE, form="eager")[0]
