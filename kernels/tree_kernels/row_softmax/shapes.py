"""The arguments of the kernel: which word of a call holds what. Every word is an int64; an address is one too."""

from __future__ import annotations

LANES = 64
"""Partial sums of a row, and partial maxima: number i belongs to number i mod LANES of them."""

(
    SCORES,  # [ROWS, WIDTH] float32
    ROWS,
    WIDTH,
    LAW,  # [ROWS, WIDTH] float32; a result
    GREATEST,  # [ROWS] float32: the greatest score of each row; a result
    LOG_SUM,  # [ROWS] float32: the logarithm of the sum of exp(score - greatest); a result
    SPARE,  # [LANES] float64 scratch
) = range(7)
CALL_WORDS = 7
