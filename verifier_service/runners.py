"""Which runner a target gets: on an accelerator with captured steps, sharded, or plain."""

from __future__ import annotations

from collections.abc import Sequence

from verifier_service.models import Target
from verifier_service.runner import Runner
from verifier_service.shards import Bounds, Crew


def runner_for(target: Target, bounds: Bounds, buckets: Sequence[int], crew: Crew | None = None) -> Runner:
    """The runner for the target's device."""
    if target.model.device.type == "cpu" or target.mixers:
        return Runner(target, bounds, buckets, crew)
    from verifier_service.device import DeviceRunner

    return DeviceRunner(target, bounds, buckets, crew)
