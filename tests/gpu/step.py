"""The device, result file and timing that the steps of `make gpu` share."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

DRY = "--dry" in sys.argv[1:]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def require_device() -> None:
    """Exit if there is no accelerator and the run is not dry, so that no CPU result is taken for an accelerator's."""
    if DEVICE.type == "cpu" and not DRY:
        sys.exit("there is no accelerator here; --dry runs on the CPU")


def write_result(summary: str, **found: Any) -> None:
    """Write the step's result for `run.py`: a line for its table, and values by name."""
    Path(os.environ["GPU_RESULT"]).write_text(json.dumps({"summary": summary, **found}))
    print(summary)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], times: int) -> float:
    """The median time of a call, after three that are not counted."""
    for _ in range(min(3, times)):
        call()
    took = []
    for _ in range(times):
        synchronize()
        began = time.perf_counter()
        call()
        synchronize()
        took.append(time.perf_counter() - began)
    return median(took)
