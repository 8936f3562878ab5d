"""Times the convolution, folds and weights, and scan of a layer of a Mamba-2 target, of 2.7 billion parameters, by
settings of the scan. The file named by OLD_SCAN, another `tree_scan/triton.py` of the same functions, is timed too."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tree_kernels.tree_conv.triton import ConvWeights, KeptRows, conv_rows
from tree_kernels.tree_scan import TokenInputs
from tree_kernels.tree_scan import triton as scans

from tests.gpu.step import DEVICE, DRY, require_device, seconds, write_result

BLOCK, TAPS = 16, 4
HEADS, WIDTH, SIZE = (2, 8, 16) if DRY else (80, 64, 128)
CASES = ((1, 3),) if DRY else ((1, 1), (1, 32), (8, 1), (8, 32), (32, 16))
"""Texts, and rows of each."""
SETTINGS = ((8, 64),) if DRY else ((8, 64), (4, 64), (8, 32), (4, 32))
"""Warps of a program of the scan, and numbers of a state's width that it multiplies at a time; the served first."""
REPEATS = 1 if DRY else 20


class ScanCase:
    """A step's rows, random."""

    def __init__(self, texts: int, rows: int) -> None:
        rng = np.random.default_rng(0)
        torch.manual_seed(0)
        count, channels = texts * rows, HEADS * WIDTH + 2 * SIZE
        self.ring = 1 + texts * 3 * BLOCK
        kind = torch.bfloat16
        self.kept = KeptRows(
            torch.randn(self.ring + count, channels, device=DEVICE).to(kind),
            torch.randn(self.ring + count, HEADS, WIDTH, device=DEVICE).to(kind),
            torch.randn(self.ring + count, 1, SIZE, device=DEVICE).to(kind),
            F.softplus(torch.randn(self.ring + count, HEADS, device=DEVICE) - 3),
        )
        for each in self.kept:
            each[0] = 0
        self.states = torch.randn(1 + texts, HEADS, WIDTH, SIZE, device=DEVICE)
        self.room = torch.zeros(4, HEADS, WIDTH, SIZE, device=DEVICE)
        self.A, self.D = -torch.rand(HEADS, device=DEVICE) - 0.5, torch.randn(HEADS, device=DEVICE)
        weights = torch.randn(TAPS, channels, device=DEVICE), torch.randn(channels, device=DEVICE)
        self.by = ConvWeights(*weights, torch.randn(HEADS, device=DEVICE), (0.0, float("inf")))
        self.given = torch.randn(count, channels + HEADS, device=DEVICE).to(kind)
        self.columns, self.last = np.zeros((count, 2 * BLOCK), np.int64), np.zeros(count, np.int64)
        for text in range(texts):
            begin = 1 + 3 * BLOCK * text
            before = list(range(begin, begin + BLOCK + int(rng.integers(4, 9))))
            paths: list[list[int]] = []
            for row in range(rows):
                at = text * rows + row
                paths.append([*(paths[(row - 1) // 4] if row else before), self.ring + at])
                self.columns[at, : len(paths[-1])], self.last[at] = paths[-1], len(paths[-1])
        self.texts, self.rows = texts, rows

    def table(self, module: ModuleType) -> Any:
        most, items = module.ITEM_ROWS, []
        for text in range(self.texts):
            its = list(range(text * self.rows, (text + 1) * self.rows))
            for start in range(0, len(its), most):
                part = its[start : start + most]
                items.append([len(part), 1 + text, *part, *[0] * (most - len(part))])
        none = np.zeros((1, 2))
        arrays = (self.columns, self.last, items, none, np.zeros((1, BLOCK)), np.zeros((1, 2)), np.zeros(1))
        return module.ScanTable(*(torch.as_tensor(np.array(each), dtype=torch.int64, device=DEVICE) for each in arrays))

    def parts(self, module: ModuleType) -> tuple[dict[str, Callable[[], Any]], torch.Tensor]:
        """The launches of a layer by name, and the result."""
        table, channels = self.table(module), self.kept.raw.shape[1]
        rows = self.given[:, :channels], self.given[:, channels:]

        def convolve() -> Any:
            return conv_rows(*rows, self.kept, table.columns, table.last, self.ring, self.by)

        C, y = convolve()
        inputs = TokenInputs(*self.kept[1:])
        given = inputs, self.states, self.room, C, table, self.A
        weighed = module.fold_and_weigh(*given)
        found = {
            "conv": convolve,
            "fold and weigh": lambda: module.fold_and_weigh(*given),
            "scan": lambda: module.scan_rows(inputs, self.states, self.room, C, weighed, table, self.ring, self.D, y),
        }
        found["scan"]()
        return found, y


def us_of(call: Callable[[], Any]) -> float:
    """The device's time of a launch, of several in a graph."""
    if DEVICE.type == "cpu":
        return round(1e6 * seconds(call, 1), 1)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    return round(1e6 * seconds(graph.replay, 9) / REPEATS, 2)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("old_scan", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


require_device()
old = Path(os.environ["OLD_SCAN"]) if os.environ.get("OLD_SCAN") else None
found: list[dict[str, Any]] = []
for texts, rows in CASES:
    case = ScanCase(texts, rows)
    scale, truth = 0.0, None
    if old is not None:
        calls, truth = case.parts(loaded(old))
        found.append({"texts": texts, "rows": rows, "old": {name: us_of(call) for name, call in calls.items()}})
        print(found[-1], flush=True)
    for warps, part in SETTINGS:
        scans.SCAN_WARPS, scans.STATE_PART = warps, part
        calls, y = case.parts(scans)
        us = {name: us_of(call) for name, call in calls.items()}
        error = None if truth is None else float((y - truth).norm() / truth.norm())
        found.append({"texts": texts, "rows": rows, "warps": warps, "part": part, "us": us, "from_old": error})
        print(found[-1], flush=True)
    write_result("not finished", scans=found)
served = [each for each in found if (each.get("warps"), each.get("part")) == SETTINGS[0]]
line = ", ".join(f"{each['texts']} x {each['rows']}: {each['us']['scan']}" for each in served)
write_result(f"scan of a layer, us: {line}", scans=found)
