"""The products of a decode step: ours, also with quantised weights, and the library's beside the times to read the
weights and to multiply."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from tree_kernels.matmul import PackedWeight, why_not_packed
from tree_kernels.matmul.quantised import QuantisedWeight
from tree_kernels.matmul.quantised_shapes import QuantisedForm
from tree_layers.linear import can_be_packed, packed_product
from tree_layers.quantised_packing import random_blocks

from cluster.measure.measurement import Step
from cluster.measure.report import aim_row
from cluster.measure.statistics import Estimate, median_estimate

SHAPES = ((384, 21760), (21760, 384), (2048, 8192))
"""Inputs and outputs: the costly target's MLP, and a square-ish layer of a model of 1 to 2 billion parameters."""
OURS, PLAIN, PACKED, READ, MULTIPLY = "ours", "torch", "torch packed", "reading", "multiplying"
SQUARE = 384
"""Rows, inputs and outputs of the product whose rate is the processor's: 1.8 MB, which caches hold."""
COLD_BYTES = 128 << 20
"""Products go through so many bytes of weights before one is used again, so that it is read from memory."""
LEAST_SECONDS = 2e-3
"""A measurement repeats a product until it has taken so long."""
BARS = (
    ("reading, up to 8 rows", "over_reading", 1.3, range(1, 9)),
    ("reading, 16 rows", "over_reading", 2.0, range(16, 17)),
    ("library's best, from 32 rows", "over_library", 1.1, range(32, 1 << 20)),
)
"""Ours is at most so many times another time, for these numbers of rows."""


class TimedProduct(Protocol):
    """What is measured of one product."""

    @property
    def name(self) -> str: ...

    def seconds(self, x: Tensor) -> float: ...


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


def products_of(inputs: int, outputs: int, dtype: torch.dtype, threads: int) -> list[TimedProduct]:
    """Every way that can be had here, the reading of the weights and the multiplying. All have weights of their own."""
    copies = max(1, -(-COLD_BYTES // (inputs * outputs * dtype.itemsize)))
    generator = torch.Generator().manual_seed(0)
    weights = [(torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype) for _ in range(copies)]

    def reading(weight: Tensor) -> Callable[[Tensor], Tensor]:
        words = weight.view(-1).view(torch.int64)
        return lambda x: words.sum()

    def plain(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: F.linear(x, weight)

    found: list[TimedProduct] = [
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
    products: Sequence[TimedProduct], rows: Sequence[int], repetitions: int, x: Tensor, step: Step
) -> Iterator[dict[str, Any]]:
    """One row of the report for each number of rows. All ways are measured in turn in each repetition."""
    for count in rows:
        given = x[:count].contiguous()
        times: dict[str, list[float]] = {each.name: [] for each in products}
        with torch.inference_mode():
            for repetition in range(repetitions + 1):
                for each in products:
                    seconds = each.seconds(given)
                    if repetition:  # the first one warms up
                        times[each.name].append(seconds)
        step()
        yield {
            "rows": count,
            "ms": {name: median_estimate([1e3 * second for second in own]).as_json() for name, own in times.items()},
            **ratios_of(times),
            "over_ours": {
                form.name: _ratio(times[form.name], times[OURS]).as_json()
                for form in QuantisedForm
                if form.name in times
            },
        }


def ratios_of(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Ours over the reading, over the larger of reading and multiplying, and over the library's best, paired by
    repetition; None without ours.

    The library's best is the way with the smallest median.
    """
    if OURS not in times:
        return {"over_reading": None, "over_bound": None, "over_library": None}
    library = min(
        (own for name, own in times.items() if name in (PLAIN, PACKED)), key=lambda own: sorted(own)[len(own) // 2]
    )
    return {
        "over_reading": _ratio(times[OURS], times[READ]).as_json(),
        "over_bound": _ratio(times[OURS], list(map(max, times[READ], times[MULTIPLY]))).as_json(),
        "over_library": _ratio(times[OURS], library).as_json(),
    }


def _ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    return median_estimate([mine / its for mine, its in zip(over, under, strict=True)])


def rows_agree(products: Sequence[TimedProduct], rows: Sequence[int], x: Tensor) -> bool | None:
    """Whether each row of ours has the same bits for all these numbers of rows; None without ours."""
    ours = next((each for each in products if each.name == OURS), None)
    if not isinstance(ours, Products):
        return None
    form = ours.forms[0]
    truth = form(x)
    return all(torch.equal(form(x[:count].contiguous()), truth[:count]) for count in rows)


def aims_of(tables: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bars of each shape, judged at the upper end of the interval."""
    found = []
    for table in tables:
        name = f"{table['inputs']} x {table['outputs']}"
        for label, key, bar, judged_rows in BARS:
            values = [row[key] for row in table["rows"] if row["rows"] in judged_rows]
            if not values:
                continue
            estimates = [Estimate.of(value) for value in values if value is not None]
            worst = max(estimates, key=lambda estimate: estimate.high, default=None)
            met = None if worst is None else worst.high <= bar
            why = "" if worst is not None else f"ours is not available: {why_not_packed()}"
            found.append(aim_row(f"{name}: ours over the {label}", bar, met, worst, why, judged="high"))
    return found
