"""Mamba-2's recurrence along paths on an accelerator, from fixed arrays: two launches (README.md in this folder).

`fold_and_weigh` advances checkpoints by blocks of tokens, and computes the weight of every column of a row, for each
head: neither reads what the other writes. `scan_rows` adds the columns by their weights, and the checkpoint read by C.
A program computes a row as it would without others, with sums of one order, so a row's bits do not depend on what else
is in a step.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tree_kernels.tree_scan.inputs import TokenInputs

ITEM_ROWS = 16
"""Most rows of an item: they read one checkpoint, which a program loads once."""
STATE_PART = 64
"""Numbers of a state's width that `scan_rows` multiplies at a time."""
SCAN_WIDTH = 64
"""Most channels of a program of `scan_rows`."""
SCAN_STEP = 8
"""Columns whose loads a scan begins together."""
SCAN_WARPS = 8
HEADS_BLOCK = 16
"""Heads whose weights a program of `fold_and_weigh` computes."""
FOLD_WIDTH = 16
"""Most channels that a program of `fold_and_weigh` folds. With 64 of them, and states of 128, a thread would have 168
registers where weights take 40, so fewer programs would run at once."""
FOLD_STEP = 8
"""Tokens whose loads a fold begins together."""


class ScanTable(NamedTuple):
    """A step's rows and folds as arrays of fixed shapes. int64.

    States are numbered so: below `len(states)` a slot of the layer's checkpoints, from there on one of `room`, which
    holds the results of a step's folds that must not be in a checkpoint's slot before all rows have been scanned.
    """

    columns: Tensor  # [rows, K] slots by position, 0 none
    last: Tensor  # [rows] number of the row's columns up to its own; 0 for padding
    items: Tensor  # [items, 2 + ITEM_ROWS] number of rows, 0 for none; their state; the rows
    chains: Tensor  # [chains, 2] first fold and number of folds; each fold of a chain starts from the one before it
    fold_columns: Tensor  # [folds, block] slots of a block's tokens, in order
    fold_states: Tensor  # [folds, 2] the state that a chain's first fold starts from; the state where one is stored
    moved: Tensor  # [folds] the checkpoint to which the room's state of this number is copied after the scan; 0 none


