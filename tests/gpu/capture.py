"""Records all of a verifier's steps as graphs while another thread allocates; then reports row independence."""

from __future__ import annotations

import threading
import time

import torch
from dendro.tree import DraftTree

from tests.gpu.random_target import BUCKETS, runner_of
from tests.gpu.step import DEVICE, require_device, write_result

KINDS_OF_DRAWING = 3


def allocate(stop: threading.Event) -> None:
    """Ask the driver for memory again and again, as another engine in the process would."""
    while not stop.is_set():
        torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        time.sleep(0.002)


def main() -> None:
    require_device()
    with torch.inference_mode():
        runner = runner_of(width=1024, layers=8)
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
    wanted = KINDS_OF_DRAWING * len(BUCKETS) if DEVICE.type == "cuda" else 0
    recordings = runner.recordings
    recorded, failures = (len(recordings.made), recordings.failures.total()) if recordings is not None else (0, 0)
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
