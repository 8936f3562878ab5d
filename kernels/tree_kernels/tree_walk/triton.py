"""The walk on an accelerator: one program per tree, which compares all rows of the tree at every level."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def walk_rows(
    tokens: Tensor, parents: Tensor, picked: Tensor, first: Tensor, count: Tensor, max_rows: int, max_depth: int
) -> tuple[Tensor, Tensor]:
    """Walk trees whose rows are consecutive rows of a step.

    tokens, parents (within the tree), picked (the target's token after each row) [rows] int64
    first, count [trees] int64: each tree's first row and number of rows; count is 0 for a padding tree
    Returns (paths, lengths): paths [trees, max_depth + 1] int64, the visited rows of the step in order, of which the
    first `lengths` [trees] int64 are valid. The token emitted at each is `picked` of that row.
    """
    trees = len(first)
    paths = torch.zeros(trees, max_depth + 1, dtype=torch.int64, device=tokens.device)
    lengths = torch.zeros(trees, dtype=torch.int64, device=tokens.device)
    _walk[(trees,)](
        tokens,
        parents,
        picked,
        first,
        count,
        paths,
        lengths,
        DEPTH=max_depth + 1,
        ROWS=triton.next_power_of_2(max_rows),
    )
    return paths, lengths


@triton.jit
def _walk(tokens, parents, picked, first, count, paths, lengths, DEPTH: tl.constexpr, ROWS: tl.constexpr):
    tree = tl.program_id(0).to(tl.int64)
    begin = tl.load(first + tree)
    number = tl.load(count + tree)
    rows = tl.arange(0, ROWS)
    real = rows < number
    guesses = tl.load(tokens + begin + rows, mask=real, other=-1)
    above = tl.load(parents + begin + rows, mask=real, other=-2)
    at = number * 0  # the root
    walking = number > 0
    length = number * 0
    for depth in range(DEPTH):
        tl.store(paths + tree * DEPTH + depth, begin + at, mask=walking)
        length += walking.to(tl.int64)
        token = tl.load(picked + begin + at, mask=walking, other=-3)
        following = tl.min(tl.where((above == at) & (guesses == token), rows, ROWS), 0).to(tl.int64)
        walking = walking & (following < ROWS)
        at = tl.where(walking, following, at)
    tl.store(lengths + tree, length)
