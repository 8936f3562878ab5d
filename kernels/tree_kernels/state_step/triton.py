"""What a Mamba-1 mixer does between its projections for a token of each row, on an accelerator: two launches.

The first convolves, and multiplies by x_proj in parts of the channels. The second adds the parts, and advances each
row's state from its source slot to its target slot.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 32
"""Channels of a program of the first."""
STEP_CHANNELS = 64
"""Channels of a program of the second."""
MOST_ROWS = 64


class StepWeights(NamedTuple):
    """The parameters of a mixer between its projections."""

    conv_weight: Tensor  # [W, I]
    conv_bias: Tensor  # [I]
    x_proj: Tensor  # [I, R + 2 N] dt, B, C
    dt_proj: Tensor  # [R, I] float32
    dt_bias: Tensor  # [I] float32
    A: Tensor  # [I, N] float32, negative
    D: Tensor  # [I] float32


def step_level(
    given: Tensor, recurrent: Tensor, conv: Tensor, source: Tensor, target: Tensor, by: StepWeights
) -> Tensor:
    """Run one token per row through a Mamba-1 mixer, between its projections.

    given [rows, 2 I] of any row stride: inputs of the convolution, then the gate
    recurrent [slots, I, N] float32, conv [slots, W - 1, I]; both written at target   source, target [rows] int64
    Returns (y + D x) silu(gate) [rows, I] in the dtype of `given`. No row's target is another row's source.
    """
    assert given.stride(1) == 1 and all(each.is_contiguous() for each in (recurrent, conv, source, target, *by))
    rows, (channels, size) = len(given), by.A.shape
    rank = by.dt_proj.shape[0]
    parts = triton.cdiv(channels, CHANNELS)
    x = given.new_empty(rows, channels)
    selected = by.A.new_empty(parts, rows, rank + 2 * size)
    many = min(max(16, triton.next_power_of_2(rows)), MOST_ROWS)
    sizes = {"INNER": channels, "N": size, "RANK": rank}
    _select[(parts, triton.cdiv(rows, many))](
        given,
        conv,
        source,
        target,
        by.conv_weight,
        by.conv_bias,
        by.x_proj,
        x,
        selected,
        rows,
        given.stride(0),
        **sizes,
        TAPS=len(by.conv_weight),
        TAPS_BLOCK=triton.next_power_of_2(len(by.conv_weight) - 1),
        OUTPUTS_BLOCK=max(16, triton.next_power_of_2(rank + 2 * size)),
        ROWS=many,
        BLOCK=CHANNELS,
        PRECISION="ieee" if by.x_proj.dtype.itemsize == 4 else "tf32",
        num_warps=4,
    )
    out = given.new_empty(rows, channels)
    _step[(rows, triton.cdiv(channels, STEP_CHANNELS))](
        given,
        x,
        selected,
        recurrent,
        source,
        target,
        by.dt_proj,
        by.dt_bias,
        by.A,
        by.D,
        out,
        rows,
        given.stride(0),
        **sizes,
        PARTS=parts,
        PARTS_BLOCK=triton.next_power_of_2(parts),
        RANK_BLOCK=triton.next_power_of_2(rank),
        N_BLOCK=triton.next_power_of_2(size),
        BLOCK=STEP_CHANNELS,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _select(
    given,  # [rows, 2 I], a row given_row numbers after the one before it
    conv,  # [slots, TAPS - 1, I]; written here
    source,  # [rows]
    target,  # [rows]
    weight,  # [TAPS, I]
    bias,  # [I]
    x_proj,  # [I, RANK + 2 N]
    x,  # [rows, I]; written here
    selected,  # [parts, rows, RANK + 2 N]; written here
    rows,
    given_row,
    INNER: tl.constexpr,
    N: tl.constexpr,
    RANK: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_BLOCK: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    OUTPUTS: tl.constexpr = RANK + 2 * N
    part = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    row = row.to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    q = tl.arange(0, OUTPUTS_BLOCK)
    mask = live[:, None] & (i < INNER)[None, :]
    w = tl.load(
        x_proj + i[:, None] * OUTPUTS + q[None, :], mask=(i < INNER)[:, None] & (q < OUTPUTS)[None, :], other=0.0
    )
    begin = tl.load(source + row, mask=live, other=0)
    end = tl.load(target + row, mask=live, other=0)
    own = tl.load(given + row[:, None] * given_row + i[None, :], mask=mask, other=0.0)
    tap = tl.arange(0, TAPS_BLOCK)
    before = (tap < TAPS - 1)[:, None, None] & mask[None, :, :]
    # All taps are loaded before any is stored: a load behind a store is not begun before the store's number is there.
    at = (begin[None, :] * (TAPS - 1) + tap[:, None])[:, :, None] * INNER + i[None, None, :]
    seen = tl.load(conv + at, mask=before, other=0.0)
    inside = (tap < TAPS - 1)[:, None] & (i < INNER)[None, :]
    by = tl.load(weight + tap[:, None] * INNER + i[None, :], mask=inside, other=0.0).to(tl.float32)
    last = tl.load(weight + (TAPS - 1) * INNER + i, mask=i < INNER, other=0.0).to(tl.float32)
    start = tl.load(bias + i, mask=i < INNER, other=0.0).to(tl.float32)
    total = tl.sum(seen.to(tl.float32) * by[:, None, :], 0) + (own.to(tl.float32) * last[None, :] + start[None, :])
    to = (end[None, :] * (TAPS - 1) + tap[:, None] - 1)[:, :, None] * INNER + i[None, None, :]
    tl.store(conv + to, seen, mask=before & (tap > 0)[:, None, None])
    tl.store(conv + (end[:, None] * (TAPS - 1) + TAPS - 2) * INNER + i[None, :], own, mask=mask)
    made = (total / (1.0 + tl.exp(-total))).to(x.dtype.element_ty)
    tl.store(x + row[:, None] * INNER + i[None, :], made, mask=mask)
    found = tl.dot(made, w, input_precision=PRECISION)
    at = selected + (part * rows + row[:, None]) * OUTPUTS + q[None, :]
    tl.store(at, found, mask=live[:, None] & (q < OUTPUTS)[None, :])


@triton.jit
def _sum_of_parts(selected, row, rows, column, inside, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Columns [columns] of a row's product by x_proj."""
    part = tl.arange(0, BLOCK)
    at = (part[:, None] * rows + row) * OUTPUTS + column[None, :]
    return tl.sum(tl.load(selected + at, mask=(part < PARTS)[:, None] & inside[None, :], other=0.0), 0)


