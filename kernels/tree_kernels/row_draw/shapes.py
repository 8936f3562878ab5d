"""The arguments of the kernels: which word of a call holds what. Every word is an int64; an address is one too."""

from __future__ import annotations

import math

CHUNK = 256
"""Tokens whose bounds are computed and compared at a time; a multiple of 4."""
MOST = 512
"""Contenders of a draw that a call has room for."""
BINS = 16
"""Parts of (0, 1) of equal size, in each of which noise has a lower bound."""
SLACK = 1e-4
"""Added to upper bounds and taken from lower ones; more than what rounding to float32 can change in either."""

(
    LOGITS,  # [VOCABULARY] float32
    VOCABULARY,
    STATUS,  # the result: a token (`greatest`), the number of contenders (`contenders`), or NOT_FINITE
    TEMPERATURE,  # the bits of a float32
    POSITION,
    SAMPLE,  # sample index
    TAG,  # the last word of the noise's counter
    KEY0,
    KEY1,
    LOWER,  # [BINS] float32: `lower_bounds`
    BOUNDS,  # [VOCABULARY rounded up to CHUNK] float32 scratch: upper bounds of scores
    IDS,  # [MOST] the contenders, ascending; the result
    WARPED,  # [MOST] float32: their logits / temperature
    UNIFORMS,  # [MOST] float64: the uniform numbers of their noise
) = range(14)
CALL_WORDS = 14

NOT_FINITE = -1
"""Status of a row that has a logit which is NaN or plus infinity, or whose logits or quotients are all minus
infinity."""


def lower_bounds() -> list[float]:
    """Lower bounds of the noise of words whose complement is in each bin, least complements first. The first is not
    used: there noise is at most `FIRST_GAP` below its upper bound."""
    ends = [(each + 1) / BINS for each in range(1, BINS - 1)]
    return [0.0, *(-math.log(-math.log(1 - end)) - SLACK for end in ends), -math.log(33 * math.log(2)) - SLACK]


FIRST_GAP = 0.0861 * math.log(2) + math.log(BINS / (BINS - 1)) + 3 * SLACK
"""log2(m) is at most 0.0861 above m - 1 for m in [1, 2], and -log(1 - v) at most v / (1 - v), with v below 1 / BINS."""
