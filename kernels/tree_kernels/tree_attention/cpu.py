"""The form of the library's products: gathered near windows, and fixed-shape products for the pages before them, in
float32. A CPU runs it where `compiled.py` cannot be compiled.

Tested against `reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tree_kernels import ROW_MULTIPLE
from tree_kernels.elementwise import elementwise, elementwise_
from tree_kernels.products import bmm
from tree_kernels.tree_attention.rows import LOG2_E, PAGE, FarRows, Layout, TreeRows

_exp2 = elementwise(torch.exp2)


@dataclass(frozen=True, slots=True)
class _Far:
    """Prepared `FarRows`: `count` rows, padded to `padded`, and their mask."""

    start: int
    count: int
    padded: int
    runs: tuple[tuple[int, int], ...]  # (first page, number of consecutive pages): one product of scores for each
    keys: int
    seen: int  # number of keys, from the first on, that any row sees; the slots after them may hold anything, NaN too
    hidden: Tensor  # [count, 1, keys] bool: True where not seen


@dataclass(frozen=True, slots=True)
class Prepared:
    """The parts of a step's rows that layers with equal kv heads and window share."""

    rows: int
    padded: int
    slots: Tensor  # [rows]
    gather: Tensor  # [rows * kv_heads * 2 near] rows of the pool seen as [slots * kv_heads, width]
    hidden: Tensor  # [rows, 1, 1, 2 near] float32: 0 where seen, -inf where not
    far: tuple[_Far, ...]


def prepare(step: TreeRows, kv_heads: int, window: int | None = None) -> Prepared:
    """The input of `write` and `attend`, for layers with this number of kv heads and this sliding window, if any."""
    columns = step.near.shape[1]
    near = columns // 2
    device = step.near.device
    first = step.positions // near * near - near  # [rows] position of column 0
    hidden = step.near == 0
    if window is not None:
        keys = first[:, None] + torch.arange(columns, device=device)
        hidden |= step.positions[:, None] - keys >= window
    gather = step.near
    if kv_heads > 1:
        gather = (gather * kv_heads)[:, None, :] + torch.arange(kv_heads, device=device)[:, None]
    return Prepared(
        rows=len(step.positions),
        padded=step.padded,
        slots=step.slots,
        gather=gather.reshape(-1),
        hidden=_bias(hidden)[:, None, None, :],
        far=tuple(_far(step, first, rows, window) for rows in step.far),
    )


def _far(step: TreeRows, first: Tensor, rows: FarRows, window: int | None) -> _Far:
    count = rows.stop - rows.start
    padded = -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
    keys = torch.arange(rows.first * PAGE, (rows.first + len(rows.pages)) * PAGE, device=first.device)
    hidden = keys >= first[rows.start : rows.stop, None]  # [count, keys]
    if window is not None:
        hidden |= step.positions[rows.start : rows.stop, None] - keys >= window
    seen = int(first[rows.start : rows.stop].max()) - rows.first * PAGE
    return _Far(rows.start, count, padded, _runs(rows.pages), len(keys), seen, hidden[:, None, :])


