"""Few rows times a weight on an accelerator, with a norm before and a sum after it: one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_INPUTS = 4096
"""Most inputs of a row that is multiplied alone, without tensor cores, by programs that load all their weights at
once."""
FEW_OUTPUTS = 8
"""Most outputs of a program that multiplies a row alone; twice as many for weights with MANY_OUTPUTS."""
FEW_WEIGHTS = 128
"""Most weights that a thread of such a program (for one row alone) holds in registers."""
FEW_PROGRAMS = 192
"""Least number of programs for one row: programs have fewer outputs, at least two, where there would be fewer of
them."""
MANY_OUTPUTS = 16384
"""Number of outputs of a weight from which on programs have more outputs each."""
LEAST_ROWS, MOST_ROWS = 8, 32
"""Rows of a program that multiplies by tensor cores. Each of its warps multiplies inputs of its own."""
TILE_INPUTS = 64
"""Most adjacent inputs that a warp multiplies at a time by tensor cores."""
TILE_STAGES = 3
"""Parts of the weights that a program with tensor cores loads ahead."""
WARPS = 4


def tile_of(inputs: int, outputs: int, rows: int) -> tuple[int, int, int]:
    """Settings of a program with tensor cores: its outputs, the most inputs that a warp multiplies at a time, and its
    warps. They took the least time of the settings that were measured on a GPU."""
    block = TILE_INPUTS if rows < MOST_ROWS else TILE_INPUTS // 2
    if outputs >= MANY_OUTPUTS:
        return 64, block, 2 if rows == LEAST_ROWS else 4
    if outputs > inputs:
        return 32, block, 4
    return (8, TILE_INPUTS, 8) if rows < MOST_ROWS else (16, TILE_INPUTS, 4)


@dataclass(frozen=True, slots=True, eq=False)
class RowsWeight:
    """A weight, and what is done with the rows before it."""

    weight: Tensor  # [outputs, inputs or more], the inputs of an output adjacent in memory
    inputs: int
    bias: Tensor | None = None  # [outputs]
    norm: Tensor | None = None  # [inputs] weight of an RMS norm of the rows; None: they are not normed
    eps: float = 0.0
    groups: int = 1  # parts of a row that are normed separately, of adjacent inputs

    @classmethod
    def of(
        cls, weight: Tensor, bias: Tensor | None = None, norm: Tensor | None = None, eps: float = 0.0, groups: int = 1
    ) -> RowsWeight:
        """weight [inputs, outputs] of any layout; copied where the inputs of an output are not adjacent, or would not
        begin at a multiple of 16 bytes"""
        inputs, outputs = weight.shape
        weight, apart = weight.t(), 16 // weight.element_size()
        if weight.stride(1) != 1 or weight.stride(0) % apart or weight.data_ptr() % 16:
            wide = weight.new_zeros(outputs, -(-inputs // apart) * apart)
            wide[:, :inputs] = weight
            weight = wide
        return cls(weight, inputs, bias, norm, eps, groups)

    @property
    def outputs(self) -> int:
        return len(self.weight)


def block_of(inputs: int, groups: int, most: int = TILE_INPUTS) -> int:
    """Inputs that a warp multiplies at a time: they are of one group of a norm. 0 if there is no such number."""
    if groups == 1:
        return min(most, max(16, int(triton.next_power_of_2(inputs))))
    width = inputs // groups
    whole = min(most, width & -width)
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
    assert inputs == by.inputs and x.stride(1) == 1 and (added is None or added.is_contiguous())
    assert squares is None or (by.norm is not None and squares.is_contiguous())
    assert squares is not None or by.groups == 1
    out = added if added is not None else made
    if out is None:
        out = by.weight.new_empty(rows, by.outputs)
    given = (
        x,
        by.weight,
        out if by.bias is None else by.bias,  # not read without
        out if by.norm is None else by.norm,
        out if squares is None else squares,
        out,
        rows,
        x.stride(0),
        by.eps,
    )
    constants = {
        "INPUTS": inputs,
        "OUTPUTS": by.outputs,
        "APART": by.weight.stride(0),
        "GROUPS": by.groups,
        "PARTS": 1 if squares is None else squares.shape[2],
        "PARTS_BLOCK": 1 if squares is None else triton.next_power_of_2(squares.shape[2]),
        "NORMED": 0 if by.norm is None else 1 if squares is None else 2,
        "BIASED": by.bias is not None,
        "ADDED": added is not None,
    }
    block = triton.next_power_of_2(inputs)
    if rows == 1 and block <= FEW_INPUTS:
        most = FEW_OUTPUTS * (2 if by.outputs >= MANY_OUTPUTS else 1)
        wide = min(most, FEW_WEIGHTS * 32 * WARPS // block)
        while wide > 2 and triton.cdiv(by.outputs, wide) < FEW_PROGRAMS:
            wide //= 2
        _few[(triton.cdiv(by.outputs, wide),)](*given, **constants, ROWS=1, WIDE=wide, BLOCK=block, num_warps=WARPS)
        return out
    many = min(max(LEAST_ROWS, triton.next_power_of_2(rows)), MOST_ROWS)
    wide, most, warps = tile_of(inputs, by.outputs, many)
    block = block_of(inputs, 1 if squares is None else by.groups, most)
    assert block
    _tiles[(triton.cdiv(by.outputs, wide), triton.cdiv(rows, many))](
        *given,
        **constants,
        ROWS=many,
        WIDE=wide,
        BLOCK=block,
        SPLITS=min(warps, triton.next_power_of_2(triton.cdiv(inputs, block))),
        PRECISION="ieee" if by.weight.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=TILE_STAGES,
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
def _few(
    x,  # [rows, INPUTS], a row x_row numbers after the one before it
    weight,  # [OUTPUTS, INPUTS], an output APART numbers after the one before it
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
    BLOCK: tl.constexpr,  # INPUTS or more
):
    """The products of a few outputs, whose weights are loaded at once, before anything waits for them, and are kept."""
    n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    within = n < OUTPUTS
    k = tl.arange(0, BLOCK)
    inside = k < INPUTS
    row = tl.arange(0, ROWS)
    live = row < rows
    kind = weight.dtype.element_ty
    of = weight + n.to(tl.int64)[None, :, None] * APART + k[None, None, :]
    # Volatile: other loads would be moved behind the sums, where each would be waited for by itself.
    w = tl.load(of, mask=within[None, :, None] & inside[None, None, :], other=0.0, volatile=True)
    at = x + row[:, None, None] * x_row + k[None, None, :]
    known = live[:, None, None] & inside[None, None, :]
    a = tl.load(at, mask=known, other=0.0, volatile=ROWS == 1).to(tl.float32)  # several stay in the cache
    mask = live[:, None] & within[None, :]
    to = out + row[:, None] * OUTPUTS + n[None, :]
    if ADDED:
        before = tl.load(to, mask=mask, other=0.0, volatile=True).to(tl.float32)
    scaled = a
    if NORMED:
        its_norm = tl.load(norm + k[None, None, :], mask=inside[None, None, :], other=0.0, volatile=ROWS == 1)
        scaled = a * its_norm.to(tl.float32)
    if NORMED == 2 and GROUPS == 1:
        factor = _factor(squares, row, live, 0, GROUPS, PARTS, PARTS_BLOCK, INPUTS, eps)
    if GROUPS > 1:
        group = k // (INPUTS // GROUPS)
        factors = tl.zeros([ROWS, 1, BLOCK], tl.float32)
        for each in tl.static_range(GROUPS):
            its = _factor(squares, row, live, each, GROUPS, PARTS, PARTS_BLOCK, INPUTS // GROUPS, eps)
            factors = tl.where((group == each)[None, None, :], its[:, None, None], factors)
        scaled = scaled * factors
    total = tl.sum(w.to(tl.float32) * scaled, 2)
    if NORMED == 1:
        total = total * tl.rsqrt(tl.sum(a * a, 2) / INPUTS + eps)
    if NORMED == 2 and GROUPS == 1:
        total = total * factor[:, None]
    if BIASED:
        total = total + tl.load(bias + n, mask=within, other=0.0).to(tl.float32)[None, :]
    total = total.to(kind)
    if ADDED:
        total = before + total.to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _split_factors(
    squares, row, live, group, GROUPS: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, WIDTH, eps
):
    """`_factor` of each split's group, [splits, rows]."""
    part = tl.arange(0, PARTS_BLOCK)
    mask = live[None, :, None] & (part < PARTS)[None, None, :]
    at = (row[None, :, None] * GROUPS + group[:, None, None]) * PARTS + part[None, None, :]
    return tl.rsqrt(tl.sum(tl.load(squares + at, mask=mask, other=0.0), 2) / WIDTH + eps)


