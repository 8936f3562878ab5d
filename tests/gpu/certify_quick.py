"""`dendro certify --local --quick` of a pair in bfloat16, which is named by the kind of its target.

On an accelerator the pairs are the demo's, which has a Llama and a Mamba-2; the target is on the device. In a dry run
all kinds of `tiny_pairs.py` are certified, target and drafter with the forms of a GPU.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cluster.certify.command import QUICK, run_certify
from cluster.certify.promises import Promise
from cluster.config import Config, demo_models, pair_config
from tests.gpu.step import DRY, require_device, write_result
from tests.gpu.tiny_pairs import KINDS, TINY, configuration_of, write_pair
from tests.support.device_engines import serve_as_on_a_gpu, wait_for_interpreted_engines

OF_DEMO = {"llama": "target", "mamba2": "target_mamba2"}


def on_the_device(kind: str) -> Config:
    """The configuration of a demo pair with its target on the accelerator."""
    models = demo_models()
    config = pair_config(models / OF_DEMO[kind], [models / "mamba2"], speculation={"proposers": ["lookup"]})
    targets = {
        name: target.model_copy(update={"resources": target.resources.model_copy(update={"gpu": 1.0})})
        for name, target in config.targets.items()
    }
    return config.model_copy(update={"targets": targets})


def certified(config: Config, quick: bool) -> Coroutine[Any, Any, list[Promise]]:
    return run_certify(config, None, True, QUICK if quick else TINY, lambda *_: lambda: None, print)


def exactness_of(promises: list[Promise]) -> str:
    """What (b) found of the verifier's exactness."""
    lines = [line for promise in promises for line in promise.found if "exactness" in line]
    return "; ".join(lines) or "the verifier's exactness was not found"


def main(kind: str) -> bool:
    """Certify a pair of a kind; returns whether all promises are kept, in a dry run also whether the steps of the
    target and the levels of the drafter were recorded. A target with Mamba-1 mixers has no recorded steps on a GPU."""
    recorded: dict[str, int] = {}
    if DRY:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            made = serve_as_on_a_gpu(patch)
            wait_for_interpreted_engines(patch)
            pair = write_pair(Path(folder), kind)
            promises = asyncio.run(certified(configuration_of(pair, patch), quick=False))
            recorded = made.recordings()
    else:
        promises = asyncio.run(certified(on_the_device(kind), quick=True))
    kept = sum(promise.kept is True for promise in promises)
    counts = "".join(f"; {count} recorded {what}" for what, count in recorded.items())
    summary = f"{kind}: {kept} of {len(promises)} promises kept; {exactness_of(promises)}{counts}"
    write_result(summary, promises=[asdict(each) for each in promises], recorded=recorded)
    missed = [what for what, count in recorded.items() if not count and (kind, what) != ("mamba", "steps")]
    return kept == len(promises) and not missed


if __name__ == "__main__":
    require_device()
    (named,) = (each for each in sys.argv[1:] if each in KINDS)
    sys.exit(not main(named))
