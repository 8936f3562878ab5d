"""Rotates queries and keys and writes keys and values to pages, in one launch on an accelerator (README.md in this
folder)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.tree_attention.rows import Layout, RowRotation


def rotate_and_write(
    pages: Tensor, query: Tensor, key: Tensor, value: Tensor, slots: Tensor, layout: Layout, rotation: RowRotation
) -> Tensor:
    """Rotate queries [heads, rows, key_dim] and keys [kv_heads, rows, key_dim]; write these keys and values [kv_heads,
    rows, value_dim] into slots [rows], of padding rows none. Returns the rotated queries, shaped like `query`.

    pages [slots, kv_heads, width] in the dtype of all of these
    """
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    heads, rows, key_dim = query.shape
    turned = cos.shape[1]
    assert turned <= key_dim == layout.key_dim and turned % 2 == 0
    assert query.dtype == key.dtype == value.dtype == cos.dtype == sin.dtype == pages.dtype
    group = heads // layout.kv_heads
    made = query.new_empty(rows, heads, key_dim)
    _rotate_write[(rows, layout.kv_heads)](
        query,
        key,
        value,
        cos,
        sin,
        slots,
        made,
        pages,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=layout.kv_heads,
        GROUP=group,
        GROUP_PAD=triton.next_power_of_2(group),
        KEY=key_dim,
        KEY_PAD=triton.next_power_of_2(key_dim),
        VALUE=layout.value_dim,
        VALUE_PAD=triton.next_power_of_2(layout.value_dim),
        WIDTH=layout.width,
        TURNED=turned,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return made.transpose(0, 1)


@triton.jit
def _rotated(x, other, cos, sin, d, TURNED: tl.constexpr):
    """x * cos + turned(x) * sin, where products and sums are rounded to the dtype of x.

    other: the number of x that is turned to each place
    """
    away = tl.where(d < TURNED // 2, -other.to(tl.float32), other.to(tl.float32))
    kept = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
    moved = (away * sin.to(tl.float32)).to(x.dtype)
    return tl.where(d < TURNED, (kept.to(tl.float32) + moved.to(tl.float32)).to(x.dtype), x)


@triton.jit
def _rotate_write(
    query,
    key,
    value,
    cos,  # [rows, TURNED]
    sin,  # [rows, TURNED]
    slots,  # [rows], 0 for a padding row
    made,  # [rows, KV_HEADS * GROUP, KEY]; written here
    pages,  # [slots, KV_HEADS, WIDTH]; written here
    query_head,
    query_row,
    key_head,
    key_row,
    value_head,
    value_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    members = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, KEY_PAD)
    turns = d < TURNED
    other = tl.where(d < TURNED // 2, d + TURNED // 2, d - TURNED // 2)
    c = tl.load(cos + row * TURNED + d, mask=turns, other=0.0)
    s = tl.load(sin + row * TURNED + d, mask=turns, other=0.0)
    heads = head * GROUP + members
    real = (members < GROUP)[:, None]
    at = query + (heads * query_head + row * query_row)[:, None]
    q = tl.load(at + d[None, :], mask=real & (d < KEY)[None, :], other=0.0)
    q_other = tl.load(at + other[None, :], mask=real & turns[None, :], other=0.0)
    rotated = _rotated(q, q_other, c[None, :], s[None, :], d[None, :], TURNED)
    tl.store(
        made + (row * (KV_HEADS * GROUP) + heads)[:, None] * KEY + d[None, :],
        rotated,
        mask=real & (d < KEY)[None, :],
    )
    slot = tl.load(slots + row)
    if slot != 0:
        from_key = key + head * key_head + row * key_row
        k = tl.load(from_key + d, mask=d < KEY, other=0.0)
        k_other = tl.load(from_key + other, mask=turns, other=0.0)
        v_columns = tl.arange(0, VALUE_PAD)
        v = tl.load(value + head * value_head + row * value_row + v_columns, mask=v_columns < VALUE)
        to = pages + (slot * KV_HEADS + head) * WIDTH
        tl.store(to + d, _rotated(k, k_other, c, s, d, TURNED), mask=d < KEY)
        tl.store(to + KEY + v_columns, v, mask=v_columns < VALUE)
