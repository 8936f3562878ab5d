"""Attention on an accelerator's tensor cores, from pages in the model's dtype (README.md in this folder).

`_far` has the rows of a text and the heads of a group as the lines of one tile, which read a split's keys together;
`_near` has a row's own window, and adds the row's splits in their order. A row's bits do not depend on other rows: keys
that it does not see add exact zeros, and no product's or sum's shape depends on the step. All arguments are tensors of
a fixed shape, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.tree_attention.rows import LOG2_E, PAGE, Layout
from tree_kernels.tree_attention.splits import ITEM, LINES
from tree_kernels.tree_attention.triton import WIDE_HEAD, TableRows, stages_of

PROGRAMS = 264
"""Programs that share the items: two for each multiprocessor of an H100 or H200. No bit depends on their number."""
NEAR_LINES = 16
"""Lines of a near tile, at least: a group's heads are padded to them."""
NEAR_KEYS = 32
"""Keys of a row's own window that are multiplied at once."""
SUMMED_AT_ONCE = 8
"""Splits whose sums are read before the first of them is added."""


@dataclass(frozen=True, slots=True)
class SplitRows(TableRows):
    """Rows whose far keys are divided into items.

    slots  0 for a padding row, which writes none
    items  [most, ITEM] int64   as `FarSplits.fill` writes them
    jobs   [1] int64   the number of items
    splits [rows, 2] int64   the splits [first, stop) that a row sums
    """

    items: Tensor
    jobs: Tensor
    splits: Tensor
    most_splits: int  # most splits that a row sums


def write_pages(pages: Tensor, key: Tensor, value: Tensor, step: SplitRows, layout: Layout) -> None:
    """Write keys [kv_heads, rows, key_dim] and values [.., value_dim] into the rows' slots, of padding rows none.

    pages [slots, kv_heads, width] in the dtype of the keys
    """
    key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (key, value))
    _write[(key.shape[1], layout.kv_heads)](
        key,
        value,
        pages,
        step.slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=layout.kv_heads,
        KEY=layout.key_dim,
        VALUE=layout.value_dim,
        PAD=triton.next_power_of_2(max(layout.key_dim, layout.value_dim)),
        WIDTH=layout.width,
        num_warps=1,
    )


