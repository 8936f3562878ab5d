"""Copy rows between slots of a pool: all are loaded before any is stored."""

from __future__ import annotations

from torch import Tensor


def commit(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """pool [layers, slots, ...], source and target [rows] int64: pool[:, target] = pool[:, source].

    A slot may be both a source and a target. Each slot may be a target at most once.
    """
    slots = 1
    if pool.dim() > 2 and pool.stride(1) < pool.stride(2):  # torch would copy all of a pool that is not contiguous
        pool, slots = pool.transpose(1, 2), 2
    pool.index_copy_(slots, target, pool.index_select(slots, source))
