"""The loops, for numba. Imported only while they are compiled."""

from __future__ import annotations

from numba import float32, njit, uint32

from tree_kernels.mamba_level.curves import silu, square_root
from tree_kernels.matmul.loops import BF16, F16, F32, PAIRS, bf16_bits, finish, pair, widen
from tree_kernels.row_functions.shapes import SUMS, UNIT, GateArgument, NormArgument, WidenArgument
from tree_kernels.translating import INLINED
from tree_kernels.vectors import fetch_add, float_of, floats, half_bits, half_value, halves, longs

_called = njit(**INLINED)
(X, WEIGHT, NORMED, ROWS, WIDTH, NORM_KIND, NORMED_KIND, EPSILON, NORM_SCRATCH, NEXT_ROW) = (
    int(place) for place in NormArgument
)
(GATE, UP, GATED, GATE_COUNT, GATE_KIND, GATED_KIND, GATE_SCRATCH, NEXT_GATES) = (int(place) for place in GateArgument)
(SOURCE, WIDENED, COUNT, KIND, WIDENED_KIND, NEXT_NUMBERS) = (int(place) for place in WidenArgument)


@_called
def from_bf16(bits: int) -> float:
    return float_of(uint32(bits) << uint32(16))


@_called
def in_bf16(number: float) -> float:
    """The number rounded to bfloat16."""
    return from_bf16(bf16_bits(number))


@_called
def in_f16(number: float) -> float:
    """The number rounded to float16."""
    return half_value(half_bits(number))


@_called
def factor_of(squares: int, width: int, eps: float) -> float:
    """1 / sqrt(mean + eps) of the sum of `squares`, SUMS partial sums."""
    each = floats(squares)
    total = ((each[0] + each[4]) + (each[1] + each[5])) + ((each[2] + each[6]) + (each[3] + each[7]))
    return float32(1.0) / square_root(total / float32(width) + eps)


@_called
def size_of(kind: int) -> int:
    """Bytes of a number."""
    return 4 if kind == F32 else 2


@_called
def norm(x: int, weight: int, target: int, width: int, kind: int, target_kind: int, eps: float, scratch: int) -> None:
    """Compute one row."""
    squares, wide = floats(scratch), floats(scratch + 4 * SUMS)
    widen(x, scratch + 4 * SUMS, width, kind)
    for i in range(SUMS):
        squares[i] = float32(0.0)
    whole = width // SUMS
    for block in range(whole):
        for i in range(SUMS):
            squares[i] += wide[block * SUMS + i] * wide[block * SUMS + i]
    for i in range(width - whole * SUMS):
        squares[i] += wide[whole * SUMS + i] * wide[whole * SUMS + i]
    factor = factor_of(scratch, width, eps)
    weights, factors = halves(weight), floats(weight)
    if kind == BF16:
        for i in range(width):
            wide[i] = in_bf16(in_bf16(wide[i] * factor) * from_bf16(weights[i]))
    elif kind == F16:
        for i in range(width):
            wide[i] = in_f16(in_f16(wide[i] * factor) * half_value(weights[i]))
    else:
        for i in range(width):
            wide[i] = wide[i] * factor * factors[i]
    finish(scratch + 4 * SUMS, 0, target, width, target_kind)


def norms(call: int, thread: int) -> None:
    """RMS norms of rows, until none is left."""
    its = longs(call)
    width, kind, target_kind, eps = its[WIDTH], its[NORM_KIND], its[NORMED_KIND], float_of(uint32(its[EPSILON]))
    step, target_step = width * size_of(kind), width * size_of(target_kind)
    scratch = its[NORM_SCRATCH] + thread * (SUMS + width) * 4
    while True:
        row = fetch_add(call + NEXT_ROW * 8, 1)
        if row >= its[ROWS]:
            return
        norm(its[X] + row * step, its[WEIGHT], its[NORMED] + row * target_step, width, kind, target_kind, eps, scratch)


@_called
def gate_numbers(gate: int, up: int, target: int, count: int, kind: int) -> None:
    """Rounded numbers of this kind, as float32."""
    gates, ups = halves(gate), halves(up)
    wide_gates, wide_ups, made = floats(gate), floats(up), floats(target)
    if kind == BF16:
        for i in range(count):
            made[i] = in_bf16(in_bf16(silu(from_bf16(gates[i]))) * from_bf16(ups[i]))
    elif kind == F16:
        for i in range(count):
            made[i] = in_f16(in_f16(silu(half_value(gates[i]))) * half_value(ups[i]))
    else:
        for i in range(count):
            made[i] = silu(wide_gates[i]) * wide_ups[i]


def gates(call: int, thread: int) -> None:
    """SiLU of gates times other numbers, until none is left."""
    its = longs(call)
    kind, target_kind = its[GATE_KIND], its[GATED_KIND]
    size, target_size = size_of(kind), size_of(target_kind)
    while True:
        first = fetch_add(call + NEXT_GATES * 8, 1) * UNIT
        if first >= its[GATE_COUNT]:
            return
        count = min(UNIT, its[GATE_COUNT] - first)
        target = its[GATED] + first * target_size
        made = target if target_kind == F32 else its[GATE_SCRATCH] + thread * UNIT * 4
        gate_numbers(its[GATE] + first * size, its[UP] + first * size, made, count, kind)
        if target_kind != F32:
            finish(made, 0, target, count, target_kind)


def widened(call: int, thread: int) -> None:
    """Numbers as products take them, until none is left."""
    its = longs(call)
    size = size_of(its[KIND])
    while True:
        first = fetch_add(call + NEXT_NUMBERS * 8, 1) * UNIT
        if first >= its[COUNT]:
            return
        count = min(UNIT, its[COUNT] - first)
        if its[WIDENED_KIND] == PAIRS:
            pair(its[SOURCE] + first * size, its[WIDENED] + first * size, count)
        else:
            widen(its[SOURCE] + first * size, its[WIDENED] + first * 4, count, its[KIND])


KERNELS = {"norms": (norms, "ii"), "gates": (gates, "ii"), "widened": (widened, "ii")}
