"""Weights of a GGUF file or an AWQ checkpoint that stay quantised where products then take less time.

A product of few rows takes the time of reading its weight; one of many rows that of multiplying, and unpacking takes
longer then. Both forms of a weight give the same bits, so times may choose among them: replicas that choose otherwise
compute the same.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Protocol

import torch
from torch import Tensor, nn
from tree_kernels.kernel_cache import NoKernelsError
from tree_kernels.matmul import PackedWeight, RowLimit, why_not_packed
from tree_kernels.matmul.quantised import ANY_ROWS, FewRowsWeight, QuantisedBlocks, QuantisedWeight
from tree_kernels.matmul.quantised_shapes import FORMS, QuantisedForm

from tree_layers.awq import AwqTensors
from tree_layers.awq_settings import AWQ
from tree_layers.checkpoint import Facts
from tree_layers.gguf_blocks import QuantisedTensors

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
"""Numbers of rows that are timed, the fewest first, until unpacked weights are as fast at LOSSES of them in a row."""
LOSSES = 2
TRIALS = 15
LEAST_GAIN = 0.99
"""Quantised weights are used if a step with them takes at most this share of its time with unpacked weights."""
TIMED_SHAPE = (24576, 1024)
"""Outputs and inputs of the weights that are timed before a model's are read: more than processors' caches hold."""
HOPELESS = 1.1
"""Blocks of a form are not read if its product of one row takes more than this multiple of the unpacked weight's
time."""

Timer = Callable[[PackedWeight, Tensor], float]


class StoredTensors(Protocol):
    """The quantised weights of a model's files."""

    def form_of(self, weight: Tensor) -> QuantisedForm | None:
        """The form of a weight's blocks; None where there are none."""

    def blocks_of(self, weight: Tensor) -> QuantisedBlocks | None:
        """The blocks of a weight; None where there are none with its numbers."""


def seconds_of(weight: PackedWeight, rows: Tensor) -> float:
    """The time of a product."""
    begin = time.perf_counter()
    weight(rows)
    return time.perf_counter() - begin


def random_blocks(form: QuantisedForm, outputs: int, inputs: int, generator: torch.Generator) -> QuantisedBlocks:
    """Random blocks of a weight [outputs, inputs], for measurements."""
    its = FORMS[form]
    scales = torch.rand(outputs, inputs // its.block, generator=generator).half() / 64
    kind = torch.float32 if its.wide else torch.float16
    fields = torch.randint(1 << its.bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    return QuantisedBlocks(form, fields, scales.to(kind), (scales * -4).to(kind) if its.offset else None)


def rows_that_gain(seconds: Callable[[int], tuple[float, float]]) -> int:
    """The greatest number of rows, of those in ROWS, at which quantised weights take less time; 0 if they never do. If
    it is the last of ROWS, they may take less time with more rows, too.

    seconds: measures a step of the given number of rows: its time with quantised weights, and with unpacked ones. The
    two times of one call are compared, since other processes lengthen both; the first call for each number of rows is
    warm-up. A gain at more rows counts only if it is larger than the losses at fewer rows: it may be chance, and steps
    of fewer rows would pay for it.
    """
    found, losses, best, total = 0, 0, 0.0, 0.0
    for count in ROWS:
        ratios = [quantised / unpacked for quantised, unpacked in (seconds(count) for _ in range(1 + TRIALS))]
        gain = math.log(LEAST_GAIN / median(ratios[1:]))
        total += gain
        if gain >= 0 and total >= best:
            found, best = count, total
        losses = losses + 1 if gain < 0 else 0
        if losses == LOSSES:
            break
    return found


@cache
def may_gain(form: QuantisedForm, threads: int, seconds: Timer = seconds_of) -> bool:
    """True if products with quantised weights have the bits of those with unpacked ones here, and one of a single row
    does not take much longer."""
    generator = torch.Generator().manual_seed(0)
    blocks = random_blocks(form, *TIMED_SHAPE, generator)
    try:
        quantised = QuantisedWeight(blocks, None, threads)
    except NoKernelsError:
        return False
    unpacked = PackedWeight(blocks.unpacked().bfloat16(), None, threads)
    rows = torch.randn(ROWS[-1], TIMED_SHAPE[1], generator=generator).bfloat16()
    if not all(torch.equal(quantised(rows[:count]), unpacked(rows[:count])) for count in ROWS):
        return False
    ratios = [seconds(quantised, rows[:1]) / seconds(unpacked, rows[:1]) for _ in range(TRIALS)]
    return median(ratios) <= HOPELESS


def quantised_packing(facts: Facts, model: nn.Module) -> QuantisedPacking | None:
    """Packing for a model that was loaded in bfloat16 from a GGUF file or from AWQ's weights, if products are this
    project's own; else None."""
    if next(model.parameters()).dtype != torch.bfloat16 or why_not_packed():
        return None
    if facts.stored:
        return QuantisedPacking(QuantisedTensors(facts.folder, model))
    return QuantisedPacking(AwqTensors(facts.folder, model)) if facts.quantised == AWQ else None


class QuantisedPacking:
    """Packs a weight as PackedWeight does, and quantised beside it; `settle` decides which form is used."""

    def __init__(self, tensors: StoredTensors) -> None:
        self._tensors = tensors
        self._limit = RowLimit(ROWS[-1])
        self._packed: list[FewRowsWeight] = []
        self._counts: Counter[QuantisedForm] = Counter()

    def __call__(
        self, weight: Tensor, bias: Tensor | None = None, threads: int = 1, dtype: torch.dtype | None = None
    ) -> PackedWeight:
        form = self._tensors.form_of(weight)
        # Reading and comparing blocks takes time, so it is done only for forms that may gain.
        blocks = self._tensors.blocks_of(weight) if form is not None and may_gain(form, threads) else None
        if blocks is None:
            return PackedWeight(weight, bias, threads, dtype)
        packed = FewRowsWeight(weight, blocks, self._limit, bias, threads, dtype)
        self._packed.append(packed)
        self._counts[blocks.form] += 1
        return packed

    def settle(self, run: Callable[[int], object]) -> None:
        """Choose for how many rows products use the quantised weights, by the times of steps with both forms, and free
        a form that is then never used.

        run: runs a step of the given number of rows. Timing single products would not do: in a step small weights wait
        for each other.
        """
        if not self._packed:
            return

        def seconds(rows: int) -> tuple[float, float]:
            took = []
            for self._limit.rows in (rows, 0):
                begin = time.perf_counter()
                run(rows)
                took.append(time.perf_counter() - begin)
            return took[0], took[1]

        self._limit.rows = rows_that_gain(seconds)
        if self._limit.rows in (0, ROWS[-1]):
            self._limit.rows = self._limit.rows and ANY_ROWS
            for each in self._packed:
                each.free_unused()

    def __str__(self) -> str:
        """The forms of the weights that have been packed and stay quantised, with their numbers."""
        if not self._limit.rows:
            return ""
        forms = ", ".join(f"{count} {form.name}" for form, count in sorted(self._counts.items()))
        return forms and f"{forms} for " + (
            f"up to {self._limit.rows} rows" if self._limit.rows < ANY_ROWS else "any rows"
        )
