"""Fixtures of several test files of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter_service.confidence import Calibration
from drafter_service.models import load_model
from tests.support.tiny_drafters import DEVICE, DEVICE_LAUNCHES, FAMILIES, WITH_HYBRID, Family, make_drafter


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


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    """Tiny drafters by family."""
    folders = {family: tmp_path_factory.mktemp(family) for family in WITH_HYBRID}
    for family, folder in folders.items():
        make_drafter(folder, family)
    return folders


@pytest.fixture(scope="module", params=[*FAMILIES, pytest.param("granitemoehybrid", marks=pytest.mark.long)])
def path(request: pytest.FixtureRequest, paths: dict[Family, Path]) -> Path:
    return paths[request.param]
