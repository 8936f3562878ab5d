"""The loop of Philox4x32-10, for numba. Imported only while it is compiled; `cpu.py` calls the machine code."""

from __future__ import annotations

from numba import float64, njit, uint32, uint64

from tree_kernels.noise import shapes
from tree_kernels.noise.reference import KEY_STEPS, MULTIPLIERS, ROUNDS
from tree_kernels.translating import INLINED
from tree_kernels.vectors import doubles, longs

_called = njit(**INLINED)
MULTIPLIER0, MULTIPLIER1 = (int(each) for each in MULTIPLIERS)
STEP0, STEP1 = KEY_STEPS


@_called
def uniform(word: int) -> float:
    return (float64(word) + 0.5) * 2.0**-32


@_called
def philox_words(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """The four words of a counter after ten rounds. All are uint32."""
    for _ in range(ROUNDS):
        product0, product1 = uint64(c0) * uint64(MULTIPLIER0), uint64(c2) * uint64(MULTIPLIER1)
        c0 = uint32(product1 >> uint64(32)) ^ c1 ^ k0
        c2 = uint32(product0 >> uint64(32)) ^ c3 ^ k1
        c1, c3 = uint32(product1), uint32(product0)
        k0, k1 = uint32(k0 + uint32(STEP0)), uint32(k1 + uint32(STEP1))
    return c0, c1, c2, c3


def philox(call: int) -> None:
    """The uniform numbers of one position's blocks."""
    its = longs(call)
    blocks, made = longs(its[shapes.BLOCKS]), doubles(its[shapes.UNIFORMS])
    position, sample, tag = uint32(its[shapes.POSITION]), uint32(its[shapes.SAMPLE]), uint32(its[shapes.TAG])
    key0, key1 = uint32(its[shapes.KEY0]), uint32(its[shapes.KEY1])
    for i in range(its[shapes.COUNT]):
        w0, w1, w2, w3 = philox_words(uint32(blocks[i]), position, sample, tag, key0, key1)
        made[4 * i] = uniform(w0)
        made[4 * i + 1] = uniform(w1)
        made[4 * i + 2] = uniform(w2)
        made[4 * i + 3] = uniform(w3)


KERNELS = {"philox": (philox, "i")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