def _runs(pages: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Groups pages into runs of consecutive ones: 3, 4, 5, 9 is (3, 3), (9, 1)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return tuple(runs)


def _bias(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -math.inf)


def write(pool: Tensor, key: Tensor, value: Tensor, step: Prepared) -> None:
    """Write keys [kv_heads, padded, key_dim] and values [.., value_dim] into the rows' slots; skip padding rows."""
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    rows = pool.new_ones(step.rows, *pool.shape[1:])
    rows[..., :key_dim] = key[:, : step.rows].transpose(0, 1)
    rows[..., key_dim : key_dim + value_dim] = value[:, : step.rows].transpose(0, 1)
    pool.index_copy_(0, step.slots, rows)


def attend(
    query: Tensor,
    pool: Tensor,
    step: Prepared,
    layout: Layout,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every row over its own path, whose keys are all in the pool.

    query [heads, padded, key_dim]; sinks [heads]; returns [padded, heads, value_dim] in the query's dtype. Padding rows
    are finite and otherwise undefined.
    """
    kv_heads, key_dim, value_dim = layout.kv_heads, layout.key_dim, layout.value_dim
    group, rows = query.shape[0] // kv_heads, step.rows
    # Contiguous, so that the products have the same layout for any number of rows.
    q = query.transpose(0, 1).to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    q = q.mul_(scaling * LOG2_E if softcap is None else scaling / softcap)
    q = q.view(step.padded, kv_heads, group, key_dim)

    batch = rows * kv_heads
    near = pool.view(-1, layout.width).index_select(0, step.gather).view(batch, -1, layout.width)
    scores = bmm(q[:rows].view(batch, group, key_dim), near[..., :key_dim].transpose(1, 2))
    scores = _capped(scores, softcap).view(rows, kv_heads, group, -1).add_(step.hidden)
    top = scores.amax(-1, keepdim=True)  # [rows, kv_heads, group, 1]
    if sinks is not None:
        sink = sinks.float().view(kv_heads, group, 1) * LOG2_E
        torch.maximum(top, sink, out=top)
    far = []
    for part in step.far:
        products, far_scores = _far_scores(q, pool, part, layout, softcap)
        far.append((part, products, far_scores))
        mine = top[part.start : part.start + part.count]
        torch.maximum(mine, far_scores.amax(-1, keepdim=True).transpose(0, 1), out=mine)

    weights = elementwise_(Tensor.exp2_, scores.sub_(top)).view(batch, group, -1)
    # Padding rows stay ones: 1 / 1.
    total = pool.new_ones(step.padded, kv_heads, group, value_dim + 1)
    total[:rows] = bmm(weights, near[..., key_dim : key_dim + value_dim + 1]).view(rows, kv_heads, group, -1)
    for part, products, far_scores in far:
        its = slice(part.start, part.start + part.count)
        elementwise_(Tensor.exp2_, far_scores.sub_(top[its].transpose(0, 1)))
        total[its] += _far_values(products, pool, part, layout, group)
    if sinks is not None:
        total[:rows, ..., -1:] += _exp2(sink - top)
    out = total[..., :-1] / total[..., -1:]
    return out.view(step.padded, -1, value_dim).to(query.dtype)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores as exponents of 2, in place. With a cap, `scores` has been divided by it before."""
    return scores if softcap is None else elementwise_(Tensor.tanh_, scores).mul_(softcap * LOG2_E)


def _far_scores(q: Tensor, pool: Tensor, part: _Far, layout: Layout, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Products [kv_heads, padded * group, keys] of one text's rows with its far keys, and a view of them.

    The view, [kv_heads, count, group, keys], has the scores of the text's rows. Padding rows stay unmasked products.
    """
    group = q.shape[2]
    mine = q[part.start : part.start + part.padded]  # rows past `count`, of other texts, serve as padding
    if len(mine) < part.padded:
        mine = q.new_zeros(part.padded, *q.shape[1:])
        mine[: part.count] = q[part.start : part.start + part.count]
    rows = mine.transpose(0, 1).reshape(layout.kv_heads, part.padded * group, layout.key_dim)
    by_run = [
        torch.bmm(rows, pool[first * PAGE : (first + count) * PAGE, :, : layout.key_dim].permute(1, 2, 0))
        for first, count in part.runs
    ]
    products = by_run[0] if len(by_run) == 1 else torch.cat(by_run, -1)
    scores = products.view(layout.kv_heads, part.padded, group, part.keys)[:, : part.count]
    return products, _capped(scores, softcap).masked_fill_(part.hidden, -math.inf)


def _far_values(weights: Tensor, pool: Tensor, part: _Far, layout: Layout, group: int) -> Tensor:
    """Sums of weighted values and of weights [count, kv_heads, group, value_dim + 1]: a product per page, in order."""
    values = slice(layout.key_dim, layout.key_dim + layout.value_dim + 1)
    total, column = None, 0
    for first, count in part.runs:
        for page in range(first, first + count):
            keys = weights[..., column : column + PAGE]
            page_values = pool[page * PAGE : (page + 1) * PAGE, :, values].transpose(0, 1)
            if column + PAGE > part.seen:  # 0 * NaN is not 0
                page_values = page_values.clone()
                page_values[:, max(part.seen - column, 0) :] = 0.0
            total = torch.bmm(keys, page_values) if total is None else total.baddbmm_(keys, page_values)
            column += PAGE
    assert total is not None
    return total.view(layout.kv_heads, part.padded, group, -1)[:, : part.count].transpose(0, 1)
