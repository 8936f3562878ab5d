"""The loops, for numba. Imported only while they are compiled; `cpu.py` calls the machine code."""

from __future__ import annotations

import math

from numba import float32, njit, uint32

from tree_kernels.noise.loops import philox_words, uniform
from tree_kernels.row_draw import shapes
from tree_kernels.translating import INLINED
from tree_kernels.vectors import bits_of, doubles, float_of, floats, longs

inlined = njit(**INLINED)
LN2 = 0.6931471805599453
LARGEST = 3.4028234663852886e38
HEIGHT = float32((32 + 127) * LN2 + shapes.SLACK)
STEP = float32(LN2 * 2.0**-23)
FIRST_GAP = float32(shapes.FIRST_GAP)


@inlined
def height(word: int) -> float:
    """An upper bound of a word's noise: -log(v) >= -log(-log(1 - v)). The bits of v as a float, read as a whole number,
    are its logarithm to the base 2 with a chord in place of the curve, which is never above the curve."""
    return HEIGHT - float32(bits_of(float32(~uint32(word)) + float32(0.5))) * STEP


@inlined
def any_above(numbers: int, least: float, count: int) -> bool:
    given = floats(numbers)
    found = False
    for i in range(count):
        found |= given[i] > least
    return found


@inlined
def any_from(numbers: int, least: float, count: int) -> bool:
    given = floats(numbers)
    found = False
    for i in range(count):
        found |= given[i] >= least
    return found


@inlined
def any_unusable(logits: int, count: int) -> bool:
    """True if a logit is NaN or plus infinity."""
    given = floats(logits)
    found = False
    for i in range(count):
        found |= not given[i] <= float32(LARGEST)
    return found


def greatest(call: int) -> None:
    """The token of the greatest logit, the lowest id among equals."""
    its = longs(call)
    logits, best, token, first = floats(its[shapes.LOGITS]), float32(-math.inf), shapes.NOT_FINITE, 0
    while first < its[shapes.VOCABULARY]:
        count = min(shapes.CHUNK, its[shapes.VOCABULARY] - first)
        here = its[shapes.LOGITS] + first * 4
        if any_unusable(here, count):
            its[shapes.STATUS] = shapes.NOT_FINITE
            return
        if any_above(here, best, count):
            for i in range(first, first + count):
                if logits[i] > best:
                    best, token = logits[i], i
        first += shapes.CHUNK
    its[shapes.STATUS] = token


@inlined
def words_of(its: int, block: int) -> tuple[int, int, int, int]:
    given = longs(its)
    return philox_words(
        uint32(block),
        uint32(given[shapes.POSITION]),
        uint32(given[shapes.SAMPLE]),
        uint32(given[shapes.TAG]),
        uint32(given[shapes.KEY0]),
        uint32(given[shapes.KEY1]),
    )


@inlined
def word_of(its: int, token: int) -> int:
    w0, w1, w2, w3 = words_of(its, token // 4)
    lane = token % 4
    return w0 if lane == 0 else w1 if lane == 1 else w2 if lane == 2 else w3


@inlined
def bound_chunk(its: int, first: int, count: int) -> None:
    """Upper bounds of the scores of a chunk's tokens; of those past the vocabulary: minus infinity."""
    given = longs(its)
    bounds, logits = floats(given[shapes.BOUNDS] + first * 4), floats(given[shapes.LOGITS] + first * 4)
    position, sample, tag = uint32(given[shapes.POSITION]), uint32(given[shapes.SAMPLE]), uint32(given[shapes.TAG])
    key0, key1 = uint32(given[shapes.KEY0]), uint32(given[shapes.KEY1])
    for i in range(shapes.CHUNK // 4):
        w0, w1, w2, w3 = philox_words(uint32(first // 4 + i), position, sample, tag, key0, key1)
        bounds[4 * i] = height(w0)
        bounds[4 * i + 1] = height(w1)
        bounds[4 * i + 2] = height(w2)
        bounds[4 * i + 3] = height(w3)
    temperature = float_of(uint32(given[shapes.TEMPERATURE]))
    for i in range(count):
        bounds[i] = logits[i] / temperature + bounds[i]
    for i in range(count, shapes.CHUNK):
        bounds[i] = float32(-math.inf)


def contenders(call: int) -> None:
    """The tokens whose score, logit / temperature + noise, may be the greatest: those whose upper bound is at least the
    greatest lower bound.

    Bounds of noise are added to the same quotient as the noise, and sums round in order: a bound of the noise gives a
    bound of the rounded score, however large the logits are.
    """
    its = longs(call)
    vocabulary, temperature = its[shapes.VOCABULARY], float_of(uint32(its[shapes.TEMPERATURE]))
    logits, bounds, lower = floats(its[shapes.LOGITS]), floats(its[shapes.BOUNDS]), floats(its[shapes.LOWER])
    best, first = float32(-math.inf), 0
    while first < vocabulary:
        count = min(shapes.CHUNK, vocabulary - first)
        if any_unusable(its[shapes.LOGITS] + first * 4, count):
            its[shapes.STATUS] = shapes.NOT_FINITE
            return
        bound_chunk(call, first, count)
        if any_above(its[shapes.BOUNDS] + first * 4, best, shapes.CHUNK):
            for i in range(first, first + count):
                if bounds[i] > best:
                    word = word_of(call, i)
                    bin = (~uint32(word)) >> uint32(28)
                    least = logits[i] / temperature + (height(word) - FIRST_GAP if bin == 0 else lower[bin])
                    if least > best:
                        best = least
        first += shapes.CHUNK
    if best == float32(-math.inf):
        its[shapes.STATUS] = shapes.NOT_FINITE
        return
    found, first = 0, 0
    ids, warped, uniforms = longs(its[shapes.IDS]), floats(its[shapes.WARPED]), doubles(its[shapes.UNIFORMS])
    while first < vocabulary:
        if any_from(its[shapes.BOUNDS] + first * 4, best, shapes.CHUNK):
            for i in range(first, min(first + shapes.CHUNK, vocabulary)):
                if bounds[i] >= best:
                    if found < shapes.MOST:
                        ids[found], warped[found] = i, logits[i] / temperature
                        uniforms[found] = uniform(word_of(call, i))
                    found += 1
        first += shapes.CHUNK
    its[shapes.STATUS] = found


KERNELS = {"greatest": (greatest, "i"), "contenders": (contenders, "i")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
