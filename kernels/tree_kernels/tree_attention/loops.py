"""The attention's loops, for numba. Imported only while they are compiled; `compiled.py` calls the machine code.

A block is some rows of one text; a unit is a block and a kv head. A unit's lines go through their near keys first, row
by row, and then together through the pages of their text, in order. What a line has summed is scaled whenever a later
key has a higher score. Keys that a line does not see have the weight 0, and their values are not added: 0 times a value
that is not finite is NaN.
"""

from __future__ import annotations

from numba import float32, njit, types, uint32

from tree_kernels.mamba_level.curves import exponential
from tree_kernels.matmul.loops import F32, bf16_bits, finish, share, widen
from tree_kernels.matmul.shapes import Precision
from tree_kernels.matmul.tiles import call_tile
from tree_kernels.translating import INLINED
from tree_kernels.tree_attention.rows import PAGE
from tree_kernels.tree_attention.shapes import LANES, TILE_LINES, AttentionArgument, Block
from tree_kernels.tree_attention.tiles import tiles
from tree_kernels.vectors import call_kernel, fetch_add, float_of, floats, half_bits, half_value, halves, longs

_called = njit(**INLINED)
BF16, F16 = int(Precision.BF16), int(Precision.F16)
_PLACES = tuple(int(place) for place in AttentionArgument)
(ROWS, PADDED, POSITIONS, SLOTS, NEAR, COLUMNS, BLOCKS, BLOCK_COUNT, PAGES) = _PLACES[:9]
(QUERY, QUERY_HEAD, QUERY_ROW, KEY, KEY_HEAD, KEY_ROW, VALUE, VALUE_HEAD, VALUE_ROW) = _PLACES[9:18]
(KIND, TARGET, TARGET_KIND, POOL, POOL_KIND, POOL_SLOT, POOL_HEAD) = _PLACES[18:25]
(KV_HEADS, GROUP, KEY_DIM, VALUE_DIM, WIDTH) = _PLACES[25:30]
(WINDOW, SINKS, SCALE, CAP, COSINES, SINES, ROTATED, TILES_OF, SCRATCH, EACH, NEXT, WRITERS) = _PLACES[30:]
START, STOP, FIRST_PAGE, PAGE_COUNT, PAGE_INDEX = (int(place) for place in Block)
BLOCK_BYTES = 8 * len(Block)
HIDDEN = float32(-float("inf"))


@_called
def round_to(number: float, kind: int) -> float:
    """The number rounded to this kind."""
    if kind == BF16:
        return float_of(uint32(bf16_bits(number)) << uint32(16))
    if kind == F16:
        return half_value(half_bits(number))
    return number


@_called
def load_rotation(call: int, row: int, table: int) -> None:
    """Fills a table with a row's cosines, then its sines."""
    its = longs(call)
    count = its[ROTATED]
    place = row * count * (4 if its[KIND] == F32 else 2)
    widen(its[COSINES] + place, table, count, its[KIND])
    widen(its[SINES] + place, table + 4 * count, count, its[KIND])


@_called
def rotate(target: int, table: int, count: int, kind: int) -> None:
    """Rotates the first `count` numbers: x * cos + turned(x) * sin, where the second half turned is the first, and the
    first half the second, negated. Every product and sum is rounded to `kind`, as torch's operations round."""
    x, cosines, sines = floats(target), floats(table), floats(table + 4 * count)
    half = count // 2
    for i in range(half):
        low, high = x[i], x[i + half]
        x[i] = round_to(round_to(low * cosines[i], kind) + round_to(-high * sines[i], kind), kind)
        x[i + half] = round_to(round_to(high * cosines[i + half], kind) + round_to(low * sines[i + half], kind), kind)