@triton.jit(do_not_specialize=["rows"])
def _tiles(
    x,  # [rows, INPUTS], a row x_row numbers after the one before it
    weight,  # [OUTPUTS, INPUTS], an output APART numbers after the one before it
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
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The products of some outputs with all rows. Each split has inputs of its own, and its products are a warp's."""
    n = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    within, live = n < OUTPUTS, row < rows
    kind = weight.dtype.element_ty
    row = row.to(tl.int64)
    split = tl.arange(0, SPLITS)
    total = tl.zeros([SPLITS, WIDE, ROWS], tl.float32)
    square = tl.zeros([SPLITS, BLOCK, ROWS], tl.float32)
    mask = within[:, None] & live[None, :]
    to = out + row[None, :] * OUTPUTS + n[:, None]
    if ADDED:
        before = tl.load(to, mask=mask, other=0.0).to(tl.float32)
    if NORMED == 2 and GROUPS == 1:
        factor = _factor(squares, row, live, 0, GROUPS, PARTS, PARTS_BLOCK, INPUTS, eps)
    for start in range(0, INPUTS, SPLITS * BLOCK):
        k = start + split[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # [SPLITS, BLOCK]
        inside = k < INPUTS
        of = weight + n.to(tl.int64)[None, :, None] * APART + k[:, None, :]
        w = tl.load(of, mask=within[None, :, None] & inside[:, None, :], other=0.0)
        at = x + row[None, None, :] * x_row + k[:, :, None]
        a = tl.load(at, mask=live[None, None, :] & inside[:, :, None], other=0.0)
        if NORMED:
            a = a.to(tl.float32)
            if NORMED == 1:
                square += a * a
            a = a * tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)[:, :, None]
            if NORMED == 2 and GROUPS > 1:
                group = tl.minimum((start + split * BLOCK) // (INPUTS // GROUPS), GROUPS - 1)
                its = _split_factors(squares, row, live, group, GROUPS, PARTS, PARTS_BLOCK, INPUTS // GROUPS, eps)
                a = a * its[:, None, :]
        total = tl.dot(w, a.to(kind), total, input_precision=PRECISION)
    made = tl.sum(total, 0)
    if NORMED == 1:
        made = made * tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / INPUTS + eps)[None, :]
    if NORMED == 2 and GROUPS == 1:
        made = made * factor[None, :]
    if BIASED:
        made = made + tl.load(bias + n, mask=within, other=0.0).to(tl.float32)[:, None]
    made = made.to(kind)
    if ADDED:
        made = before + made.to(tl.float32)
    tl.store(to, made.to(out.dtype.element_ty), mask=mask)
