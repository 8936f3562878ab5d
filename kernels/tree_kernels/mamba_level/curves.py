"""exp, log, SiLU, softplus and roots of float32 numbers without calls, so that LLVM computes vectors of them.

Relative errors are below 2.5e-7. Imported only while kernels are compiled.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float32, njit, types, uint32
from numba.extending import intrinsic

from tree_kernels.translating import INLINED
from tree_kernels.vectors import bits_of, float_of, fused_multiply_add

_curve = njit(**INLINED)

LOG2E, LN2_HIGH, LN2_LOW = float32(1.44269504), float32(0.693145752), float32(1.42860677e-06)
ROUNDER = float32(12582912.0)
"""1.5 * 2**23: adding it rounds to a whole number, which is then in the low bits."""
LOWEST, HIGHEST = float32(-87.3), float32(88.3)
"""exp is a normal number between them; below, this exp is 0, and above, infinite."""
INFINITE = float32(float("inf"))
SQRT_HALF_BITS = uint32(0x3F3504F3)


@_curve
def exponential(x: float) -> float:
    """e**x. 0 below LOWEST, infinite above HIGHEST; a NaN stays one."""
    inside = HIGHEST if x > HIGHEST else x
    inside = LOWEST if inside < LOWEST else inside
    shifted = fused_multiply_add(inside, LOG2E, ROUNDER)
    whole = shifted - ROUNDER
    rest = fused_multiply_add(-whole, LN2_LOW, fused_multiply_add(-whole, LN2_HIGH, inside))
    sum_ = float32(1.98756912e-4)
    sum_ = fused_multiply_add(sum_, rest, float32(1.39819994e-3))
    sum_ = fused_multiply_add(sum_, rest, float32(8.33345205e-3))
    sum_ = fused_multiply_add(sum_, rest, float32(4.16657962e-2))
    sum_ = fused_multiply_add(sum_, rest, float32(1.66666657e-1))
    sum_ = fused_multiply_add(sum_, rest, float32(0.5))
    sum_ = fused_multiply_add(sum_ * rest, rest, rest) + float32(1.0)
    scale = float_of((bits_of(shifted) << uint32(23)) + uint32(0x3F800000))
    number = float32(0.0) if x < LOWEST else sum_ * scale
    return INFINITE if x > HIGHEST else number


@_curve
def log_of_one_plus(u: float) -> float:
    """log(1 + u) of u >= 0."""
    whole = float32(1.0) + u
    lost = u - (whole - float32(1.0))  # the rounding error of the sum
    shifted = bits_of(whole) - SQRT_HALF_BITS
    exponent = float32(uint32(shifted >> uint32(23)))
    fraction = float_of((shifted & uint32(0x7FFFFF)) + SQRT_HALF_BITS) - float32(1.0)
    square = fraction * fraction
    sum_ = float32(7.0376836e-2)
    sum_ = fused_multiply_add(sum_, fraction, float32(-1.1514610e-1))
    sum_ = fused_multiply_add(sum_, fraction, float32(1.1676999e-1))
    sum_ = fused_multiply_add(sum_, fraction, float32(-1.2420141e-1))
    sum_ = fused_multiply_add(sum_, fraction, float32(1.4249323e-1))
    sum_ = fused_multiply_add(sum_, fraction, float32(-1.6668057e-1))
    sum_ = fused_multiply_add(sum_, fraction, float32(2.0000714e-1))
    sum_ = fused_multiply_add(sum_, fraction, float32(-2.4999994e-1))
    sum_ = fused_multiply_add(sum_, fraction, float32(3.3333331e-1))
    small = fused_multiply_add(sum_ * square, fraction, float32(-0.5) * square)
    small = fused_multiply_add(exponent, LN2_LOW, small) + lost / whole
    return fused_multiply_add(exponent, LN2_HIGH, fraction + small)


@_curve
def softplus(x: float) -> float:
    """log(1 + e**x); x above 20, as torch's."""
    return x if x > float32(20.0) else log_of_one_plus(exponential(x))


@_curve
def silu(x: float) -> float:
    """x / (1 + e**-x)"""
    return x / (float32(1.0) + exponential(-x))


@intrinsic
def square_root(typingctx: Any, number: Any) -> Any:
    """The root of a float32, by the processor's instruction; `math.sqrt` calls the C library."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        root = builder.module.declare_intrinsic("llvm.sqrt", [ir.FloatType()])
        return builder.call(root, arguments)

    return types.float32(types.float32), generate
