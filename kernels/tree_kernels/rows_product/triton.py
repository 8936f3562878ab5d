"""Few rows times a weight on an accelerator, with a norm before and a sum after it: one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

INPUTS_BLOCK = 128
"""Most inputs that a program multiplies at a time."""
PROGRAMS = 96
"""A program has fewer outputs where there would otherwise be fewer programs than this."""
MOST_ROWS = 64
"""Most rows of a program."""
STAGES = 3
WARPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class RowsWeight:
    """A weight, and what is done with the rows before it."""

    weight: Tensor  # [inputs, outputs or more], the outputs of an input adjacent in memory
    outputs: int
    bias: Tensor | None = None  # [outputs]
    norm: Tensor | None = None  # [inputs] weight of an RMS norm of the rows; None: they are not normed
    eps: float = 0.0
    groups: int = 1  # parts of a row that are normed separately, of adjacent inputs

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0, groups: int = 1
    ) -> RowsWeight:
        """weight [inputs, outputs] of any layout; copied where rows of it would not begin at a multiple of 16 bytes"""
        inputs, outputs = weight.shape
        apart = 16 // weight.element_size()
        if weight.stride(1) != 1 or weight.stride(0) % apart:
            wide = weight.new_zeros(inputs, -(-outputs // apart) * apart)
            wide[:, :outputs] = weight
            weight = wide
        return cls(weight, outputs, bias, norm, eps, groups)


def block_of(inputs: int, groups: int) -> int:
    """Inputs that a program multiplies at a time: they are of one group of a norm. 0 if there is no such number."""
    if groups == 1:
        return min(INPUTS_BLOCK, max(16, int(triton.next_power_of_2(inputs))))
    width = inputs // groups
    whole = min(INPUTS_BLOCK, width & -width)
    return whole if whole >= 16 else 0


def rows_product(
    x: Tensor, by: RowsWeight, added: Tensor | None = None, squares: Tensor | None = None, made: Tensor | None = None
) -> Tensor:
    """x [rows, inputs] of any row stride, times the weight, plus the bias. Returns [rows, outputs].

    added [rows, outputs] contiguous: the result is added to it, in place, and it is returned
    squares [rows, groups, parts] float32: sums of squares of each group's inputs, where another kernel has made them
    made [rows, outputs] contiguous: the result's memory
    """
    rows, inputs = x.shape
    assert x.stride(1) == 1 and (added is None or added.is_contiguous())
    assert squares is None or (by.norm is not None and squares.is_contiguous())
    out = added if added is not None else made
    if out is None:
        out = by.weight.new_empty(rows, by.outputs)
    many = min(max(16, triton.next_power_of_2(rows)), MOST_ROWS)
    wide = 64
    while wide > 16 and triton.cdiv(by.outputs, wide) < PROGRAMS:
        wide //= 2
    block = block_of(inputs, 1 if squares is None else by.groups)
    assert block and (squares is not None or by.groups == 1)
    _product[(triton.cdiv(by.outputs, wide), triton.cdiv(rows, many))](
        x,
        by.weight,
        out if by.bias is None else by.bias,  # not read without
        out if by.norm is None else by.norm,
        out if squares is None else squares,
        out,
        rows,
        x.stride(0),
        by.eps,
        INPUTS=inputs,
        OUTPUTS=by.outputs,
        APART=by.weight.stride(0),
        GROUPS=by.groups,
        PARTS=1 if squares is None else squares.shape[2],
        PARTS_BLOCK=1 if squares is None else triton.next_power_of_2(squares.shape[2]),
        NORMED=0 if by.norm is None else 1 if squares is None else 2,
        BIASED=by.bias is not None,
        ADDED=added is not None,
        ROWS=many,
        WIDE=wide,
        BLOCK=block,
        PRECISION="ieee" if by.weight.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


@triton.jit
def _factor(
    squares, row, live, group, GROUPS: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, WIDTH, eps
):
    """One over the root of a group's mean square, of each row."""
    part = tl.arange(0, PARTS_BLOCK)
    mask = live[:, None] & (part < PARTS)[None, :]
    found = tl.load(squares + (row[:, None] * GROUPS + group) * PARTS + part[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(found, 1) / WIDTH + eps)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,  # [rows, INPUTS], a row x_row numbers after the one before it
    weight,  # [INPUTS, OUTPUTS], an input APART numbers after the one before it
    bias,  # [OUTPUTS]
    norm,  # [INPUTS]
    squares,  # [rows, GROUPS, PARTS]
    out,  # [rows, OUTPUTS]; written here
    rows,
    x_row,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    APART: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    kind = weight.dtype.element_ty
    row = row.to(tl.int64)
    total = tl.zeros([ROWS, WIDE], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    factor = tl.zeros([ROWS], tl.float32)
    if NORMED == 2 and GROUPS == 1:
        factor = _factor(squares, row, live, 0, GROUPS, PARTS, PARTS_BLOCK, INPUTS, eps)
    for start in range(0, INPUTS, BLOCK):
        k = start + tl.arange(0, BLOCK)
        inside = k < INPUTS
        a = tl.load(x + row[:, None] * x_row + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight + k[:, None] * APART + n[None, :], mask=inside[:, None] & (n < OUTPUTS)[None, :], other=0.0)
        if NORMED == 1:  # the row's factor is known at the end
            a = a.to(tl.float32)
            square += tl.sum(a * a, 1)
            a = a * tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        if NORMED == 2:
            if GROUPS > 1:
                factor = _factor(
                    squares, row, live, start // (INPUTS // GROUPS), GROUPS, PARTS, PARTS_BLOCK, INPUTS // GROUPS, eps
                )
            a = a.to(tl.float32) * factor[:, None]
            a = a * tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        total = tl.dot(a.to(kind), w, total, input_precision=PRECISION)
    if NORMED == 1:
        total = total * tl.rsqrt(square / INPUTS + eps)[:, None]
    mask = live[:, None] & (n < OUTPUTS)[None, :]
    if BIASED:
        total = total + tl.load(bias + n, mask=n < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    total = total.to(kind)
    at = out + row[:, None] * OUTPUTS + n[None, :]
    if ADDED:
        total = tl.load(at, mask=mask, other=0.0).to(tl.float32) + total.to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)
