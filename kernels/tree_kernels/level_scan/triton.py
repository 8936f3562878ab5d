"""What a Mamba-2 mixer does between its projections for a level of drafted trees, on an accelerator: one launch."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
"""Most rows of a program: they are of one tree, whose state a program loads once."""
CHANNELS = 16
"""Most channels of a program."""
NUMBERS = 8192
"""Most numbers that a program multiplies at once."""
MOST_WARPS = 4
"""Most warps of a program. A single warp needs no barriers, so a program has one warp for each WARP_NUMBERS numbers
that it multiplies at once."""
WARP_NUMBERS = 2048
"""Numbers that a warp holds in its registers."""


class LevelWeights(NamedTuple):
    """The parameters of a mixer between its projections, float32."""

    conv_weight: Tensor  # [W, I + 2 G N]
    conv_bias: Tensor  # [I + 2 G N]
    dt_bias: Tensor  # [H]
    A: Tensor  # [H] negative
    D: Tensor  # [H]
    dt_limit: tuple[float, float]


class LevelSlots(NamedTuple):
    """A layer's memory of texts and nodes, float32. The slots of new nodes are written."""

    recurrent: Tensor  # [texts, H, P, N]
    raw: Tensor  # [raw slots, I + 2 G N] before the convolution
    x: Tensor  # [nodes, H, P] after the convolution
    B: Tensor  # [nodes, G, N]
    dt: Tensor  # [nodes, H] after softplus and clamp


class LevelTable(NamedTuple):
    """A level's new nodes, R of each tree, and where their inputs are. int64."""

    slots: Tensor  # [trees R] node slot of each row
    taps: Tensor  # [trees R, W] raw slots of each row's last inputs, its own last
    above: Tensor  # [trees R, K] node slots of each row's ancestors in order of depth; 0, whose dt is 0, where none is
    texts: Tensor  # [trees] text slots


