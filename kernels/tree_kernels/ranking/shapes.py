"""The arguments of the ranking: which word of which table holds what. Every word is an int64; an address is one too."""

from __future__ import annotations

BLOCK = 256
"""Scores that are computed and compared with the last guess's at a time."""

NOISE, VOCABULARY = range(2)
"""A row's words: the address of its noise, [VOCABULARY] float32, or 0 for none, and its number of tokens."""
ROW_WORDS = 2

(
    ROWS,
    LOGITS,  # float32, LOGITS_STEP bytes between rows
    LOGITS_STEP,
    TABLE,  # [rows, ROW_WORDS]
    TEMPERATURES,  # [rows] float32
    WIDTH,  # guesses of a row, at most each row's VOCABULARY
    IDS,  # [rows, WIDTH]; the result
    SCORES,  # [rows, WIDTH] float32; the result
    SPARE,  # [BLOCK] scratch
) = range(9)
CALL_WORDS = 9
