"""Chooses a target's runner: `DeviceRunner` where an accelerator's kernels run all of it, else `StepRunner`."""

from __future__ import annotations

from collections.abc import Sequence

from verifier_service.models import LoadedTarget
from verifier_service.runner import StepRunner
from verifier_service.shards import Bounds, Crew


def runner_for(target: LoadedTarget, bounds: Bounds, buckets: Sequence[int], crew: Crew | None = None) -> StepRunner:
    """Make the runner for a target and its device."""
    if not target.by_kernels:
        return StepRunner(target, bounds, buckets, crew)
    from verifier_service.device import DeviceRunner

    return DeviceRunner(target, bounds, buckets, crew)
