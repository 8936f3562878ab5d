"""A target with random weights on the device, for the steps that measure."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tests.gpu.step import DEVICE, DRY
from tests.support.device_runners import device_runner
from tests.support.tiny_models import make_checkpoint
from verifier_service.device import DeviceRunner
from verifier_service.models import load_target
from verifier_service.recurrent import Arrangement
from verifier_service.runner import buckets_up_to
from verifier_service.shards import Bounds

BUCKETS = (8,) if DRY else buckets_up_to(256)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def runner_of(width: int, layers: int) -> DeviceRunner:
    """A Llama in bfloat16, with heads of 64 channels; in a dry run the one of SMALL, in float32."""
    large = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
    }
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), **(SMALL if DRY else large))
        target = load_target(Path(folder), torch.float32 if DRY else torch.bfloat16, DEVICE, BUCKETS)
    return device_runner(target, Bounds(16, 64, 8, 8, 8, Arrangement.of(8, 16, 8, BUCKETS[-1])), BUCKETS)