@_called
def write(call: int, thread: int) -> None:
    """Writes every row's keys, rotated, and values into its slot; in a pool of float32, ones after them."""
    its = longs(call)
    table, rotated = its[SCRATCH] + thread * its[EACH], its[ROTATED]
    made = table + 8 * rotated
    slots, kind, pool_kind = longs(its[SLOTS]), its[KIND], its[POOL_KIND]
    key_dim, value_dim = its[KEY_DIM], its[VALUE_DIM]
    for row in range(its[ROWS]):
        load_rotation(call, row, table)
        for head in range(its[KV_HEADS]):
            slot = its[POOL] + slots[row] * its[POOL_SLOT] + head * its[POOL_HEAD]
            key = its[KEY] + head * its[KEY_HEAD] + row * its[KEY_ROW]
            value = its[VALUE] + head * its[VALUE_HEAD] + row * its[VALUE_ROW]
            if pool_kind == F32:
                widen(key, slot, key_dim, kind)
                rotate(slot, table, rotated, kind)
                widen(value, slot + key_dim * 4, value_dim, kind)
                rest = floats(slot)
                for place in range(key_dim + value_dim, its[WIDTH]):
                    rest[place] = float32(1.0)
            else:  # such a pool has the rows' kind, so nothing is rounded
                widen(key, made, key_dim, kind)
                rotate(made, table, rotated, kind)
                finish(made, 0, slot, key_dim, kind)
                given, held = halves(value), halves(slot + key_dim * 2)
                for place in range(value_dim):
                    held[place] = given[place]


