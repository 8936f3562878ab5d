"""Attention on an accelerator: one program for each row and key-value head, over that row's own path, in order.

A program's shapes do not depend on the step's other rows, and its number of pages depends only on its row's position:
so a row's bits do not depend on other rows. All arguments are tensors of a fixed shape, so a step can be captured in a
CUDA graph.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.tree_attention.rows import LOG2_E, PAGE, Layout

SMALLEST_DOT = 16
"""Triton multiplies blocks of at least this many columns. The rows, a group's heads, may be fewer: with 16 of them the
registers of a program would not suffice."""
WIDE_HEAD = 128
"""Wider heads need more registers, and more shared memory for a page."""
ROOMY_BYTES = 160 * 1024
"""Least shared memory of a program with which it reads pages of wide heads ahead, which takes up to 151,624 bytes. Some
GPUs have 99 KB."""


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of a step, as tensors of a fixed shape.

    positions [rows] int64
    slots     [rows] int64   where each row's own key and value are written; padding rows may share one
    near      [rows, 2 * near] int64   as in `TreeRows`; all 0 for a padding row
    texts     [rows] int64   index of the row's table
    tables    [texts, pages] int64   the pages of each text, by position; any values past its end
    """

    positions: Tensor
    slots: Tensor
    near: Tensor
    texts: Tensor
    tables: Tensor


@cache
def shared_bytes(device: torch.device) -> int:
    """Most bytes of shared memory that a program may have on a device; no limit in Triton's interpreter."""
    if device.type != "cuda":
        return sys.maxsize
    properties: Any = torch.cuda.get_device_properties(device)  # torch declares no type of this one
    return int(properties.shared_memory_per_block_optin)


def stages_of(layout: Layout, device: torch.device, wide: int) -> int:
    """Pages of keys and values in shared memory at once: how far they are read ahead, which changes no bit.

    wide: for wide heads, on a device with room for them
    """
    if max(layout.key_dim, layout.value_dim) <= WIDE_HEAD:
        return 3
    return wide if shared_bytes(device) >= ROOMY_BYTES else 1


def write_table(pool: Tensor, key: Tensor, value: Tensor, step: TableRows) -> None:
    """Write keys [kv_heads, rows, key_dim] and values [.., value_dim] into the rows' slots."""
    key_dim, value_dim = key.shape[-1], value.shape[-1]
    rows = pool.new_ones(key.shape[1], *pool.shape[1:])
    rows[..., :key_dim] = key.transpose(0, 1)
    rows[..., key_dim : key_dim + value_dim] = value.transpose(0, 1)
    pool.index_copy_(0, step.slots, rows)


