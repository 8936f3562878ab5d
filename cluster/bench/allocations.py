"""Bytes of torch tensors that a call allocates, by torch.profiler. Allocations of other libraries are not counted."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], Any]) -> int:
    """Peak bytes of torch tensors allocated by the call, its result included."""
    return max(accumulate(_changes(run)), default=0)


def held_bytes(run: Callable[[], Any]) -> int:
    """Bytes of torch tensors that the call's result holds."""
    return sum(_changes(run))


def _changes(run: Callable[[], Any]) -> list[int]:
    """Bytes allocated, or released if negative, in order, until just before the call's result is dropped."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler's lines at its start and end
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            kept = run()
        profiler.export_chrome_trace(str(trace))
        del kept
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(each["ts"], each["args"]["Bytes"]) for each in events if each.get("name") == "[memory]"]
    return [change for _, change in sorted(changes, key=lambda each: each[0])]