@_called
def begin(
    call: int, block: int, head: int, queries: int, query_step: int, sums: int, sum_step: int, states: int, table: int
) -> None:
    """Fills a unit's rotated and scaled queries, and what its lines have summed before the first key: a sink, or
    nothing."""
    its, own = longs(call), longs(block)
    group, scale = its[GROUP], float_of(uint32(its[SCALE]))
    all_states = floats(states)
    line = 0
    for row in range(own[START], own[STOP]):
        load_rotation(call, row, table)
        for member in range(group):
            query = queries + line * query_step
            number = head * group + member
            widen(its[QUERY] + number * its[QUERY_HEAD] + row * its[QUERY_ROW], query, its[KEY_DIM], its[KIND])
            rotate(query, table, its[ROTATED], its[KIND])
            made, summed = floats(query), floats(sums + line * sum_step)
            for i in range(its[KEY_DIM]):
                made[i] *= scale
            for i in range(its[KEY_DIM], query_step // 4):
                made[i] = float32(0.0)
            for i in range(sum_step // 4):
                summed[i] = float32(0.0)
            if its[SINKS] != 0:
                all_states[2 * line] = floats(its[SINKS])[number]
                all_states[2 * line + 1] = float32(1.0)
            else:
                all_states[2 * line] = HIDDEN
                all_states[2 * line + 1] = float32(0.0)
            line += 1


@_called
def in_float32(
    source: int, offsets: int, count: int, dim: int, kind: int, target: int, target_offsets: int, step: int
) -> tuple[int, int]:
    """Returns where tiles read `count` keys or values as float32, and the address of their offsets from there: in the
    pool, if it has float32, else at `target`, to which their `dim` numbers are widened, with zeros up to `step` bytes.

    offsets: the address of their offsets from `source`, in a pool of this kind   target_offsets: from `target`
    """
    if kind == F32:
        return source, offsets
    places = longs(offsets)
    for place in range(count):
        own = target + place * step
        widen(source + places[place], own, dim, kind)
        rest = floats(own)
        for number in range(dim, step // 4):
            rest[number] = float32(0.0)
    return target, target_offsets


@_called
def score(
    tiles: int, queries: int, query_step: int, lines: int, keys: int, offsets: int, scores: int, step: int, count: int
) -> None:
    functions = longs(tiles)
    line = 0
    while line < lines:
        some = min(TILE_LINES, lines - line)
        call_tile(
            functions[some - 1],
            queries + line * query_step,
            query_step,
            keys,
            offsets,
            scores + line * step,
            step,
            count,
            query_step // (4 * LANES),
        )
        line += some


@_called
def add_values(
    tiles: int, scores: int, step: int, lines: int, values: int, offsets: int, sums: int, sum_step: int, count: int
) -> None:
    functions = longs(tiles)
    line = 0
    while line < lines:
        some = min(TILE_LINES, lines - line)
        call_tile(
            functions[TILE_LINES + some - 1],
            scores + line * step,
            step,
            values,
            offsets,
            sums + line * sum_step,
            sum_step,
            count,
            sum_step // (4 * LANES),
        )
        line += some


@_called
def cap_and_hide(scores: int, count: int, low: int, high: int, cap: float) -> None:
    """Caps a line's scores, if there is a cap, and hides the keys outside [low, high)."""
    own = floats(scores)
    if cap != float32(0.0):
        for i in range(count):  # the cap times tanh
            grown = exponential(own[i] + own[i])
            own[i] = cap * (float32(1.0) - float32(2.0) / (grown + float32(1.0)))
    for i in range(min(low, count)):
        own[i] = HIDDEN
    for i in range(max(high, 0), count):
        own[i] = HIDDEN


@_called
def keys_seen(position: int, near: int, window: int, first: int, count: int) -> tuple[int, int]:
    """The first of a page's `count` far keys that a row sees, and the one after the last. first: the page's position"""
    low = position - window + 1 - first if window != 0 else 0
    return min(max(low, 0), count), min(max((position // near - 1) * near - first, 0), count)


@_called
def write_results(call: int, block: int, head: int, sums: int, sum_step: int, states: int) -> None:
    """Writes a unit's results."""
    its, own = longs(call), longs(block)
    group, count = its[GROUP], its[VALUE_DIM]
    heads = its[KV_HEADS] * group
    size = 4 if its[TARGET_KIND] == F32 else 2
    all_states = floats(states)
    line = 0
    for row in range(own[START], own[STOP]):
        for member in range(group):
            own_sums, total = sums + line * sum_step, all_states[2 * line + 1]
            summed = floats(own_sums)
            for i in range(count):
                summed[i] /= total
            place = its[TARGET] + (row * heads + head * group + member) * count * size
            finish(own_sums, 0, place, count, its[TARGET_KIND])
            line += 1


@_called
def unit(call: int, number: int, thread: int) -> None:
    """Attention of one block's lines of one kv head."""
    its = longs(call)
    head, block = number % its[KV_HEADS], its[BLOCKS] + number // its[KV_HEADS] * BLOCK_BYTES
    own, positions = longs(block), longs(its[POSITIONS])
    group, window, columns, tiles = its[GROUP], its[WINDOW], its[COLUMNS], its[TILES_OF]
    cap = float_of(uint32(its[CAP]))
    slot_bytes, kind, key_dim, value_dim = its[POOL_SLOT], its[POOL_KIND], its[KEY_DIM], its[VALUE_DIM]
    keys = its[POOL] + head * its[POOL_HEAD]
    values = keys + key_dim * (4 if kind == F32 else 2)
    rows = own[STOP] - own[START]
    lines = rows * group
    query_step = (key_dim + LANES - 1) // LANES * LANES * 4
    sum_step = (value_dim + LANES - 1) // LANES * LANES * 4
    most = max(columns, PAGE)
    step = most * 4
    near_offsets = its[SCRATCH] + thread * its[EACH]
    page_offsets = near_offsets + columns * 8
    key_offsets = page_offsets + PAGE * 8
    value_offsets = key_offsets + most * 8
    widened = value_offsets + most * 8
    queries = widened + most * max(query_step, sum_step)
    sums = queries + lines * query_step
    scores = sums + lines * sum_step
    states = scores + lines * step
    begin(call, block, head, queries, query_step, sums, sum_step, states, states + lines * 8)

    key_places, value_places = longs(key_offsets), longs(value_offsets)
    for place in range(most):
        key_places[place], value_places[place] = place * query_step, place * sum_step

    near = columns // 2
    reach, lowest = 0, positions[own[START]]  # the positions that some row sees before its near keys
    offsets = longs(near_offsets)
    for index in range(rows):
        row = own[START] + index
        position = positions[row]
        first = (position // near - 1) * near
        start = max(position - window + 1, 0) if window != 0 else 0  # the first position that the row sees
        reach, lowest = max(reach, first), min(lowest, start)
        slots = longs(its[NEAR] + row * columns * 8)
        seen = position - first + 1
        count = (seen + 7) // 8 * 8
        for column in range(count):
            offsets[column] = slots[column] * slot_bytes
        line = index * group
        mine, its_sums = scores + line * step, sums + line * sum_step
        given, its_offsets = in_float32(keys, near_offsets, count, key_dim, kind, widened, key_offsets, query_step)
        score(tiles, queries + line * query_step, query_step, group, given, its_offsets, mine, step, count)
        for member in range(group):
            cap_and_hide(mine + member * step, count, start - first, seen, cap)
            numbers = floats(mine + member * step)
            for column in range(count):
                if slots[column] == 0:
                    numbers[column] = HIDDEN
        places = sum_step // (4 * LANES)
        function = longs(tiles)[2 * TILE_LINES]
        call_tile(function, mine, step, group, count, states + line * 8, its_sums, sum_step, places)
        given, its_offsets = in_float32(values, near_offsets, count, value_dim, kind, widened, value_offsets, sum_step)
        low = max(start - first, 0)
        add_values(tiles, mine + low * 4, step, group, given, its_offsets + low * 8, its_sums, sum_step, seen - low)

    all_pages = longs(its[PAGES])
    offsets = longs(page_offsets)
    for place in range(PAGE):
        offsets[place] = place * slot_bytes
    for index in range(own[PAGE_COUNT]):
        first = (own[PAGE_INDEX] + index) * PAGE
        if first < reach and first + PAGE > lowest:
            page = all_pages[own[FIRST_PAGE] + index] * PAGE * slot_bytes
            count = (min(PAGE, reach - first) + 7) // 8 * 8
            given, its_offsets = in_float32(
                keys + page, page_offsets, count, key_dim, kind, widened, key_offsets, query_step
            )
            score(tiles, queries, query_step, lines, given, its_offsets, scores, step, count)
            for line in range(lines):
                low, high = keys_seen(positions[own[START] + line // group], near, window, first, count)
                cap_and_hide(scores + line * step, count, low, high, cap)
            places = sum_step // (4 * LANES)
            call_tile(longs(tiles)[2 * TILE_LINES], scores, step, lines, count, states, sums, sum_step, places)
            given, its_offsets = in_float32(
                values + page, page_offsets, count, value_dim, kind, widened, value_offsets, sum_step
            )
            line = 0
            while line < lines:
                low, high = keys_seen(positions[own[START] + line // group], near, window, first, count)
                end = line + group
                while end < lines:  # lines that see the same keys of the page share a call
                    other = keys_seen(positions[own[START] + end // group], near, window, first, count)
                    if other[0] != low or other[1] != high:
                        break
                    end += group
                if low < high:
                    add_values(
                        tiles,
                        scores + line * step + low * 4,
                        step,
                        end - line,
                        given,
                        its_offsets + low * 8,
                        sums + line * sum_step,
                        sum_step,
                        high - low,
                    )
                line = end
    write_results(call, block, head, sums, sum_step, states)


def units(call: int, thread: int) -> None:
    """Computes units until none is left."""
    its = longs(call)
    count = its[BLOCK_COUNT] * its[KV_HEADS]
    while True:
        number = fetch_add(call + NEXT * 8, 1)
        if number >= count:
            return
        unit(call, number, thread)


@_called
def clear_padding(call: int) -> None:
    """Padding rows have no keys: their results are zero."""
    its = longs(call)
    row = its[KV_HEADS] * its[GROUP] * its[VALUE_DIM] * (4 if its[TARGET_KIND] == F32 else 2) // 2
    made = halves(its[TARGET])
    for place in range(its[ROWS] * row, its[PADDED] * row):
        made[place] = types.uint16(0)


def write_rows(call: int, thread: int) -> None:
    """Writes the rows' keys and values, in the first thread that comes."""
    if fetch_add(call + WRITERS * 8, 1) == 0:
        write(call, thread)
        clear_padding(call)


def attend(call: int, writing: int, function: int, helpers: int, count: int) -> None:
    """Writes the rows' keys and values, and computes their attention.

    writing, function: the addresses of `write_rows` and `units`   helpers: of `count` helpers' memory
    """
    its = longs(call)
    its[NEXT] = its[WRITERS] = 0
    call_kernel(writing, call, 0)
    share(call, function, helpers, count)


KERNELS = {"attend": (attend, "iiiii"), "write_rows": (write_rows, "ii"), "units": (units, "ii")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
TILES = tiles()
