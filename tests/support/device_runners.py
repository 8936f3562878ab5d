"""Runs a target by the kernels of an accelerator, also where it was loaded on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from verifier_service.device import DeviceRunner
from verifier_service.models import LoadedTarget
from verifier_service.models.device_pages import device_layouts


def device_runner(target: LoadedTarget, *given: Any, **named: Any) -> DeviceRunner:
    """A DeviceRunner with these arguments, whose pages are laid out as an accelerator's kernels read them."""
    return DeviceRunner(replace(target, layouts=device_layouts(target.run.probed)), *given, **named)
