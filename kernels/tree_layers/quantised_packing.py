"""Weights of a GGUF file or an AWQ checkpoint that stay quantised where products then take less time.

A product of few rows takes the time of reading its weight; one of many rows that of multiplying, and unpacking takes
longer then. Both forms of a weight give the same bits, so times may choose among them: replicas that choose otherwise
compute the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from tree_kernels.kernel_cache import NoKernelsError
from tree_kernels.matmul import PackedWeight, why_not_packed
from tree_kernels.matmul.quantised import FewRowsWeight, QuantisedBlocks, QuantisedWeight
from tree_kernels.matmul.quantised_shapes import FORMS, QuantisedForm

from tree_layers.awq import AwqTensors
from tree_layers.awq_settings import AWQ
from tree_layers.checkpoint import Facts
from tree_layers.gguf_blocks import QuantisedTensors

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rows that are timed, the fewest first, until the unpacked weight is as fast."""
TRIALS = 9
LEAST_GAIN = 0.97
"""Most time of a packed weight that is used, as a share of the unpacked weight's time."""
TIMED_SHAPE = (24576, 1024)
"""Outputs and inputs of the weights that are timed: more than processors' caches hold."""

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
    """Blocks that fit, for measurements."""
    its = FORMS[form]
    scales = torch.rand(outputs, inputs // its.block, generator=generator).half() / 64
    kind = torch.float32 if its.wide else torch.float16
    fields = torch.randint(1 << its.bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    return QuantisedBlocks(form, fields, scales.to(kind), (scales * -4).to(kind) if its.offset else None)


@cache
def most_rows(form: QuantisedForm, threads: int, seconds: Timer = seconds_of) -> int:
    """The most rows of which products with a quantised weight take less time than with the unpacked one, and for which
    both have the same bits. 0: none; the last of ROWS: perhaps more, too."""
    generator = torch.Generator().manual_seed(0)
    blocks = random_blocks(form, *TIMED_SHAPE, generator)
    try:
        quantised = QuantisedWeight(blocks, None, threads)
    except NoKernelsError:
        return 0
    unpacked = PackedWeight(blocks.unpacked().bfloat16(), None, threads)
    found = 0
    for count in ROWS:
        rows = torch.randn(count, TIMED_SHAPE[1], generator=generator).bfloat16()
        if not torch.equal(quantised(rows), unpacked(rows)):
            return 0
        times = [(seconds(quantised, rows), seconds(unpacked, rows)) for _ in range(TRIALS)]
        shortest, plain = map(min, zip(*times, strict=True))  # other processes lengthen most of them
        if shortest > LEAST_GAIN * plain:
            break
        found = count
    return found


def quantised_packing(facts: Facts, model: nn.Module) -> QuantisedPacking | None:
    """Packing for a model that was loaded in bfloat16 from a GGUF file or from AWQ's weights, if products are this
    project's own; else None."""
    if next(model.parameters()).dtype != torch.bfloat16 or why_not_packed() or torch.cpu._is_amx_tile_supported():
        return None
    if facts.stored:
        return QuantisedPacking(QuantisedTensors(facts.folder, model))
    return QuantisedPacking(AwqTensors(facts.folder, model)) if facts.quantised == AWQ else None


class QuantisedPacking:
    """Packs a weight as PackedWeight does, quantised for as many rows as that takes less time."""

    def __init__(self, tensors: StoredTensors) -> None:
        self._tensors = tensors
        self._counts: Counter[str] = Counter()

    def __call__(
        self, weight: Tensor, bias: Tensor | None = None, threads: int = 1, dtype: torch.dtype | None = None
    ) -> PackedWeight:
        form = self._tensors.form_of(weight)
        most = 0 if form is None else most_rows(form, threads)
        blocks = self._tensors.blocks_of(weight) if most else None  # reading and comparing them takes time
        if blocks is None:
            return PackedWeight(weight, bias, threads, dtype)
        self._counts[f"{blocks.form.name} for " + (f"up to {most} rows" if most < ROWS[-1] else "any rows")] += 1
        if most < ROWS[-1]:
            return FewRowsWeight(weight, blocks, most, bias, threads, dtype)
        return QuantisedWeight(blocks, bias, threads, dtype or weight.dtype)

    def __str__(self) -> str:
        """The forms of the weights that have been packed and stay quantised, with their numbers."""
        return ", ".join(f"{count} {form}" for form, count in sorted(self._counts.items()))
