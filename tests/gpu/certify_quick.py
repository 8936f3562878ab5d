"""`dendro certify --local --quick` of a demo pair in bfloat16, the target on the device: `target`, or the one that is
named, such as `target_mamba2`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict

from cluster.certify.command import QUICK, CertifySize, run_certify
from cluster.config import Config, demo_models, pair_config
from tests.gpu.step import DEVICE, DRY, require_device, write_result

TINY = CertifySize(
    greedy_prompts=1,
    greedy_tokens=8,
    prompts=1,
    tokens=4,
    draws=500,
    far_draws=20,
    own_prompts=1,
    own_tokens=8,
    stop_draws=2,
    combinations=3,
)


def on_the_device(config: Config) -> Config:
    """The configuration with its targets on the accelerator, if there is one."""
    if DEVICE.type == "cpu":
        return config
    targets = {
        name: target.model_copy(update={"resources": target.resources.model_copy(update={"gpu": 1.0})})
        for name, target in config.targets.items()
    }
    return config.model_copy(update={"targets": targets})


require_device()
target = next((each for each in sys.argv[1:] if not each.startswith("-")), "target")
models = demo_models()
config = on_the_device(pair_config(models / target, [models / "mamba2"], speculation={"proposers": ["lookup"]}))
promises = asyncio.run(run_certify(config, None, True, TINY if DRY else QUICK, lambda *_: lambda: None, print))
kept = sum(promise.kept is True for promise in promises)
write_result(f"{kept} of {len(promises)} promises kept", promises=[asdict(promise) for promise in promises])
sys.exit(kept < len(promises))
