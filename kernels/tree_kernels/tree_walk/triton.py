"""The walk on an accelerator: one program for each tree, which looks at all of a tree's rows at every step down."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def walk_rows(
    tokens: Tensor, parents: Tensor, picked: Tensor, first: Tensor, count: Tensor, max_rows: int, max_depth: int
) -> tuple[Tensor, Tensor]:
    """Walk trees whose rows lie side by side.

    tokens, parents (within the tree), picked (the target's token after each row) [rows] int64; first, count [trees]
    int64, count 0 for a tree that only pads. Returns (paths, lengths): paths [trees, max_depth + 1] int64, the rows of
    the step that were visited, in order, of which `lengths` [trees] int64 count; the token emitted at each is `picked`
    there.
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
