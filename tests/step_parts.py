"""What the parts around a target's layers cost a step: the library's code against a forward by its parts, and the slots
of rows in NumPy against the kernel. Run by hand; the answer of both ways is the same.

    python -m tests.step_parts [CONFIG]

Steps of the first target after 400 tokens, and steps of prompts whose last row alone is wanted, run in each of three
ways, in turn and in random order. Prints medians of each way, and of the differences in pairs with their quartiles.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from dendro.shapes import LevelShape
from dendro.tree import DraftTree, full_tree
from tree_kernels.row_slots import cpu

from cluster.config import Config
from cluster.demo.real_pair import real_config
from cluster.hub import fetched, pinned
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions
from verifier_service.rows import text_rows
from verifier_service.runner import StepRunner

STEPS, PROMPT_STEPS = 240, 40
"""Steps of each way, after the 400 tokens and of prompts."""
PROMPTS = (16, 64, 256)
"""Tokens of the prompts."""
IDS = [(37 * place) % 200 + 3 for place in range(400)]
THREADS = 2
TREES = {
    "1 row": DraftTree.root_only(IDS[-1]),
    "5 rows": full_tree(IDS[-1], LevelShape((1, 1, 1, 1)), [[5], [6], [7], [8]]),
    "16 rows": full_tree(IDS[-1], LevelShape((3, 2, 1)), [[5, 6, 7], [8, 9] * 3, [10] * 6]),
}
WAYS = {"library": (False, False), "slots by the kernel": (True, False), "and by parts": (True, True)}
"""By name: whether the kernel computes slots, and whether the target runs by its parts."""


def loaded(config: Config) -> VerifierEngine:
    """The engine of the first target."""
    target = next(iter(fetched(pinned(config)).targets.values()))
    dtype = getattr(torch, target.dtype)
    options = VerifierOptions(name="measured", max_sessions=1, dtype=dtype, threads=THREADS)
    return VerifierEngine.load(target.checkpoint, options)


def read_prompt(runner: StepRunner, tokens: int) -> None:
    """One step of a prompt."""
    window, rows = runner.target.window, np.arange(tokens)
    plan = text_rows(IDS[:tokens], rows, None, runner.own_pages, runner.pages.scratch, runner.near, window)
    with torch.inference_mode():
        runner.forward(replace(plan, wanted=rows[-1:]))


def main(config: Config) -> None:
    runner, kernel = loaded(config).runner, cpu.row_slots_kernel()
    direct = runner.target.direct
    if kernel is None or direct is None:
        sys.exit("this target runs in the library's code, or this machine compiles no kernels")
    measured: dict[str, tuple[int, Callable[[], object]]] = {
        name: (STEPS, partial(runner.tree_logits, IDS, tree)) for name, tree in TREES.items()
    }
    measured |= {f"prompt of {tokens}": (PROMPT_STEPS, partial(read_prompt, runner, tokens)) for tokens in PROMPTS}
    for name, (steps, run) in measured.items():
        took_ms: dict[str, list[float]] = {way: [] for way in WAYS}
        for step in range(steps):
            for way in random.Random(step).sample(list(WAYS), len(WAYS)):
                by_kernel, by_parts = WAYS[way]
                cpu.row_slots_kernel = (lambda: kernel) if by_kernel else (lambda: None)
                object.__setattr__(runner.target, "direct", direct if by_parts else None)
                began = time.perf_counter()
                run()
                took_ms[way].append(1e3 * (time.perf_counter() - began))
        for way, its in took_ms.items():
            less = [before - after for before, after in zip(took_ms["library"], its, strict=True)]
            low, middle, high = statistics.quantiles(less, n=4)
            print(
                f"{name:13} {way:20} {statistics.median(its):6.2f} ms, less by {middle:.2f} ({low:.2f} to {high:.2f})"
            )


if __name__ == "__main__":
    main(Config.load(Path(sys.argv[1])) if len(sys.argv) > 1 else real_config())
