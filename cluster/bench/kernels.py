"""`dendro bench kernels`: the products of a decode step, ours, also with quantised weights, and the library's, beside
the times to read the weights and to multiply."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tree_kernels.matmul import PackedWeight, why_not_packed
from tree_kernels.matmul.quantised import QuantisedWeight
from tree_kernels.matmul.quantised_shapes import QuantisedForm
from tree_layers.linear import can_be_packed, packed_product
from tree_layers.quantised_packing import random_blocks

from cluster.measure.bench import Aim, Bench, Plot, ReportTable, option
from cluster.measure.measurement import Begin, Step
from cluster.measure.report import Row
from cluster.measure.statistics import estimates, over

SHAPES = ((384, 21760), (21760, 384), (2048, 8192))
"""Inputs and outputs: the costly target's MLP, and a square-ish layer of a model of 1 to 2 billion parameters."""
OURS, PLAIN, PACKED, READ, MULTIPLY = "ours", "torch", "torch packed", "reading", "multiplying"
SQUARE = 384
"""Rows, inputs and outputs of the product whose rate is the processor's: 1.8 MB, which caches hold."""
COLD_BYTES = 128 << 20
"""Products go through so many bytes of weights before one is used again, so that it is read from memory."""
LEAST_SECONDS = 2e-3
"""A measurement repeats a product until it has taken so long."""
BITS = {True: "the same", False: "DIFFERENT", None: "not compared"}


class ProductDtype(StrEnum):
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class KernelsOptions:
    rows: tuple[int, ...] = option(
        "Numbers of rows, separated by commas.", (1, 2, 4, 8, 16, 32, 64, 128), (1, 8, 32), least=1
    )
    repetitions: int = option("Repetitions of each product.", 21, 5, least=1)
    dtype: ProductDtype = option("Of weights and rows.", ProductDtype.BFLOAT16)
    threads: int = option("Threads of a product.", 2, least=1, most=64)


@dataclass(frozen=True, slots=True)
class Products:
    """Copies of a weight, and one way to multiply by each."""

    name: str
    forms: tuple[Callable[[Tensor], Tensor], ...]

    def seconds(self, x: Tensor) -> float:
        """The time of one product, over copies in turn."""
        done, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < LEAST_SECONDS or done < len(self.forms):
            self.forms[done % len(self.forms)](x)
            done += 1
        return elapsed / done


class Multiplying:
    """The time that a product's multiply-adds take at the rate of the library's float32 product of two square matrices
    in a cache. Ours adds in float32, whatever the weights' type is."""

    name = MULTIPLY

    def __init__(self, inputs: int, outputs: int) -> None:
        self._weights = inputs * outputs
        square = torch.full((SQUARE, SQUARE), 0.5)
        self._square = Products(MULTIPLY, (lambda _: F.linear(square, square),))

    def seconds(self, x: Tensor) -> float:
        return self._square.seconds(x) * (len(x) * self._weights / SQUARE**3)


