"""Are all of a verifier's steps recorded as graphs at load, also while another thread allocates, and replayed right?"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import torch
from dendro.tree import DraftTree
from step import DEVICE, DRY, require_device, write_result
from tiny_models import make_checkpoint

from verifier_service.device import DeviceRunner
from verifier_service.models import load_target
from verifier_service.recurrent import Arrangement
from verifier_service.runner import buckets_up_to
from verifier_service.shards import Bounds

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
KINDS_OF_DRAWING = 3


def allocate(stop: threading.Event) -> None:
    """What another engine in the process does meanwhile: memory is asked of the driver again and again."""
    while not stop.is_set():
        torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        time.sleep(0.002)


def main() -> None:
    require_device()
    buckets = (8,) if DRY else buckets_up_to(256)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = Path(folder)
        make_checkpoint(path, **(SMALL if DRY else LARGE))
        target = load_target(path, torch.float32 if DRY else torch.bfloat16, DEVICE, buckets)
        bounds = Bounds(16, 64, 8, 8, 8, Arrangement.of(8, 16, 8, buckets[-1]))
        runner = DeviceRunner(target, bounds, buckets)
        stop = threading.Event()
        other = threading.Thread(target=allocate, args=(stop,))
        other.start()
        began = time.perf_counter()
        try:
            runner.warm_up()
        finally:
            stop.set()
            other.join()
        took_s = time.perf_counter() - began
        differ = runner.check_rows()
        tree = DraftTree.of([7, 8, 9, 10], [-1, 0, 0, 1])
        finite = bool(runner.tree_logits([5, 6, 7], tree).isfinite().all())
    wanted = KINDS_OF_DRAWING * len(buckets) if DEVICE.type == "cuda" else 0
    recorded, failures = len(runner._recorded), sum(runner._failures.values())
    rows = f"differ: {', '.join(differ)}" if differ else "independent"
    no_graphs = "no graphs on a CPU; " if DEVICE.type == "cpu" else ""
    write_result(
        f"{no_graphs}{recorded} of {wanted} recorded in {took_s:.1f} s, {failures} attempts failed; rows {rows}",
        recorded=recorded,
        wanted=wanted,
        failures=failures,
        seconds=took_s,
        differ=differ,
    )
    assert recorded == wanted, "a step was not recorded"
    assert finite, "logits are not finite"


main()
