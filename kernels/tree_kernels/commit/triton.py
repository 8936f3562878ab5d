"""Copies accepted rows to their final slots on an accelerator. Reads and writes only those slots."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LONGEST_BLOCK = 1024


def commit_rows(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """pool[:, target] = pool[:, source], except for rows whose source is slot 0, which are skipped.

    pool [layers, slots, ...] contiguous, written here   source, target [rows] int64
    Rows are copied in parallel: no slot may be both a source and a target, or a target twice.
    """
    assert pool.is_contiguous() and source.is_contiguous() and target.is_contiguous()
    layers, slots = pool.shape[:2]
    width = pool[0, 0].numel()
    block = min(triton.next_power_of_2(width), LONGEST_BLOCK)
    _commit[(len(source), layers)](pool, source, target, slots, WIDTH=width, BLOCK=block)


@triton.jit
def _commit(
    pool,  # [layers, slots, WIDTH]; written here
    source,  # [rows]
    target,  # [rows]
    slots,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64) * slots
    read = tl.load(source + row).to(tl.int64)
    if read != 0:
        write = tl.load(target + row).to(tl.int64)
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < WIDTH
            values = tl.load(pool + (layer + read) * WIDTH + columns, mask=inside)
            tl.store(pool + (layer + write) * WIDTH + columns, values, mask=inside)
