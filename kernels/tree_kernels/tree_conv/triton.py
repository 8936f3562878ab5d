"""The convolution of a Mamba-2 mixer on an accelerator, and what the scan keeps of each row: one launch for a step.

A row of padding has no columns. Of it nothing is kept, and its `y`, which no scan will write, is zeroed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""Channels of a program."""


class ConvWeights(NamedTuple):
    """The parameters of a mixer's convolution and of its dt, float32."""

    weight: Tensor  # [W, C]
    bias: Tensor  # [C]
    dt_bias: Tensor  # [H]
    dt_limit: tuple[float, float]


class KeptRows(NamedTuple):
    """A layer's memory of tokens by slot; the rows' own slots, `scratch + row`, are written."""

    raw: Tensor  # [slots, C]
    x: Tensor  # [slots, X, P]
    B: Tensor  # [slots, G, N]
    dt: Tensor  # [slots, H] float32


def conv_rows(
    given: Tensor, dt: Tensor, kept: KeptRows, columns: Tensor, last: Tensor, scratch: int, by: ConvWeights
) -> tuple[Tensor, Tensor]:
    """Convolve every row along its own path, and keep its inputs of the scan.

    given [rows, C] inputs of the convolution: X P of x, G N of B, the rest of C; of any row stride
    dt [rows, H] before softplus, of any row stride   columns [rows, K] int64 slots by position, 0 none
    last [rows] int64 number of the row's columns up to its own, at least W; 0 for padding
    Returns C [rows, the rest] in the dtype of `given`, and y [rows, H P] float32, of which rows of padding are zero and
    others are not yet written.
    """
    rows, channels = given.shape
    taps, heads = len(by.weight), dt.shape[1]
    wide, shared = kept.x[0].numel(), kept.B[0].numel()
    assert given.dtype == kept.raw.dtype == kept.x.dtype == kept.B.dtype
    assert given.stride(1) == dt.stride(1) == 1 and kept.raw.shape[1] == channels
    assert all(each.is_contiguous() for each in (*kept, columns, last, by.weight, by.bias))
    C = given.new_empty(rows, channels - wide - shared)
    y = kept.dt.new_empty(rows, heads * kept.x.shape[2])
    low, high = by.dt_limit
    _conv[(rows, triton.cdiv(channels, BLOCK) + triton.cdiv(heads, BLOCK))](
        given,
        dt,
        *kept,
        C,
        y,
        columns,
        last,
        by.weight,
        by.bias,
        by.dt_bias,
        given.stride(0),
        dt.stride(0),
        scratch,
        low,
        min(high, 3e38),
        TAPS=taps,
        K=columns.shape[1],
        CHANNELS=channels,
        X=wide,
        SHARED=shared,
        HEADS=heads,
        Y=y.shape[1],
        LIMITED=by.dt_limit != (0.0, math.inf),
        BLOCK=BLOCK,
        num_warps=2,
        enable_fp_fusion=False,
    )
    return C, y


@triton.jit(do_not_specialize=["scratch"], do_not_specialize_on_alignment=["columns", "last"])
def _conv(
    given,  # [rows, CHANNELS], a row given_row numbers after the one before it
    dts,  # [rows, HEADS], a row dt_row numbers after the one before it
    raw,  # [slots, CHANNELS]; this and the next three are written here
    x,  # [slots, X]
    B,  # [slots, SHARED]
    dt,  # [slots, HEADS]
    C,  # [rows, CHANNELS - X - SHARED]; written here
    y,  # [rows, Y]; rows of padding are zeroed here
    columns,  # [rows, K]
    last,  # [rows]
    weight,  # [TAPS, CHANNELS]
    bias,  # [CHANNELS]
    dt_bias,  # [HEADS]
    given_row,
    dt_row,
    scratch,
    low,
    high,
    TAPS: tl.constexpr,
    K: tl.constexpr,
    CHANNELS: tl.constexpr,
    X: tl.constexpr,
    SHARED: tl.constexpr,
    HEADS: tl.constexpr,
    Y: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    within = tl.arange(0, BLOCK)
    end = tl.load(last + row)
    slot = scratch + row
    PARTS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    if end == 0:
        for start in range(part * BLOCK, Y, tl.num_programs(1) * BLOCK):
            tl.store(y + row * Y + start + within, tl.zeros([BLOCK], tl.float32), mask=start + within < Y)
    elif part < PARTS:
        c = part * BLOCK + within
        inside = c < CHANNELS
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            at = tl.load(columns + row * K + end - TAPS + tap)
            # A row of this step may be written by now or not: it is read where it was given.
            mine = at >= scratch
            new = tl.load(given + (at - scratch) * given_row + c, mask=inside & mine, other=0.0)
            old = tl.load(raw + at * CHANNELS + c, mask=inside & (at < scratch), other=0.0)
            seen = tl.where(mine, new, old).to(tl.float32)
            product = seen * tl.load(weight + tap * CHANNELS + c, mask=inside, other=0.0)
            total = product if tap == 0 else total + product
            if tap == TAPS - 1:
                tl.store(raw + slot * CHANNELS + c, new, mask=inside)
        total = total + tl.load(bias + c, mask=inside, other=0.0)
        mixed = tl.div_rn(total, 1.0 + tl.exp(-total)).to(C.dtype.element_ty)
        tl.store(x + slot * X + c, mixed, mask=c < X)
        tl.store(B + slot * SHARED + c - X, mixed, mask=(c >= X) & (c < X + SHARED))
        tl.store(C + row * (CHANNELS - X - SHARED) + c - X - SHARED, mixed, mask=inside & (c >= X + SHARED))
    else:
        h = (part - PARTS) * BLOCK + within
        inside = h < HEADS
        value = tl.load(dts + row * dt_row + h, mask=inside, other=0.0).to(tl.float32)
        value = value + tl.load(dt_bias + h, mask=inside, other=0.0)
        # log(1 + e) e / ((1 + e) - 1) is log1p(e): the quotient takes back what 1 + e was rounded by.
        e = tl.exp(tl.minimum(value, 20.0))
        more = 1.0 + e
        exact = tl.where(more == 1.0, e, tl.log(more) * tl.div_rn(e, tl.where(more == 1.0, 1.0, more - 1.0)))
        soft = tl.where(value > 20.0, value, exact)
        if LIMITED:
            soft = tl.minimum(tl.maximum(soft, low), high)
        tl.store(dt + slot * HEADS + h, soft, mask=inside)
