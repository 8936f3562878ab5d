"""The loops of the ranking, for numba. Imported only while they are compiled; `cpu.py` calls the machine code."""

from __future__ import annotations

import math

from numba import float32, njit

from tree_kernels.ranking import shapes
from tree_kernels.translating import INLINED
from tree_kernels.vectors import floats, longs

inlined = njit(**INLINED)


@inlined
def score(logits: int, noise: int, temperature: float, target: int, count: int) -> None:
    """logits / temperature + noise; at temperature 0 logits + noise. A NaN becomes minus infinity."""
    given, made = floats(logits), floats(target)
    if noise == 0:
        for i in range(count):
            made[i] = given[i] if given[i] == given[i] else -math.inf
    else:
        added, divisor = floats(noise), temperature if temperature > 0 else float32(1.0)
        for i in range(count):
            value = given[i] / divisor + added[i]
            made[i] = value if value == value else float32(-math.inf)


@inlined
def any_above(scores: int, least: float, count: int) -> bool:
    given = floats(scores)
    found = False
    for i in range(count):
        found |= given[i] > least
    return found


@inlined
def place(ids: int, scores: int, held: int, width: int, token: int, value: float) -> int:
    """Puts a token among the best so far, after those of the same score; returns their number."""
    its_ids, its_scores = longs(ids), floats(scores)
    at = held if held < width else width - 1
    while at > 0 and value > its_scores[at - 1]:
        its_ids[at], its_scores[at] = its_ids[at - 1], its_scores[at - 1]
        at -= 1
    its_ids[at], its_scores[at] = token, value
    return held + 1 if held < width else held


def ranking(call: int) -> None:
    """The `WIDTH` tokens of greatest score of each row, the lower id first among equals."""
    its = longs(call)
    rows, degrees, width = longs(its[shapes.TABLE]), floats(its[shapes.TEMPERATURES]), its[shapes.WIDTH]
    spare = its[shapes.SPARE]
    block = floats(spare)
    for row in range(its[shapes.ROWS]):
        logits, noise = its[shapes.LOGITS] + row * its[shapes.LOGITS_STEP], rows[row * shapes.ROW_WORDS + shapes.NOISE]
        vocabulary = rows[row * shapes.ROW_WORDS + shapes.VOCABULARY]
        own_ids, own_scores = its[shapes.IDS] + row * width * 8, its[shapes.SCORES] + row * width * 4
        held, first = 0, 0
        best = floats(own_scores)
        while first < vocabulary:
            count = min(shapes.BLOCK, vocabulary - first)
            score(logits + first * 4, noise + first * 4 if noise != 0 else 0, degrees[row], spare, count)
            if held < width or any_above(spare, best[width - 1], count):
                for i in range(count):
                    if held < width or block[i] > best[width - 1]:
                        held = place(own_ids, own_scores, held, width, first + i, block[i])
            first += shapes.BLOCK


KERNELS = {"ranking": (ranking, "i")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