def fold_and_weigh(
    inputs: TokenInputs, states: Tensor, room: Tensor, C: Tensor, table: ScanTable, A: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance checkpoints by the blocks of the table's chains, fold by fold, token by token. Returns the weight of
    every column of a row, exp(a_(j+1) + ... + a_i) dt_j (C_i . B_j), and the decay of the row's checkpoint,
    exp(a_1 + ... + a_i).

    states [slots, H, P, N], room [folds, H, P, N] float32; both written here   C [rows, r G N]   A [H] float32
    returns [rows, H, K] and [rows, H] float32; rows of padding are not written
    """
    heads, width, size = states.shape[1:]
    own, groups = inputs.x.shape[1], inputs.B.shape[1]
    sizes = _sizes(heads, own, groups, width, size)
    block, (rows, count) = table.fold_columns.shape[1], table.columns.shape
    assert block % FOLD_STEP == 0 and states.is_contiguous() and room.is_contiguous()
    weights, decays = inputs.dt.new_empty(rows, heads, count), inputs.dt.new_empty(rows, heads)
    blocks, wide = triton.cdiv(heads // sizes["READERS"], HEADS_BLOCK), min(sizes.pop("P_BLOCK"), FOLD_WIDTH)
    folding, weighing = len(table.chains) * heads * triton.cdiv(width, wide), rows * sizes["READERS"] * blocks
    _fold_and_weigh[(folding + weighing,)](
        *inputs,
        A,
        C,
        states,
        room,
        table.chains,
        table.fold_columns,
        table.fold_states,
        table.columns,
        table.last,
        weights,
        decays,
        len(states),
        FOLDING=folding,
        **sizes,
        P_BLOCK=wide,
        TOKENS=block,
        STEP=FOLD_STEP,
        K=count,
        BLOCK=HEADS_BLOCK,
        BLOCKS=blocks,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return weights, decays


def scan_rows(
    inputs: TokenInputs,
    states: Tensor,
    room: Tensor,
    C: Tensor,
    weighed: tuple[Tensor, Tensor],
    table: ScanTable,
    scratch: int,
    D: Tensor,
    y: Tensor,
) -> None:
    """Write y [rows, H P] float32 of the table's rows, before gate and norm.

    weighed: the result of `fold_and_weigh`   scratch: the slot of the first row's inputs   D [H] float32
    """
    heads, width, size = states.shape[1:]
    own, groups = inputs.x.shape[1], inputs.B.shape[1]
    sizes = _sizes(heads, own, groups, width, size)
    wide = min(sizes.pop("P_BLOCK"), SCAN_WIDTH)
    part = max(16, min(sizes.pop("N_BLOCK"), STATE_PART))
    assert table.columns.shape[1] % SCAN_STEP == 0
    _scan[(len(table.items), heads, triton.cdiv(width, wide))](
        inputs.x,
        C,
        *weighed,
        D,
        states,
        room,
        table.columns,
        table.last,
        table.items,
        y,
        len(states),
        scratch,
        **sizes,
        P_BLOCK=wide,
        PART=part,
        K=table.columns.shape[1],
        ROWS=ITEM_ROWS,
        STEP=SCAN_STEP,
        num_warps=SCAN_WARPS,
        enable_fp_fusion=False,
    )


def move(states: Tensor, room: Tensor, table: ScanTable) -> None:
    """Copy results of folds from the room to the checkpoints that the table names. states is written."""
    size = states[0].numel()
    block = min(triton.next_power_of_2(size), 4096)
    _move[(len(table.moved), triton.cdiv(size, block))](states, room, table.moved, SIZE=size, BLOCK=block)


def _sizes(heads: int, own: int, groups: int, width: int, size: int) -> dict[str, int]:
    repeats = heads // own
    return {
        "HEADS": heads,
        "OWN": own,
        "GROUPS": groups,
        "READERS": groups * repeats,
        "P": width,
        "N": size,
        "P_BLOCK": triton.next_power_of_2(width),
        "N_BLOCK": triton.next_power_of_2(size),
    }


@triton.jit
def _state(states, room, number, count, h, inside, within, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """The state of this number, of head h. within [P_BLOCK, N_BLOCK]: places in a head's state"""
    at = h * SIZE + within
    kept = tl.load(states + number * (HEADS * SIZE) + at, mask=inside & (number < count), other=0.0)
    made = tl.load(room + (number - count) * (HEADS * SIZE) + at, mask=inside & (number >= count), other=0.0)
    return tl.where(number < count, kept, made)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["chains", "fold_columns", "fold_states", "columns", "last"],
)
def _fold_and_weigh(
    x,  # [slots, OWN, P]
    B,  # [slots, GROUPS, N]
    dt,  # [slots, HEADS]
    A,  # [HEADS]
    C,  # [rows, READERS, N]
    states,  # [count, HEADS, P, N]; written here
    room,  # [folds, HEADS, P, N]; written here
    chains,  # [chains, 2]
    fold_columns,  # [folds, TOKENS]
    fold_states,  # [folds, 2]
    columns,  # [rows, K]
    last,  # [rows]
    weights,  # [rows, HEADS, K]; written here
    decays,  # [rows, HEADS]; written here
    count,
    FOLDING: tl.constexpr,
    HEADS: tl.constexpr,
    OWN: tl.constexpr,
    GROUPS: tl.constexpr,
    READERS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    P_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < FOLDING:
        PARTS: tl.constexpr = (P + P_BLOCK - 1) // P_BLOCK
        chain = program // (HEADS * PARTS)
        h = program // PARTS % HEADS
        number = tl.load(chains + chain * 2 + 1)
        if number > 0:
            first = tl.load(chains + chain * 2)
            own = h // (HEADS // OWN)
            group = h // (HEADS // GROUPS)
            p = program % PARTS * P_BLOCK + tl.arange(0, P_BLOCK)
            n = tl.arange(0, N_BLOCK)
            inside = (p < P)[:, None] & (n < N)[None, :]
            within = p[:, None] * N + n[None, :]
            a = tl.load(A + h)
            S = _state(states, room, tl.load(fold_states + first * 2), count, h, inside, within, HEADS, P * N)
            for fold in range(first, first + number):
                for start in range(0, TOKENS, STEP):
                    for token in tl.static_range(STEP):
                        slot = tl.load(fold_columns + fold * TOKENS + start + token)
                        step = tl.load(dt + slot * HEADS + h)
                        drive = tl.load(x + (slot * OWN + own) * P + p, mask=p < P, other=0.0).to(tl.float32) * step
                        b = tl.load(B + (slot * GROUPS + group) * N + n, mask=n < N, other=0.0).to(tl.float32)
                        S = S * tl.exp(step * a) + drive[:, None] * b[None, :]
                target = tl.load(fold_states + fold * 2 + 1)
                at = h * (P * N) + within
                tl.store(states + target * (HEADS * P * N) + at, S, mask=inside & (target < count))
                tl.store(room + (target - count) * (HEADS * P * N) + at, S, mask=inside & (target >= count))
    else:
        place = program - FOLDING
        row = (place // (READERS * BLOCKS)).to(tl.int64)
        reader = place // BLOCKS % READERS
        if tl.load(last + row) > 0:
            MEMBERS: tl.constexpr = HEADS // READERS
            k = tl.arange(0, K)
            n = tl.arange(0, N_BLOCK)
            slot = tl.load(columns + row * K + k)
            group = reader // (READERS // GROUPS)
            b = tl.load(B + (slot[:, None] * GROUPS + group) * N + n[None, :], mask=(n < N)[None, :], other=0.0)
            c = tl.load(C + (row * READERS + reader) * N + n, mask=n < N, other=0.0).to(tl.float32)
            alike = tl.sum(b.to(tl.float32) * c[None, :], 1)  # [K]
            member = place % BLOCKS * BLOCK + tl.arange(0, BLOCK)
            inside = member < MEMBERS
            h = reader * MEMBERS + member
            a = tl.load(A + h, mask=inside, other=0.0)[None, :]
            own = tl.load(dt + slot[:, None] * HEADS + h[None, :], mask=inside[None, :], other=0.0)  # [K, BLOCK]
            # The decay since a token is that of the tokens after it, added from the newest on.
            after = tl.load(columns + row * K + k + 1, mask=k + 1 < K, other=0)
            later = tl.load(
                dt + after[:, None] * HEADS + h[None, :], mask=(k + 1 < K)[:, None] & inside[None, :], other=0.0
            )
            since = tl.cumsum(later * a, 0, reverse=True)
            found = tl.exp(since) * own * alike[:, None]
            tl.store(weights + (row * HEADS + h[None, :]) * K + k[:, None], found, mask=inside[None, :])
            whole = tl.sum(tl.where((k == 0)[:, None], since + own * a, 0.0), 0)  # the sum of one number and zeros
            tl.store(decays + row * HEADS + h, tl.exp(whole), mask=inside)


@triton.jit(do_not_specialize=["count", "scratch"], do_not_specialize_on_alignment=["columns", "last", "items"])
def _scan(
    x,  # [slots, OWN, P]
    C,  # [rows, READERS, N]
    weights,  # [rows, HEADS, K]
    decays,  # [rows, HEADS]
    D,  # [HEADS]
    states,  # [count, HEADS, P, N]
    room,  # [folds, HEADS, P, N]
    columns,  # [rows, K]
    last,  # [rows]
    items,  # [items, 2 + ROWS]
    y,  # [rows, HEADS, P]; written here
    count,
    scratch,
    HEADS: tl.constexpr,
    OWN: tl.constexpr,
    GROUPS: tl.constexpr,
    READERS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    P_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    item = tl.program_id(0)
    h = tl.program_id(1)
    number = tl.load(items + item * (2 + ROWS))
    if number > 0:
        own = h // (HEADS // OWN)
        reader = h // (HEADS // READERS)
        i = tl.arange(0, ROWS)
        live = i < number
        row = tl.load(items + item * (2 + ROWS) + 2 + i, mask=live, other=0)
        state = tl.load(items + item * (2 + ROWS) + 1)
        p = tl.program_id(2) * P_BLOCK + tl.arange(0, P_BLOCK)
        inside = live[:, None] & (p < P)[None, :]
        # The number of a product's rows is the same for any item, and each of its rows is computed alike.
        before = tl.zeros([ROWS, P_BLOCK], tl.float32)
        for start in tl.static_range(0, N, PART):
            n = start + tl.arange(0, PART)
            of_state = (p < P)[:, None] & (n < N)[None, :]
            S = _state(states, room, state, count, h, of_state, p[:, None] * N + n[None, :], HEADS, P * N)
            c = tl.load(
                C + (row[:, None] * READERS + reader) * N + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0.0
            )
            before = tl.dot(c.to(tl.float32), tl.trans(S), before, input_precision="tf32x3")
        path = tl.zeros([ROWS, P_BLOCK], tl.float32)
        most = tl.max(tl.load(last + row, mask=live, other=0), 0)
        for start in range(0, most, STEP):
            for k in tl.static_range(STEP):  # the loads do not wait for one another
                slot = tl.load(columns + row * K + start + k, mask=live, other=0)
                weight = tl.load(weights + (row * HEADS + h) * K + start + k, mask=live, other=0.0)
                seen = tl.load(x + (slot[:, None] * OWN + own) * P + p[None, :], mask=inside, other=0.0)
                path = path + seen.to(tl.float32) * weight[:, None]
        mine = tl.load(x + ((scratch + row)[:, None] * OWN + own) * P + p[None, :], mask=inside, other=0.0)
        decay = tl.load(decays + row * HEADS + h, mask=live, other=0.0)
        found = path + before * decay[:, None] + mine.to(tl.float32) * tl.load(D + h)
        tl.store(y + (row[:, None] * HEADS + h) * P + p[None, :], found, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["moved"])
def _move(
    states,  # [slots, SIZE]; written here
    room,  # [folds, SIZE]
    moved,  # [folds]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    fold = tl.program_id(0).to(tl.int64)
    target = tl.load(moved + fold)
    if target > 0:
        within = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(room + fold * SIZE + within, mask=within < SIZE)
        tl.store(states + target * SIZE + within, values, mask=within < SIZE)
