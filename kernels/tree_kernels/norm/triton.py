"""Norms on an accelerator: one program for each row and group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.norm.form import GATE_FIRST, GATE_LAST, HALVED_TO, NO_GATE, WIDEST, RowNorm, padded_width


def norm_rows(x: Tensor, form: RowNorm, gate: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Norm x [..., groups * width] of any strides. The result is contiguous and has the same shape.

    gate: as x, of any floating type; None where `form.gate` is NO_GATE   dtype: of the result; None: `form.result_type`
    """
    assert (gate is None) == (form.gate == NO_GATE)
    return _normed(x, form, (), gate, dtype)[1]


def add_and_norm_rows(
    x: Tensor,
    others: Sequence[Tensor],
    form: RowNorm,
    sum_type: torch.dtype | None = None,
    row_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Add one other tensor to x [..., width], or the sum of two, and norm the sum. Returns the sum and its norm, with
    the bits of torch's additions and of `norm_rows`.

    others: of x's shape, and of one type; none: x itself is normed
    sum_type: type of the sum; None: x's   row_type: type that the sum is rounded to before its norm; None: its own
    """
    assert form.gate == NO_GATE and form.groups == 1 and len(others) <= 2
    assert all(each.shape == x.shape and each.dtype == others[0].dtype for each in others)
    return _normed(x, form, others, sum_type=sum_type, row_type=row_type)


def _normed(
    x: Tensor,
    form: RowNorm,
    others: Sequence[Tensor],
    gate: Tensor | None = None,
    result_type: torch.dtype | None = None,
    sum_type: torch.dtype | None = None,
    row_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    rows, *added = map(_in_rows, (x, *others))
    gates = rows if gate is None else _in_rows(gate)
    assert gates.shape == rows.shape
    width = rows.shape[1] // form.groups
    first, last = (added[0], added[-1]) if added else (rows, rows)  # the kernel reads neither without `added`
    total = rows.new_empty(x.shape, dtype=sum_type) if added else x
    assert width <= WIDEST and width * form.groups == rows.shape[1]
    for each in (form.weight, form.bias):
        assert each is None or len(each) == rows.shape[1]
    normed_type = row_type or total.dtype
    y = rows.new_empty(x.shape, dtype=result_type or form.result_type(normed_type))
    if not y.numel():
        return total, y
    block = padded_width(width)
    _norm[(len(rows), form.groups)](
        rows,
        gates,
        rows if form.weight is None else form.weight,  # rows stand in, unread, for what is None
        rows if form.bias is None else form.bias,
        y,
        first,
        last,
        total,
        rows.stride(0),
        gates.stride(0),
        first.stride(0),
        last.stride(0),
        form.eps,
        WIDTH=width,
        BLOCK=block,
        CENTRED=form.centred,
        ROUNDED=form.rounded,
        WEIGHTED=form.weight is not None,
        BIASED=form.bias is not None,
        GATE=form.gate,
        ADDED=len(added),
        ROWS=IN_TRITON[normed_type],
        num_warps=warps_of(block),
        enable_fp_fusion=False,
    )
    return total, y


def warps_of(block: int) -> int:
    """Number of warps with which a thread holds at most 32 numbers of a row; a gated norm's registers spill with 64."""
    return max(1, min(block // 256, 4), block // 1024)


def _in_rows(x: Tensor) -> Tensor:
    """View x as [rows, columns] with neighbouring columns in memory; copied if the strides need it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


IN_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

TAIL: tl.constexpr = tl.constexpr(HALVED_TO)
FIRST: tl.constexpr = tl.constexpr(GATE_FIRST)
LAST: tl.constexpr = tl.constexpr(GATE_LAST)


@triton.jit
def _row_sum(x, BLOCK: tl.constexpr):
    """x [BLOCK]. Each step adds pairs, so no layout changes the order."""
    for step in tl.static_range(16):
        if (BLOCK >> step) > TAIL:
            x = tl.sum(tl.reshape(x, (2, BLOCK >> (step + 1))), 0)
        elif (BLOCK >> step) > 1:
            x = tl.sum(tl.reshape(x, (BLOCK >> (step + 1), 2)), 1)
    return tl.sum(x, 0)  # all entries but one are 0


@triton.jit
def _norm(
    x,  # [rows, groups * WIDTH], a row x_row numbers after the one before it
    gate,  # [rows, groups * WIDTH], a row gate_row numbers after the one before it
    weight,  # [groups * WIDTH]
    bias,  # [groups * WIDTH]
    y,  # [rows, groups * WIDTH]; written here
    first,  # [rows, WIDTH], added to x with 1 added, as is `last` with 2
    last,  # [rows, WIDTH]
    total,  # [rows, WIDTH] the sums; written here, where something is added
    x_row,
    gate_row,
    first_row,
    last_row,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUNDED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    GATE: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,  # type of the rows that are normed
):
    row = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    inside = within < WIDTH
    columns = tl.program_id(1) * WIDTH + within
    values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDED != 0:
        more = tl.load(first + row * first_row + columns, mask=inside, other=0.0).to(tl.float32)
        if ADDED == 2:
            more += tl.load(last + row * last_row + columns, mask=inside, other=0.0).to(tl.float32)
            more = more.to(first.dtype.element_ty).to(tl.float32)
        summed = (values + more).to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + columns, summed, mask=inside)
        values = summed.to(tl.float32)
    values = values.to(ROWS).to(tl.float32)
    if GATE != 0:
        g = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
        g = tl.div_rn(g, 1.0 + tl.exp(-g))
        if GATE == FIRST:
            values = values * g
    if CENTRED:
        mean = tl.div_rn(_row_sum(values, BLOCK), WIDTH * 1.0)
        values = tl.where(inside, values - mean, 0.0)
    variance = tl.div_rn(_row_sum(values * values, BLOCK), WIDTH * 1.0)
    normed = values * tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    if ROUNDED:
        normed = normed.to(ROWS).to(tl.float32)
    if WEIGHTED:
        normed = normed * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        normed = normed + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if GATE == LAST:
        normed = normed * g
    row_of_y = row * (tl.num_programs(1) * WIDTH)
    tl.store(y + row_of_y + columns, normed.to(y.dtype.element_ty), mask=inside)
