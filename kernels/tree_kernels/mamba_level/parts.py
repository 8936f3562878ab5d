"""Loops that Mamba-1 and Mamba-2 share, for numba. Imported only while kernels are compiled.

The loops go over the channels of one row, which are adjacent in memory, so that LLVM computes vectors of them. A loop
that writes what it also reads through another address would run number by number: states are therefore copied first
and then advanced in place.
"""

from __future__ import annotations

from numba import float32, njit

from tree_kernels.mamba_level import shapes
from tree_kernels.mamba_level.curves import silu, square_root
from tree_kernels.mamba_level.team import few_panels, share_product
from tree_kernels.mamba_level.team_shapes import SHARED_WEIGHTS
from tree_kernels.matmul.loops import F32, PAIRS, PANEL, finish, widen
from tree_kernels.matmul.shapes import WIDEST
from tree_kernels.translating import INLINED
from tree_kernels.vectors import floats, longs

inlined = njit(**INLINED, fastmath={"contract"})
summing = njit(**INLINED, fastmath={"contract", "reassoc"})
"""Decorates functions that sum adjacent numbers, which vectors may add in another order."""


@inlined
def copy(source: int, target: int, count: int) -> None:
    given, made = floats(source), floats(target)
    for i in range(count):
        made[i] = given[i]


@inlined
def clear(target: int, count: int) -> None:
    made = floats(target)
    for i in range(count):
        made[i] = float32(0.0)


@inlined
def add_products(target: int, left: int, right: int, count: int) -> None:
    """target += left * right"""
    made, a, b = floats(target), floats(left), floats(right)
    for i in range(count):
        made[i] += a[i] * b[i]


@inlined
def add_multiple(target: int, factor: float, given: int, count: int) -> None:
    """target += factor * given"""
    made, a = floats(target), floats(given)
    for i in range(count):
        made[i] += factor * a[i]


@summing
def dot(left: int, right: int, count: int) -> float:
    a, b = floats(left), floats(right)
    total = float32(0.0)
    for i in range(count):
        total += a[i] * b[i]
    return total


@inlined
def scale_to_unit(x: int, weight: int, target: int, count: int, eps: float) -> None:
    """target = x over the root of its mean square, times weight; `unit_rms` of the mixers."""
    factor = float32(1.0) / square_root(dot(x, x, count) / float32(count) + eps)
    given, factors, made = floats(x), floats(weight), floats(target)
    for i in range(count):
        made[i] = given[i] * factor * factors[i]


@inlined
def scale_in_place(x: int, weight: int, count: int, eps: float) -> None:
    factor = float32(1.0) / square_root(dot(x, x, count) / float32(count) + eps)
    made, factors = floats(x), floats(weight)
    for i in range(count):
        made[i] *= factor * factors[i]


@inlined
def gate(y: int, gates: int, count: int) -> None:
    """y *= silu(gates)"""
    made, given = floats(y), floats(gates)
    for i in range(count):
        made[i] *= silu(given[i])


@inlined
def product(
    team: int, x: int, x_step: int, rows: int, inputs: int, words: int, sums: int, sums_step: int, adds: int, dots: int
) -> None:
    """Rows times packed weights, plus the bias. adds: 1: the results are added to `sums`; 0: they replace them.

    team  address of the threads that share it, or 0
    x, sums  addresses of rows of float32, x_step and sums_step bytes apart; sums have whole panels
    words  address of a product's words   dots: 1: x has PAIRS, for tiles of dot products; 0: it has float32
    """
    its = longs(words)
    panels = its[shapes.PANELS]
    tiles, most = its[shapes.TILES], its[shapes.TILE_ROWS]
    if dots == 1:
        tiles, most = its[shapes.DOTS], its[shapes.DOT_ROWS]
    begin = 1 - adds
    if its[shapes.BIAS] != 0:
        for row in range(rows):
            if begin == 1:
                copy(its[shapes.BIAS], sums + row * sums_step, panels * PANEL)
            else:
                add_multiple(sums + row * sums_step, float32(1.0), its[shapes.BIAS], panels * PANEL)
        begin = 0
    if team != 0 and panels * PANEL * inputs >= SHARED_WEIGHTS:
        share_product(team, x, x_step, rows, inputs, words, sums, sums_step, begin, tiles, most)
        return
    first = 0
    while first < panels:
        count = min(WIDEST, panels - first)
        few_panels(x, x_step, rows, inputs, words, sums, sums_step, begin, tiles, most, first, count)
        first += WIDEST