def products_of(inputs: int, outputs: int, dtype: torch.dtype, threads: int) -> list[Products | Multiplying]:
    """Every way that can be had here, the reading of the weights and the multiplying. All have weights of their own."""
    copies = max(1, -(-COLD_BYTES // (inputs * outputs * dtype.itemsize)))
    generator = torch.Generator().manual_seed(0)
    weights = [(torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype) for _ in range(copies)]

    def reading(weight: Tensor) -> Callable[[Tensor], Tensor]:
        words = weight.view(-1).view(torch.int64)
        return lambda x: words.sum()

    def plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: F.linear(x, weight)

    found: list[Products | Multiplying] = [
        Products(READ, tuple(map(reading, weights))),
        Multiplying(inputs, outputs),
        Products(PLAIN, tuple(map(plain, weights))),
    ]
    if can_be_packed(weights[0]):
        found.append(Products(PACKED, tuple(packed_product(weight, None) for weight in weights)))
    if not why_not_packed():
        found.append(Products(OURS, tuple(PackedWeight(weight, None, threads) for weight in weights)))
        for form in QuantisedForm if dtype == torch.bfloat16 else ():
            blocks = random_blocks(form, outputs, inputs, generator)
            found.append(Products(form.name, tuple(QuantisedWeight(blocks, None, threads) for _ in weights)))
    return found


def measure_products(
    products: Sequence[Products | Multiplying], rows: Sequence[int], repetitions: int, x: Tensor, step: Step
) -> Iterator[Row]:
    """One row of the report for each number of rows. All ways are measured in turn in each repetition."""
    for count in rows:
        given = x[:count].contiguous()
        times: dict[str, list[float]] = {each.name: [] for each in products}
        with torch.inference_mode():
            for _ in range(repetitions + 1):
                for each in products:
                    times[each.name].append(each.seconds(given))
        step()
        kept = {name: own[1:] for name, own in times.items()}  # the first repetition warms up
        yield {"rows": count, "ms": estimates(kept), **ratios_of(kept)}


def ratios_of(times: Mapping[str, Sequence[float]]) -> Row:
    """Ours over the reading, over the larger of reading and multiplying, and over the library's best; quantised weights
    over ours. None without ours. The library's best is the way with the smallest median."""
    if OURS not in times:
        return {"over_reading": None, "over_bound": None, "over_library": None, "over_ours": {}}
    ours = times[OURS]
    library = min((own for name, own in times.items() if name in (PLAIN, PACKED)), key=median)
    return {
        "over_reading": over(ours, times[READ]),
        "over_bound": over(ours, list(map(max, times[READ], times[MULTIPLY]))),
        "over_library": over(ours, library),
        "over_ours": {form.name: over(times[form.name], ours) for form in QuantisedForm if form.name in times},
    }


def rows_agree(products: Sequence[Products | Multiplying], rows: Sequence[int], x: Tensor) -> bool | None:
    """Whether each row of ours has the same bits for all these numbers of rows; None without ours."""
    for each in products:
        if isinstance(each, Products) and each.name == OURS:
            form = each.forms[0]
            truth = form(x)
            return all(torch.equal(form(x[:count].contiguous()), truth[:count]) for count in rows)
    return None


def measure(options: KernelsOptions, begin: Begin) -> dict[str, Any]:
    load, dtype = os.getloadavg()[0], getattr(torch, options.dtype)
    rows = []
    for inputs, outputs in SHAPES:
        step = begin(f"{inputs} x {outputs}", len(options.rows))
        ways = products_of(inputs, outputs, dtype, options.threads)
        x = torch.randn(options.rows[-1], inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        bits = BITS[rows_agree(ways, options.rows, x)]
        for row in measure_products(ways, options.rows, options.repetitions, x, step):
            rows.append({"inputs": inputs, "outputs": outputs, "bits": bits} | row)
    return {"plan": {"load": load, "why_not_ours": why_not_packed()}, "rows": rows}


KERNELS = Bench(
    "kernels",
    "Measure products of few rows on this processor: ours, torch's plain and packed ones, and the times to read the "
    "weights and to multiply. Weights come from memory, not from a cache. Reports whether a row's bits depend on the "
    "number of rows.",
    "1, 8 and 32 rows, five repetitions.",
    KernelsOptions,
    measure,
    facts=(
        "Load average at the start {load:.1f}; weights are read from memory: copies that no cache holds together take "
        "turns",
        "multiplying: the time of a product's multiply-adds at the rate of torch's float32 product of matrices in a "
        "cache, with the same threads",
        "Our products are not available: {why_not_ours}",
    ),
    tables=(
        ReportTable(
            "{inputs} x {outputs}; bits of a row for all numbers of rows: {bits}",
            "rows",
            "rows; * ms = ms/*:.2f; ours over reading = over_reading:.2f; ours over the larger of reading and "
            "multiplying = over_bound:.2f; ours over the library's best = over_library:.2f; "
            "* over ours = over_ours/*:.2f",
        ),
    ),
    aims=tuple(
        Aim(f"{{inputs}} x {{outputs}}: ours over the {label}", "rows", path, most=bar, end="high", where=where)
        for label, path, bar, where in (
            ("reading, up to 8 rows", "over_reading", 1.3, lambda row: row["rows"] <= 8),
            ("reading, 16 rows", "over_reading", 2.0, lambda row: row["rows"] == 16),
            ("library's best, from 32 rows", "over_library", 1.1, lambda row: row["rows"] >= 32),
        )
    ),
    plots=(Plot("rows", "rows", "time of a product * (ms) = ms/*", panel="{inputs} x {outputs}", log="xy"),),
    code=("kernels/tree_kernels/matmul", "kernels/tree_layers/linear.py"),
)