def mix_level(given: Tensor, memory: LevelSlots, table: LevelTable, by: LevelWeights) -> tuple[Tensor, Tensor]:
    """Run a mixer between its projections for R new nodes of each tree.

    given [trees R, I + (I + 2 G N) + H] of any row stride: gate, inputs of the convolution (x, B, C), dt before
    softplus
    Returns (y + D x) silu(gate) [trees R, I] float32, and sums of squares of its parts [trees R, G, parts].
    """
    rows, (heads, width, size), groups = len(given), memory.recurrent.shape[1:], memory.B.shape[1]
    trees, most = len(table.texts), table.above.shape[1]
    new = rows // trees
    many = max(1, min(ROWS, new, NUMBERS // (16 * most)))
    while new % many:
        many //= 2
    state = triton.next_power_of_2(size)
    wide = max(1, min(CHANNELS, triton.next_power_of_2(width), NUMBERS // (many * state)))
    parts = triton.cdiv(width, wide)
    assert given.stride(1) == 1 and given.shape[1] == 2 * heads * width + 2 * groups * size + heads
    assert all(each.is_contiguous() for each in (*memory, *table, *by[:-1]))
    out = memory.x.new_empty(rows, heads * width)
    squares = memory.x.new_empty(rows, groups, heads // groups * parts)
    low, high = by.dt_limit
    _mix[(rows // many, heads, parts)](
        given,
        *memory,
        *table,
        *by[:-1],
        out,
        squares,
        given.stride(0),
        low,
        min(high, 3e38),
        TAPS=table.taps.shape[1],
        HEADS=heads,
        P=width,
        N=size,
        GROUPS=groups,
        K=most,
        NEW=new,
        ROWS=many,
        P_BLOCK=wide,
        N_BLOCK=state,
        PARTS=parts,
        LIMITED=by.dt_limit != (0.0, math.inf),
        num_warps=min(MOST_WARPS, max(1, many * state * max(wide, most) // WARP_NUMBERS)),
    )
    return out, squares


@triton.jit
def _convolved(
    given, raw, taps, weight, bias, row, channel, inside, given_row, CHANNELS: tl.constexpr, TAPS: tl.constexpr
):
    """Channels of rows after the convolution and SiLU [rows, channels], and their own inputs.

    given: at the first channel's input   channel: numbers of the channels
    """
    total = (
        tl.zeros([row.shape[0], channel.shape[0]], tl.float32)
        + tl.load(bias + channel, mask=inside, other=0.0)[None, :]
    )
    mask = inside[None, :]
    for tap in tl.static_range(TAPS - 1):
        slot = tl.load(taps + row * TAPS + tap)
        seen = tl.load(raw + slot[:, None] * CHANNELS + channel[None, :], mask=mask, other=0.0)
        total += seen * tl.load(weight + tap * CHANNELS + channel, mask=inside, other=0.0)[None, :]
    own = tl.load(given + row[:, None] * given_row + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    total += own * tl.load(weight + (TAPS - 1) * CHANNELS + channel, mask=inside, other=0.0)[None, :]
    return total / (1.0 + tl.exp(-total)), own


@triton.jit
def _mix(
    given,  # [rows, 2 I + 2 G N + H], a row given_row numbers after the one before it
    recurrent,  # [texts, HEADS, P, N]
    raw,  # [raw slots, CHANNELS]; this and the next three are written here
    xs,  # [nodes, HEADS, P]
    Bs,  # [nodes, GROUPS, N]
    dts,  # [nodes, HEADS]
    slots,  # [rows]
    taps,  # [rows, TAPS]
    above,  # [rows, K]
    texts,  # [trees]
    weight,  # [TAPS, CHANNELS]
    bias,  # [CHANNELS]
    dt_bias,  # [HEADS]
    A,  # [HEADS]
    D,  # [HEADS]
    out,  # [rows, HEADS, P]; written here
    squares,  # [rows, HEADS, PARTS]; written here
    given_row,
    low,
    high,
    TAPS: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    NEW: tl.constexpr,
    ROWS: tl.constexpr,
    P_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    LIMITED: tl.constexpr,
):
    INNER: tl.constexpr = HEADS * P
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * N
    MEMBERS: tl.constexpr = HEADS // GROUPS
    h = tl.program_id(1)
    part = tl.program_id(2)
    group = h // MEMBERS
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    text = tl.load(texts + tl.program_id(0) * ROWS // NEW)
    p = part * P_BLOCK + tl.arange(0, P_BLOCK)
    n = tl.arange(0, N_BLOCK)
    k = tl.arange(0, K)
    p_in = p < P
    n_in = n < N
    at = ((text * HEADS + h) * P + p[:, None]) * N + n[None, :]
    S = tl.load(recurrent + at, mask=p_in[:, None] & n_in[None, :], other=0.0)
    mine = tl.load(slots + row)
    tap = tl.load(taps + row * TAPS + TAPS - 1)
    path = tl.load(above + row[:, None] * K + k[None, :])  # [ROWS, K]
    after = tl.load(above + row[:, None] * K + k[None, :] + 1, mask=(k + 1 < K)[None, :], other=0)
    dt_above = tl.load(dts + path * HEADS + h)
    dt_after = tl.load(dts + after * HEADS + h, mask=(k + 1 < K)[None, :], other=0.0)
    B_above = tl.load(
        Bs + (path[:, :, None] * GROUPS + group) * N + n[None, None, :], mask=n_in[None, None, :], other=0.0
    )
    x_above = tl.load(xs + (path[:, :, None] * HEADS + h) * P + p[None, None, :], mask=p_in[None, None, :], other=0.0)

    inputs = given + INNER
    c, raw_c = _convolved(
        inputs, raw, taps, weight, bias, row, INNER + (GROUPS + group) * N + n, n_in, given_row, CHANNELS, TAPS
    )
    b, raw_b = _convolved(inputs, raw, taps, weight, bias, row, INNER + group * N + n, n_in, given_row, CHANNELS, TAPS)
    x, raw_x = _convolved(inputs, raw, taps, weight, bias, row, h * P + p, p_in, given_row, CHANNELS, TAPS)
    c = tl.where(n_in[None, :], c, 0.0)
    dt = tl.load(inputs + row * given_row + CHANNELS + h).to(tl.float32) + tl.load(dt_bias + h)
    e = tl.exp(tl.minimum(dt, 20.0))
    more = 1.0 + e
    # log(1 + e) e / ((1 + e) - 1) is log1p(e): the quotient takes back what 1 + e was rounded by.
    exact = tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))
    dt = tl.where(dt > 20.0, dt, exact)
    if LIMITED:
        dt = tl.minimum(tl.maximum(dt, low), high)

    a = tl.load(A + h)
    since = tl.cumsum(dt_after * a, 1, reverse=True) + (dt * a)[:, None]  # the decay by all nodes after that one
    whole = tl.sum(dt_above, 1) * a + dt * a
    alike = tl.sum(B_above * c[:, None, :], 2)  # [ROWS, K]
    y = tl.sum(x_above * (tl.exp(since) * dt_above * alike)[:, :, None], 1)
    y += tl.sum(S[None, :, :] * c[:, None, :], 2) * tl.exp(whole)[:, None]
    y += x * (dt * tl.sum(tl.where(n_in[None, :], b, 0.0) * c, 1) + tl.load(D + h))[:, None]
    gate = tl.load(given + row[:, None] * given_row + (h * P + p)[None, :], mask=p_in[None, :], other=0.0).to(
        tl.float32
    )
    y = tl.where(p_in[None, :], y * (gate / (1.0 + tl.exp(-gate))), 0.0)
    tl.store(out + (row[:, None] * HEADS + h) * P + p[None, :], y, mask=p_in[None, :])
    tl.store(squares + (row * HEADS + h) * PARTS + part, tl.sum(y * y, 1))

    tl.store(raw + tap[:, None] * CHANNELS + (h * P + p)[None, :], raw_x, mask=p_in[None, :])
    tl.store(xs + (mine[:, None] * HEADS + h) * P + p[None, :], x, mask=p_in[None, :])
    if part == 0:
        tl.store(dts + mine * HEADS + h, dt)
        if h % MEMBERS == 0:
            tl.store(raw + tap[:, None] * CHANNELS + (INNER + group * N + n)[None, :], raw_b, mask=n_in[None, :])
            tl.store(
                raw + tap[:, None] * CHANNELS + (INNER + (GROUPS + group) * N + n)[None, :], raw_c, mask=n_in[None, :]
            )
            tl.store(Bs + (mine[:, None] * GROUPS + group) * N + n[None, :], b, mask=n_in[None, :])
