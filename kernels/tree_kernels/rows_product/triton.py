"""Few rows times a weight on an accelerator, with a norm before and a sum after it: one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 8
"""Most rows that are multiplied without tensor cores, by programs that load all their weights at once."""
FEW_INPUTS = 4096
"""Most inputs of such a program."""
FEW_ALL = 16384
"""Most inputs of all rows of such a program."""
FEW_OUTPUTS = 8
"""Most outputs of such a program."""
FEW_WEIGHTS = 64
"""Most weights of a thread of such a program, which are in registers."""
FEW_SUMS = 32
"""Most sums of a thread of such a program."""
FEW_NUMBERS = 64
"""Most numbers of rows of a thread of such a program. They are in registers, too."""
FEW_PROGRAMS = 384
"""Such a program has fewer outputs, two at least, where there would otherwise be fewer programs than this."""
INPUTS_BLOCK = 128
"""Most inputs that a program multiplies at a time by tensor cores."""
PROGRAMS = 96
"""Such a program has fewer outputs where there would otherwise be fewer programs than this."""
MOST_ROWS = 64
"""Most rows of such a program."""
WARPS = 4


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
    few, block = triton.next_power_of_2(rows), triton.next_power_of_2(inputs)
    if few <= FEW_ROWS and block <= FEW_INPUTS and few * block <= FEW_ALL:
        warps = max(WARPS, few * block // (32 * FEW_NUMBERS))
        wide = min(FEW_OUTPUTS, FEW_SUMS // few, FEW_WEIGHTS * 32 * warps // block)
        while wide > 2 and triton.cdiv(by.outputs, wide) < FEW_PROGRAMS:
            wide //= 2
        _few[(triton.cdiv(by.outputs, wide),)](
            *given,
            **constants,
            ROWS=few,
            WIDE=wide,
            BLOCK=block,
            num_warps=warps,
        )
        return out
    many = min(max(16, triton.next_power_of_2(rows)), MOST_ROWS)
    wide = 64
    while wide > 16 and triton.cdiv(by.outputs, wide) < PROGRAMS:
        wide //= 2
    block = block_of(inputs, 1 if squares is None else by.groups)
    assert block
    _product[(triton.cdiv(by.outputs, wide), triton.cdiv(rows, many))](
        *given,
        **constants,
        ROWS=many,
        WIDE=wide,
        BLOCK=block,
        PRECISION="ieee" if by.weight.dtype == torch.float32 else "tf32",
        num_warps=WARPS,
        num_stages=3 if by.weight.dtype == torch.float32 else 4,  # what a multiprocessor's memory holds
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


@triton.jit(do_not_specialize=["rows"])
def _product(
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
        of = weight + n.to(tl.int64)[None, :] * APART + k[:, None]
        w = tl.load(of, mask=inside[:, None] & (n < OUTPUTS)[None, :], other=0.0)
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
