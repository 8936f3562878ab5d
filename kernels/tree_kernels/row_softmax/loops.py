"""The loops, for numba. Imported only while they are compiled; `cpu.py` calls the machine code."""

from __future__ import annotations

import math

from numba import float32, float64, njit

from tree_kernels.mamba_level.curves import exponential, log_of_one_plus
from tree_kernels.row_softmax import shapes
from tree_kernels.translating import INLINED
from tree_kernels.vectors import doubles, floats, longs

inlined = njit(**INLINED)
LANES = shapes.LANES


@inlined
def greatest(scores: int, count: int, spare: int) -> float:
    """The greatest score. A NaN is skipped."""
    given, most = floats(scores), floats(spare)
    for i in range(LANES):
        most[i] = float32(-math.inf)
    whole = count // LANES
    for block in range(whole):
        for i in range(LANES):
            score = given[block * LANES + i]
            most[i] = score if score > most[i] else most[i]
    for i in range(count - whole * LANES):
        score = given[whole * LANES + i]
        most[i] = score if score > most[i] else most[i]
    found = most[0]
    for i in range(1, LANES):
        found = most[i] if most[i] > found else found
    return found


@inlined
def total(numbers: int, count: int, spare: int) -> float:
    """The sum of float32 numbers, in float64."""
    given, sums = floats(numbers), doubles(spare)
    for i in range(LANES):
        sums[i] = 0.0
    whole = count // LANES
    for block in range(whole):
        for i in range(LANES):
            sums[i] += float64(given[block * LANES + i])
    for i in range(count - whole * LANES):
        sums[i] += float64(given[whole * LANES + i])
    found = 0.0
    for i in range(LANES):
        found += sums[i]
    return found


def softmax(call: int) -> None:
    """The law of each row, its greatest score, and the logarithm of its sum."""
    its = longs(call)
    width, spare = its[shapes.WIDTH], its[shapes.SPARE]
    tops, logs = floats(its[shapes.GREATEST]), floats(its[shapes.LOG_SUM])
    for row in range(its[shapes.ROWS]):
        scores, law = its[shapes.SCORES] + row * width * 4, its[shapes.LAW] + row * width * 4
        given, made = floats(scores), floats(law)
        top = greatest(scores, width, spare)
        for i in range(width):
            made[i] = exponential(given[i] - top)
        mass = total(law, width, spare)
        scale = float32(1.0 / mass)
        for i in range(width):
            made[i] = made[i] * scale
        tops[row], logs[row] = top, log_of_one_plus(float32(mass - 1.0))


KERNELS = {"softmax": (softmax, "i")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