def attend_table(
    query: Tensor,
    pool: Tensor,
    step: TableRows,
    layout: Layout,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every row over its own path, whose keys are all in the pool.

    query [heads, rows, key_dim]; sinks [heads]; returns [rows, heads, value_dim] in the query's dtype. Padding rows are
    zero.
    """
    heads, rows, _ = query.shape
    out = query.new_empty(rows, heads, layout.value_dim)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    group = heads // layout.kv_heads
    _attend[(rows, layout.kv_heads)](
        query,
        pool,
        step.positions,
        step.near,
        step.texts,
        step.tables,
        out if sinks is None else sinks,  # not read without sinks
        out,
        scaling * LOG2_E if softcap is None else scaling / softcap,
        0.0 if softcap is None else softcap * LOG2_E,
        0 if window is None else window,
        query.stride(0),
        query.stride(1),
        step.tables.shape[1],
        KV_HEADS=layout.kv_heads,
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        KEY=layout.key_dim,
        KEY_PAD=max(triton.next_power_of_2(layout.key_dim), SMALLEST_DOT),
        VALUE=layout.value_dim,
        VALUE_PAD=max(triton.next_power_of_2(layout.value_dim), SMALLEST_DOT),
        WIDTH=layout.width,
        NEAR=step.near.shape[1] // 2,
        PAGE=PAGE,
        CAPPED=softcap is not None,
        WINDOWED=window is not None,
        SINKS=sinks is not None,
        enable_fp_fusion=False,
        num_stages=stages_of(layout, query.device, wide=3),
    )
    return out


@triton.jit
def _attend(
    query,
    pool,
    positions,
    near,
    texts,
    tables,
    sinks,
    out,
    scale,
    cap,
    window,
    query_head,
    query_row,
    table_pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    NEAR: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """scale: factor of the scores, in units of log 2; with a cap, divided by the cap   window: 0: no window"""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    members = tl.arange(0, GROUP_PAD)
    key_columns = tl.arange(0, KEY_PAD)
    heads = kv_head * GROUP + members
    real = members < GROUP
    q = tl.load(
        query + heads[:, None] * query_head + row * query_row + key_columns[None, :],
        mask=real[:, None] & (key_columns[None, :] < KEY),
        other=0.0,
    )
    q = q.to(tl.float32) * scale
    position = tl.load(positions + row)
    first = (position // NEAR - 1) * NEAR  # begins the near window; the keys before it are far
    far = tl.maximum(first, 0)
    begin = far * 0
    if WINDOWED:
        begin = tl.maximum(position - window + 1, 0) // PAGE
    table = tables + tl.load(texts + row) * table_pages

    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sums = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    within = tl.arange(0, PAGE)
    for page in range(begin, (far + PAGE - 1) // PAGE):
        keys = page * PAGE + within
        seen = keys < far
        if WINDOWED:
            seen &= position - keys < window
        slots = tl.load(table + page) * PAGE + within
        top, total, sums = _block(
            q,
            pool,
            slots,
            seen,
            top,
            total,
            sums,
            kv_head,
            cap,
            KV_HEADS,
            KEY,
            KEY_PAD,
            VALUE,
            VALUE_PAD,
            WIDTH,
            CAPPED,
        )
    columns = tl.arange(0, 2 * NEAR)
    slots = tl.load(near + row * (2 * NEAR) + columns)
    seen = slots != 0
    if WINDOWED:
        seen &= position - (first + columns) < window
    top, total, sums = _block(
        q,
        pool,
        slots,
        seen,
        top,
        total,
        sums,
        kv_head,
        cap,
        KV_HEADS,
        KEY,
        KEY_PAD,
        VALUE,
        VALUE_PAD,
        WIDTH,
        CAPPED,
    )
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0) * LOG2
        highest = tl.maximum(top, sink)
        total = total * tl.exp2(top - highest) + tl.exp2(sink - highest)
        sums = sums * tl.exp2(top - highest)[:, None]
    value_columns = tl.arange(0, VALUE_PAD)
    answer = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + (row * (KV_HEADS * GROUP) + heads)[:, None] * VALUE + value_columns[None, :],
        answer.to(out.dtype.element_ty),
        mask=real[:, None] & (value_columns[None, :] < VALUE),
    )


LOG2: tl.constexpr = tl.constexpr(LOG2_E)


@triton.jit
def _block(
    q,
    pool,
    slots,
    seen,
    top,
    total,
    sums,
    kv_head,
    cap,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Update the running maximum, the sum of weights and the weighted values with a block of keys."""
    key_columns = tl.arange(0, KEY_PAD)
    value_columns = tl.arange(0, VALUE_PAD)
    places = pool + (slots * KV_HEADS + kv_head) * WIDTH
    keys = tl.load(places[:, None] + key_columns[None, :], mask=seen[:, None] & (key_columns[None, :] < KEY), other=0.0)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if CAPPED:  # tanh
        scores = (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0)) * cap
    scores = tl.where(seen[None, :], scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    level = tl.where(highest == float("-inf"), 0.0, highest)  # -inf: no key was visible yet
    weights = tl.exp2(scores - level[:, None])
    faded = tl.exp2(top - level)
    values = tl.load(
        places[:, None] + KEY + value_columns[None, :],
        mask=seen[:, None] & (value_columns[None, :] < VALUE),
        other=0.0,
    )
    total = total * faded + tl.sum(weights, 1)
    sums = sums * faded[:, None] + tl.dot(weights, values, input_precision="ieee")
    return highest, total, sums
