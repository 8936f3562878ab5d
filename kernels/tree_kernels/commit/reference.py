"""Copy rows between slots of a pool: all are loaded before any is stored."""

from __future__ import annotations

from torch import Tensor


def commit(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """pool [layers, slots, ...], source and target [rows] int64: pool[:, target] = pool[:, source].

    A slot may be both a source and a target. Each slot may be a target at most once.
    """
    pool.index_copy_(1, target, pool.index_select(1, source))
