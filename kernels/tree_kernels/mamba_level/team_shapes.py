"""A team's memory, an array of int64: which place holds what."""

from __future__ import annotations

OPEN, ENTERED, LEFT, NEXT = range(0, 32, 8)
"""Numbers that several threads write, each in a cache line of its own: the number of the product that helpers may join,
0 for none now and ENDED for none any more; how often helpers have entered, or tried to, and left; the next block that
no thread has taken."""

(
    THREADS,  # members, that which makes the call among them
    COUNT,  # products until now
    BLOCKS,  # blocks of the product
    PANELS,  # panels of all blocks
    BLOCK_PANELS,  # panels of each but the last
    WORDS,  # address of the product's words
    X,  # address of the rows, as `product` has it, with what follows
    X_STEP,
    ROWS,
    INPUTS,
    SUMS,
    SUMS_STEP,
    BEGIN,  # 1: the results replace the sums; 0: they are added
    TILES,
    TILE_ROWS,
) = range(32, 47)
TEAM_WORDS = 48

ENDED = -1
SHARED_WEIGHTS = 1 << 15
"""Least number of a product's weights that a team shares: with fewer, the wait for each other takes as long."""