@triton.jit(do_not_specialize=["rows"])
def _step(
    given,  # [rows, 2 I], a row given_row numbers after the one before it
    x,  # [rows, I]
    selected,  # [PARTS, rows, RANK + 2 N]
    recurrent,  # [slots, I, N]; written here
    source,  # [rows]
    target,  # [rows]
    dt_proj,  # [RANK, I]
    dt_bias,  # [I]
    A,  # [I, N]
    D,  # [I]
    out,  # [rows, I]; written here
    rows,
    given_row,
    INNER: tl.constexpr,
    N: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    OUTPUTS: tl.constexpr = RANK + 2 * N
    kind = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, N_BLOCK)
    r = tl.arange(0, RANK_BLOCK)
    i_in = i < INNER
    n_in = n < N
    both = i_in[:, None] & n_in[None, :]
    begin = tl.load(source + row)
    end = tl.load(target + row)
    state = tl.load(recurrent + (begin * INNER + i[:, None]) * N + n[None, :], mask=both, other=0.0)
    a = tl.load(A + i[:, None] * N + n[None, :], mask=both, other=0.0)
    own = tl.load(x + row * INNER + i, mask=i_in, other=0.0).to(tl.float32)
    gate = tl.load(given + row * given_row + INNER + i, mask=i_in, other=0.0).to(tl.float32)
    by = tl.load(dt_proj + r[:, None] * INNER + i[None, :], mask=(r < RANK)[:, None] & i_in[None, :], other=0.0)
    # Rounded as a product of the weights' type is.
    low = _sum_of_parts(selected, row, rows, r, r < RANK, OUTPUTS, PARTS, PARTS_BLOCK).to(kind).to(tl.float32)
    b = _sum_of_parts(selected, row, rows, RANK + n, n_in, OUTPUTS, PARTS, PARTS_BLOCK).to(kind).to(tl.float32)
    c = _sum_of_parts(selected, row, rows, RANK + N + n, n_in, OUTPUTS, PARTS, PARTS_BLOCK).to(kind).to(tl.float32)
    dt = tl.sum(by * low[:, None], 0) + tl.load(dt_bias + i, mask=i_in, other=0.0)
    e = tl.exp(tl.minimum(dt, 20.0))
    more = 1.0 + e
    # log(1 + e) e / ((1 + e) - 1) is log1p(e): the quotient takes back what 1 + e was rounded by.
    exact = tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))
    dt = tl.where(dt > 20.0, dt, exact)
    state = state * tl.exp(dt[:, None] * a) + (dt * own)[:, None] * b[None, :]
    tl.store(recurrent + (end * INNER + i[:, None]) * N + n[None, :], state, mask=both)
    y = tl.sum(state * c[None, :], 1) + own * tl.load(D + i, mask=i_in, other=0.0)
    y = y.to(kind).to(tl.float32) * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out + row * INNER + i, y.to(kind), mask=i_in)