def attend_pages(
    query: Tensor,
    pages: Tensor,
    step: SplitRows,
    layout: Layout,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every row over its own path, whose keys are all in the pages.

    query [heads, rows, key_dim] in the dtype of the pages; sinks [heads]; returns [rows, heads, value_dim] in that
    dtype. Padding rows are zero.
    """
    assert query.dtype == pages.dtype == layout.dtype
    query = query if query.stride(-1) == 1 else query.contiguous()
    heads, rows, _ = query.shape
    group = heads // layout.kv_heads
    out = query.new_empty(rows, heads, layout.value_dim)
    parts = step.most_splits, layout.kv_heads, rows, group
    tops, totals = (query.new_empty(parts, dtype=torch.float32) for _ in range(2))
    sums = query.new_empty((*parts, layout.value_dim), dtype=torch.float32)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    numbers = (
        scaling * LOG2_E if softcap is None else scaling / softcap,
        0.0 if softcap is None else softcap * LOG2_E,
        0 if window is None else window,
        query.stride(0),
        query.stride(1),
    )
    near = step.near.shape[1] // 2
    shape = {
        "KV_HEADS": layout.kv_heads,
        "GROUP": group,
        "KEY": layout.key_dim,
        "KEY_PAD": triton.next_power_of_2(layout.key_dim),
        "VALUE": layout.value_dim,
        "VALUE_PAD": triton.next_power_of_2(layout.value_dim),
        "WIDTH": layout.width,
        "NEAR": near,
        "CAPPED": softcap is not None,
        "WINDOWED": window is not None,
        "enable_fp_fusion": False,
    }
    _far[(PROGRAMS,)](
        query,
        pages,
        step.positions,
        step.texts,
        step.tables,
        step.items,
        step.jobs,
        tops,
        totals,
        sums,
        *numbers,
        step.tables.shape[1],
        rows,
        **shape,
        PAGE=PAGE,
        LINES=LINES,
        FIELDS=ITEM,
        PROGRAMS=PROGRAMS,
        num_stages=stages_of(layout, query.device, wide=2),
        num_warps=warps_of(layout),
    )
    _near[(rows, layout.kv_heads)](
        query,
        pages,
        step.positions,
        step.near,
        step.splits,
        tops,
        totals,
        sums,
        out if sinks is None else sinks,  # not read without sinks
        out,
        *numbers,
        rows,
        **shape,
        GROUP_PAD=max(triton.next_power_of_2(group), NEAR_LINES),
        KEYS=NEAR_KEYS,
        AT_ONCE=SUMMED_AT_ONCE,
        SINKS=sinks is not None,
    )
    return out


def warps_of(layout: Layout) -> int:
    return 4 if max(layout.key_dim, layout.value_dim) <= WIDE_HEAD else 8


LOG2: tl.constexpr = tl.constexpr(LOG2_E)


@triton.jit
def _write(
    key,
    value,
    pages,  # written here
    slots,
    key_head,
    key_row,
    value_head,
    value_row,
    KV_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PAD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, PAD)
    slot = tl.load(slots + row)
    if slot != 0:
        at = pages + (slot * KV_HEADS + head) * WIDTH
        k = tl.load(key + head * key_head + row * key_row + d, mask=d < KEY)
        v = tl.load(value + head * value_head + row * value_row + d, mask=d < VALUE)
        tl.store(at + d, k, mask=d < KEY)
        tl.store(at + KEY + d, v, mask=d < VALUE)


@triton.jit
def _scores(q, keys, seen, scale, cap, CAPPED: tl.constexpr):
    """Scores of lines and keys, in units of log 2; -inf where a key is not seen."""
    scores = tl.dot(q, tl.trans(keys)) * scale
    if CAPPED:  # tanh
        scores = (1.0 - 2.0 / (tl.exp(2.0 * scores) + 1.0)) * cap
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _far(
    query,
    pages,
    positions,
    texts,
    tables,
    items,
    count,
    tops,  # [splits, kv_heads, rows, GROUP], written here, as the two after it
    totals,  # [splits, kv_heads, rows, GROUP]
    sums,  # [splits, kv_heads, rows, GROUP, VALUE]
    scale,
    cap,
    window,
    query_head,
    query_row,
    table_pages,
    rows_all,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    NEAR: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PAGE: tl.constexpr,
    LINES: tl.constexpr,
    FIELDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """scale: factor of the scores, in units of log 2; with a cap, divided by the cap   window: 0: no window"""
    lines = tl.arange(0, LINES)
    key_columns = tl.arange(0, KEY_PAD)
    value_columns = tl.arange(0, VALUE_PAD)
    within = tl.arange(0, PAGE)
    jobs = tl.load(count).to(tl.int32) * KV_HEADS
    for job in range(tl.program_id(0), jobs, PROGRAMS):
        item = items + (job // KV_HEADS) * FIELDS
        head = job % KV_HEADS
        first = tl.load(item).to(tl.int32)
        number = tl.load(item + 1).to(tl.int32)
        split = tl.load(item + 2).to(tl.int32)
        begin = tl.load(item + 3).to(tl.int32)
        stop = tl.load(item + 4).to(tl.int32)
        table = tables + tl.load(texts + first) * table_pages
        real = lines < number * GROUP
        row = first + lines // GROUP
        member = lines % GROUP
        q = tl.load(
            query + ((head * GROUP + member) * query_head + row * query_row)[:, None] + key_columns[None, :],
            mask=real[:, None] & (key_columns[None, :] < KEY),
            other=0.0,
        )
        position = tl.load(positions + row, mask=real, other=0).to(tl.int32)
        end = (position // NEAR - 1) * NEAR  # the keys before it are far
        lowest = begin  # position of the first key that is seen
        if WINDOWED:
            sees = position - window + 1  # the first key of a row's window
            lowest = tl.maximum(begin, tl.min(tl.where(real, sees, stop)))
            begin = tl.maximum(begin, lowest // PAGE * PAGE)
        top = tl.full([LINES], float("-inf"), tl.float32)
        total = tl.zeros([LINES], tl.float32)
        acc = tl.zeros([LINES, VALUE_PAD], tl.float32)
        for start in range(begin, stop, PAGE):
            page = tl.load(table + start // PAGE)
            at = pages + ((page * PAGE + within) * KV_HEADS + head) * WIDTH
            keys = tl.load(at[:, None] + key_columns[None, :], mask=key_columns[None, :] < KEY, other=0.0)
            near_end = (start + within)[None, :] < end[:, None]
            if WINDOWED:
                near_end &= (start + within)[None, :] >= sees[:, None]
            scores = _scores(q, keys, near_end, scale, cap, CAPPED)
            highest = tl.maximum(top, tl.max(scores, 1))
            level = tl.where(highest == float("-inf"), 0.0, highest)  # -inf: no key was seen yet
            weights = tl.exp2(scores - level[:, None])
            faded = tl.exp2(top - level)
            # A page's other slots may hold what another text left: no number of it is read, as 0 * NaN is not 0.
            held = (start + within < stop) & (start + within >= lowest)
            values = tl.load(
                at[:, None] + KEY + value_columns[None, :],
                mask=held[:, None] & (value_columns[None, :] < VALUE),
                other=0.0,
            )
            total = total * faded + tl.sum(weights, 1)
            acc = tl.dot(weights.to(values.dtype), values, acc * faded[:, None])
            top = highest
        place = ((split * KV_HEADS + head) * rows_all + row) * GROUP + member
        tl.store(tops + place, top, mask=real)
        tl.store(totals + place, total, mask=real)
        tl.store(
            sums + place.to(tl.int64)[:, None] * VALUE + value_columns[None, :],
            acc,
            mask=real[:, None] & (value_columns[None, :] < VALUE),
        )


@triton.jit
def _near(
    query,
    pages,
    positions,
    near,
    splits,
    tops,
    totals,
    sums,
    sinks,
    out,
    scale,
    cap,
    window,
    query_head,
    query_row,
    rows_all,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    NEAR: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    members = tl.arange(0, GROUP_PAD)
    real = members < GROUP
    heads = head * GROUP + members
    key_columns = tl.arange(0, KEY_PAD)
    value_columns = tl.arange(0, VALUE_PAD)
    q = tl.load(
        query + (heads * query_head + row * query_row)[:, None] + key_columns[None, :],
        mask=real[:, None] & (key_columns[None, :] < KEY),
        other=0.0,
    )
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    position = tl.load(positions + row).to(tl.int32)
    for begin in range(0, 2 * NEAR, KEYS):
        columns = begin + tl.arange(0, KEYS)
        slots = tl.load(near + row * (2 * NEAR) + columns)
        seen = slots != 0
        if WINDOWED:
            seen &= position - ((position // NEAR - 1) * NEAR + columns) < window
        at = pages + (slots * KV_HEADS + head) * WIDTH
        keys = tl.load(at[:, None] + key_columns[None, :], mask=seen[:, None] & (key_columns[None, :] < KEY), other=0.0)
        values = tl.load(
            at[:, None] + KEY + value_columns[None, :],
            mask=seen[:, None] & (value_columns[None, :] < VALUE),
            other=0.0,
        )
        scores = _scores(q, keys, seen[None, :], scale, cap, CAPPED)
        highest = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - level[:, None])
        faded = tl.exp2(top - level)
        total = total * faded + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * faded[:, None])
        top = highest
    first = tl.load(splits + row * 2).to(tl.int32)
    stop = tl.load(splits + row * 2 + 1).to(tl.int32)
    for begin in range(first, stop, AT_ONCE):
        for more in tl.static_range(AT_ONCE):
            split = begin + more
            has = real & (split < stop)
            place = ((split * KV_HEADS + head) * rows_all + row) * GROUP + members
            its_top = tl.load(tops + place, mask=has, other=float("-inf"))
            its_total = tl.load(totals + place, mask=has, other=0.0)
            its = tl.load(
                sums + place.to(tl.int64)[:, None] * VALUE + value_columns[None, :],
                mask=has[:, None] & (value_columns[None, :] < VALUE),
                other=0.0,
            )
            highest = tl.maximum(top, its_top)
            level = tl.where(highest == float("-inf"), 0.0, highest)
            faded = tl.exp2(top - level)
            added = tl.exp2(its_top - level)
            total = total * faded + its_total * added
            acc = acc * faded[:, None] + its * added[:, None]
            top = highest
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0) * LOG2
        highest = tl.maximum(top, sink)
        total = total * tl.exp2(top - highest) + tl.exp2(sink - highest)
        acc = acc * tl.exp2(top - highest)[:, None]
    made = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + (row * (KV_HEADS * GROUP) + heads)[:, None] * VALUE + value_columns[None, :],
        made.to(out.dtype.element_ty),
        mask=real[:, None] & (value_columns[None, :] < VALUE),
    )