@inlined
def layer_product(call: int, x: int, inputs: int, words: int, sums: int, sums_step: int, adds: int) -> None:
    """The product of all rows in a layer; see `product`. Its inputs, float32 side by side, are lost if ROUNDS is 1."""
    its = longs(call)
    rows, dots = its[shapes.ROWS], 0
    if its[shapes.ROUNDS] == 1 and longs(words)[shapes.DOTS] != 0:
        dots = 1
        for row in range(rows):
            place = x + row * inputs * 4
            finish(place, 0, its[shapes.SPARE], inputs, PAIRS)
            copy(its[shapes.SPARE], place, inputs // 2)
    product(its[shapes.TEAM], x, inputs * 4, rows, inputs, words, sums, sums_step, adds, dots)


@inlined
def embed(call: int) -> None:
    """Look up each row's token in the embedding (`Ends.embed`). Ids that it lacks are fed as token 0."""
    its = longs(call)
    tokens, width = longs(its[shapes.TOKENS]), its[shapes.WIDTH]
    size = 4 if its[shapes.EMBEDDING_KIND] == F32 else 2
    for row in range(its[shapes.ROWS]):
        token = tokens[row] if tokens[row] < its[shapes.KNOWN] else 0
        place = its[shapes.EMBEDDING] + token * width * size
        widen(place, its[shapes.HIDDEN] + row * its[shapes.HIDDEN_STEP], width, its[shapes.EMBEDDING_KIND])


@inlined
def round_inputs(call: int, raw: int, raw_step: int, channels: int) -> None:
    """Rounds the convolution's inputs of every row to the dtype in which they are saved, so that a text that was saved
    and loaded goes on as if it had not been."""
    its = longs(call)
    kind, spare = its[shapes.ROUNDED_KIND], its[shapes.SPARE]
    if kind != F32:
        for row in range(its[shapes.ROWS]):
            finish(raw + row * raw_step, 0, spare, channels, kind)
            widen(spare, raw + row * raw_step, channels, kind)


@inlined
def add_tap(call: int, source: int, kind: int, weight: int, target: int, channels: int) -> None:
    """target += source * weight, for a source of numbers of this kind."""
    spare = longs(call)[shapes.SPARE]
    if kind != F32:
        widen(source, spare, channels, kind)
        source = spare
    add_products(target, source, weight, channels)


@inlined
def activate(target: int, channels: int) -> None:
    made = floats(target)
    for i in range(channels):
        made[i] = silu(made[i])


@inlined
def convolve_sequence(
    call: int,
    words: int,
    raw: int,
    raw_step: int,
    tails: int,
    weight: int,
    bias: int,
    target: int,
    target_step: int,
    channels: int,
) -> None:
    """The causal convolution and SiLU of consecutive rows (docs/design/scan.md#mamba-1); `conv_chain` of the state
    step.

    raw  address of all rows' inputs   tails  of slots of the last W - 1 inputs
    weight [W, channels], the current tap last
    """
    its, sequence = longs(call), longs(words)
    back, kind = its[shapes.TAPS] - 1, its[shapes.STORED_KIND]
    line = channels * (4 if kind == F32 else 2)
    before = tails + sequence[shapes.SOURCE] * back * line
    for place in range(sequence[shapes.COUNT]):
        row = sequence[shapes.FIRST] + place
        out = target + row * target_step
        copy(bias, out, channels)
        for tap in range(back + 1):  # the oldest input first
            at = place + tap - back
            if at < 0:
                add_tap(call, before + (at + back) * line, kind, weight + tap * channels * 4, out, channels)
            else:
                source = raw + (sequence[shapes.FIRST] + at) * raw_step
                add_products(out, source, weight + tap * channels * 4, channels)
        activate(out, channels)


@inlined
def keep_tail(call: int, words: int, raw: int, raw_step: int, tails: int, channels: int, after: int, slot: int) -> None:
    """Writes the last W - 1 inputs after the first `after` rows of a sequence to a slot; `conv_tail`."""
    its, sequence = longs(call), longs(words)
    back, kind = its[shapes.TAPS] - 1, its[shapes.STORED_KIND]
    line = channels * (4 if kind == F32 else 2)
    before, target = tails + sequence[shapes.SOURCE] * back * line, tails + slot * back * line
    for tap in range(back):  # ascending: a slot that is its own source is read before it is overwritten
        at = after - back + tap
        if at < 0:
            widen(before + (at + back) * line, its[shapes.SPARE], channels, kind)
            finish(its[shapes.SPARE], 0, target + tap * line, channels, kind)
        else:
            source = raw + (sequence[shapes.FIRST] + at) * raw_step
            finish(source, 0, target + tap * line, channels, kind)


@inlined
def keep_tails(call: int, words: int, raw: int, raw_step: int, tails: int, channels: int) -> None:
    sequence = longs(words)
    if sequence[shapes.END] >= 0:
        keep_tail(call, words, raw, raw_step, tails, channels, sequence[shapes.COUNT], sequence[shapes.END])
    keep_tail(call, words, raw, raw_step, tails, channels, sequence[shapes.KEPT], sequence[shapes.TARGET])


@inlined
def number(call: int, word: int) -> float:
    """A word of a call that holds a float32."""
    return floats(call + word * 8)[0]


@inlined
def into_mixer(call: int, layer: int) -> None:
    """A layer's norm and in_proj, from the hidden rows to INNER."""
    its, own = longs(call), longs(layer)
    rows, width, normed, eps = its[shapes.ROWS], its[shapes.WIDTH], its[shapes.NORMED], number(call, shapes.EPS)
    for row in range(rows):
        place = its[shapes.HIDDEN] + row * its[shapes.HIDDEN_STEP]
        scale_to_unit(place, own[shapes.NORM], normed + row * width * 4, width, eps)
    layer_product(call, normed, width, own[shapes.IN_PROJ], its[shapes.INNER], its[shapes.INNER_STEP], 0)


@inlined
def out_of_mixer(call: int, layer: int) -> None:
    """Adds a layer's out_proj of READ to the hidden rows."""
    its, own = longs(call), longs(layer)
    step = its[shapes.HIDDEN_STEP]
    layer_product(call, its[shapes.READ], its[shapes.CHANNELS], own[shapes.OUT_PROJ], its[shapes.HIDDEN], step, 1)


def logits(call: int) -> None:
    """Logits of hidden rows; `Ends.logits`."""
    its = longs(call)
    rows, width, normed, eps = its[shapes.ROWS], its[shapes.WIDTH], its[shapes.NORMED], number(call, shapes.EPS)
    for row in range(rows):
        place = its[shapes.HIDDEN] + row * its[shapes.HIDDEN_STEP]
        scale_to_unit(place, its[shapes.FINAL_NORM], normed + row * width * 4, width, eps)
    step = its[shapes.LOGITS_STEP]
    product(its[shapes.TEAM], normed, width * 4, rows, width, its[shapes.HEAD], its[shapes.LOGITS], step, 0, 0)
