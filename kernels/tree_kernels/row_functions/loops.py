"""The loops, for numba. Imported only while they are compiled."""

from __future__ import annotations

from numba import float32, njit, uint32

from tree_kernels.mamba_level.curves import silu, square_root
from tree_kernels.matmul.loops import BF16, F16, bf16_bits
from tree_kernels.row_functions.shapes import SUMS
from tree_kernels.translating import INLINED
from tree_kernels.vectors import float_of, floats, half_bits, half_value, halves

_called = njit(**INLINED)


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


def rms_norm(x: int, weight: int, target: int, rows: int, width: int, precision: int, scratch: int, eps: float) -> None:
    """x, target [rows, width], weight [width] of this precision; scratch SUMS + width float32."""
    squares, wide = floats(scratch), floats(scratch + 4 * SUMS)
    narrow, weights, made = halves(x), halves(weight), halves(target)
    numbers, factors, results = floats(x), floats(weight), floats(target)
    for row in range(rows):
        start = row * width
        if precision == BF16:
            for i in range(width):
                wide[i] = from_bf16(narrow[start + i])
        elif precision == F16:
            for i in range(width):
                wide[i] = half_value(narrow[start + i])
        else:
            for i in range(width):
                wide[i] = numbers[start + i]
        for i in range(SUMS):
            squares[i] = float32(0.0)
        whole = width // SUMS
        for block in range(whole):
            for i in range(SUMS):
                squares[i] += wide[block * SUMS + i] * wide[block * SUMS + i]
        for i in range(width - whole * SUMS):
            squares[i] += wide[whole * SUMS + i] * wide[whole * SUMS + i]
        factor = factor_of(scratch, width, eps)
        if precision == BF16:
            for i in range(width):
                made[start + i] = bf16_bits(in_bf16(wide[i] * factor) * from_bf16(weights[i]))
        elif precision == F16:
            for i in range(width):
                made[start + i] = half_bits(in_f16(wide[i] * factor) * half_value(weights[i]))
        else:
            for i in range(width):
                results[start + i] = wide[i] * factor * factors[i]


def gated_silu(gate: int, up: int, target: int, count: int, precision: int) -> None:
    """gate, up, target: `count` numbers of this precision."""
    gates, ups, made = halves(gate), halves(up), halves(target)
    wide_gates, wide_ups, results = floats(gate), floats(up), floats(target)
    if precision == BF16:
        for i in range(count):
            made[i] = bf16_bits(in_bf16(silu(from_bf16(gates[i]))) * from_bf16(ups[i]))
    elif precision == F16:
        for i in range(count):
            made[i] = half_bits(in_f16(silu(half_value(gates[i]))) * half_value(ups[i]))
    else:
        for i in range(count):
            results[i] = silu(wide_gates[i]) * wide_ups[i]


KERNELS = {"rms_norm": (rms_norm, "iiiiiiif"), "gated_silu": (gated_silu, "iiiii")}
