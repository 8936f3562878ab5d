"""The product's loops, for numba. Imported only while they are compiled; `cpu.py` calls the machine code.

Outputs are computed in blocks of a few panels; a block's weights are read once for all rows of a chunk. The inputs of
a block go through the tiles in parts that stay in the first-level cache while all rows of the chunk use them. Every
sum adds its inputs in order, whatever the blocks, chunks, parts and threads are.
"""

from __future__ import annotations

from numba import njit, types

from tree_kernels.matmul.shapes import PART_MULTIPLE, SCRATCH, SPINS, SUM_NUMBERS, Argument, Helper, Precision
from tree_kernels.matmul.tiles import AHEAD, call_product_tile
from tree_kernels.processor import panel
from tree_kernels.translating import INLINED
from tree_kernels.vectors import (
    bits_of,
    call_kernel,
    control_word,
    fetch_add,
    float_of,
    floats,
    half_bits,
    half_value,
    halves,
    longs,
    pause,
    set_control_word,
    words,
)

PANEL = panel()
I64 = types.int64
_called = njit(**INLINED)

BF16, F16, F32, PAIRS = (int(kind) for kind in Precision)
_PLACES = tuple(int(place) for place in Argument)
(X, ROWS, INPUTS, WEIGHTS, BIAS, TARGET, OUTPUTS, TARGET_KIND, SUMS_OF, UNITS, UNIT_PANELS, ENTRY, TILES_OF) = _PLACES[
    :13
]
(NEXT, RESIDUAL, TILE_ROWS, X_BYTES, CHUNK_ROWS, PART, UNPACK, UNPACKED_TILES) = _PLACES[13:]
START, DONE = 8 * Helper.START, 8 * Helper.DONE
CALL, THREAD, FUNCTION = int(Helper.CALL), int(Helper.THREAD), int(Helper.FUNCTION)
HELPER_BYTES = 8 * Helper.SIZE
FLUSH = 0x8040
"""Bits of a control word: results and inputs that are not normal count as zero."""
SUMS = 4 * PANEL
"""Bytes of a panel's sums of a row."""
UNPACKED_ENTRY = 2 * PANEL
"""Bytes of one input's unpacked weights in a panel."""


@_called
def widen(source: int, target: int, count: int, kind: int) -> None:
    """Copies `count` numbers of this kind to float32."""
    made = floats(target)
    if kind == BF16:
        given = halves(source)
        for i in range(count):
            made[i] = float_of(types.uint32(given[i]) << types.uint32(16))
    elif kind == F16:
        given = halves(source)
        for i in range(count):
            made[i] = half_value(given[i])
    else:
        numbers = floats(source)
        for i in range(count):
            made[i] = numbers[i]


@_called
def pair(source: int, target: int, count: int) -> None:
    """Copies an even number of bfloat16 as PAIRS."""
    given, made = words(source), words(target)
    for i in range(count // 2):
        made[i] = (given[i] << types.uint32(16)) | (given[i] >> types.uint32(16))


@_called
def bf16_bits(number: float) -> int:
    """The bits of the nearest bfloat16, ties to even."""
    bits = bits_of(number)
    rounded = (bits + types.uint32(0x7FFF) + ((bits >> types.uint32(16)) & types.uint32(1))) >> types.uint32(16)
    if (bits & types.uint32(0x7FFFFFFF)) > types.uint32(0x7F800000):
        return types.uint16(0x7FC0)
    return types.uint16(rounded)


@_called
def finish(sums: int, bias: int, target: int, count: int, kind: int) -> None:
    """Adds the bias, if there is one, to `count` sums and writes them as numbers of this kind."""
    given = floats(sums)
    if bias != 0:
        added = floats(bias)
        for i in range(count):
            given[i] = given[i] + added[i]
    if kind == BF16:
        made = halves(target)
        for i in range(count):
            made[i] = bf16_bits(given[i])
    elif kind == F16:
        made = halves(target)
        for i in range(count):
            made[i] = half_bits(given[i])
    elif kind == PAIRS:
        pairs = words(target)
        for i in range(count // 2):
            upper, lower = bf16_bits(given[2 * i]), bf16_bits(given[2 * i + 1])
            pairs[i] = (types.uint32(upper) << types.uint32(16)) | types.uint32(lower)
    else:
        numbers = floats(target)
        for i in range(count):
            numbers[i] = given[i]


@_called
def add(residual: int, target: int, count: int, kind: int) -> None:
    """Adds `count` numbers to those of the target, all of this kind, and rounds once, as torch does."""
    if kind == BF16:
        added, made = halves(residual), halves(target)
        for i in range(count):
            sum_ = float_of(types.uint32(added[i]) << types.uint32(16)) + float_of(
                types.uint32(made[i]) << types.uint32(16)
            )
            made[i] = bf16_bits(sum_)
    elif kind == F16:
        added, made = halves(residual), halves(target)
        for i in range(count):
            made[i] = half_bits(half_value(added[i]) + half_value(made[i]))
    else:
        numbers, sums = floats(residual), floats(target)
        for i in range(count):
            sums[i] = numbers[i] + sums[i]


@_called
def add_residuals(residual: int, target: int, rows: int, row_bytes: int, count: int, kind: int, word: int) -> None:
    """`add` of `count` numbers of each row, under the control word of the kernel's caller, as torch's sum is."""
    own = control_word()
    set_control_word(word)
    for row in range(rows):
        add(residual + row * row_bytes, target + row * row_bytes, count, kind)
    set_control_word(own)


@_called
def block(
    panels: int,
    tiles: int,
    x: int,
    x_step: int,
    weights: int,
    step: int,
    sums: int,
    sums_step: int,
    inputs: int,
    begin: int,
    ahead: int,
    ahead_step: int,
) -> None:
    """The rows of a tile times `panels` panels.

    tiles: the address of three numbers: panels of a wide tile, its address, and the address of the tile of one panel
    """
    functions = longs(tiles)
    together = functions[0]
    at = 0
    while at < panels:
        wide = at + together <= panels
        call_product_tile(
            functions[1] if wide else functions[2],
            x,
            x_step,
            weights + at * step,
            step,
            sums + at * SUMS,
            sums_step,
            inputs,
            begin,
            ahead + at * step,
            ahead_step,
        )
        at += together if wide else 1


@_called
def blocks(
    rows: int,
    panels: int,
    tiles: int,
    x: int,
    x_step: int,
    weights: int,
    step: int,
    sums: int,
    sums_step: int,
    inputs: int,
    begin: int,
    entry: int,
    ahead: int,
    following: int,
    most: int,
) -> None:
    """Multiply any number of rows by at most WIDEST panels, in as few blocks as possible, of about equal size.

    tiles: the address of three numbers for each number of rows of a block, as `block` describes them
    entry: bytes of one input's weights in a panel   most: rows of a tile
    ahead: address from which on a single block loads weights beside its own   following: address of the weights that
    are needed next. Where the rows need several blocks, each begins to load a part of them. Else the first block would
    wait for the memory, and the others, whose weights are in the cache, would leave it idle.
    """
    count, row = (rows + most - 1) // most, 0
    for number in range(count):
        high = (rows - row + count - number - 1) // (count - number)
        block(
            panels,
            tiles + (high - 1) * 24,
            x + row * x_step,
            x_step,
            weights,
            step,
            sums + row * sums_step,
            sums_step,
            inputs,
            begin,
            ahead if count == 1 else following + number * (inputs * entry // count),
            entry // count,
        )
        row += high


@_called
def multiply(call: int, thread: int, word: int) -> None:
    """Computes units of outputs until none is left. A unit is one block of panels, for all rows. word: the caller's
    control word"""
    given = longs(call)
    x, rows, inputs, weights = given[X], given[ROWS], given[INPUTS], given[WEIGHTS]
    bias, target, outputs, target_kind = given[BIAS], given[TARGET], given[OUTPUTS], given[TARGET_KIND]
    sums = given[SUMS_OF] + thread * SCRATCH * 4
    count, wide, entry, table = given[UNITS], given[UNIT_PANELS], given[ENTRY], given[TILES_OF]
    residual, most, chunk = given[RESIDUAL], given[TILE_ROWS], given[CHUNK_ROWS]
    step, x_bytes = inputs * entry, given[X_BYTES]
    x_step = inputs * x_bytes
    unpack, room = given[UNPACK], sums + SUM_NUMBERS * 4
    parts = (inputs * (entry if unpack == 0 else UNPACKED_ENTRY) + given[PART] - 1) // given[PART]
    part = (inputs + parts * PART_MULTIPLE - 1) // (parts * PART_MULTIPLE) * PART_MULTIPLE
    all_panels = (outputs + PANEL - 1) // PANEL
    size = 4 if target_kind == F32 else 2
    unit = fetch_add(call + NEXT * 8, 1)
    while unit < count:
        next_unit = fetch_add(call + NEXT * 8, 1)  # taken early: its weights are loaded while this one is computed
        first = unit * wide
        panels = min(wide, all_panels - first)
        sums_step = panels * SUMS
        top = 0
        while top < rows:
            some = min(chunk, rows - top)
            length = part if some > most else inputs
            begin = 0
            while begin < inputs:
                used = min(length, inputs - begin)
                here, last = weights + first * step + begin * entry, begin + used >= inputs
                own_tiles, own, own_step, own_entry = table, here, step, entry
                if unpack != 0 and some > most:
                    own_tiles, own, own_entry = given[UNPACKED_TILES], room, UNPACKED_ENTRY
                    own_step = part * UNPACKED_ENTRY
                    for number in range(panels):
                        place, made = here + number * step, room + number * own_step
                        call_product_tile(unpack, 0, 0, place, 0, made, 0, used, 0, place + AHEAD, entry)
                blocks(
                    some,
                    panels,
                    own_tiles,
                    x + top * x_step + begin * x_bytes,
                    x_step,
                    own,
                    own_step,
                    sums,
                    sums_step,
                    used,
                    1 if begin == 0 else 0,
                    own_entry,
                    own + AHEAD,
                    weights + next_unit * wide * step if last else here + used * entry,
                    most,
                )
                begin += length
            wanted = min(panels * PANEL, outputs - first * PANEL)
            added = bias + first * SUMS if bias != 0 else 0
            begun = (top * outputs + first * PANEL) * size
            for row in range(some):
                finish(sums + row * sums_step, added, target + begun + row * outputs * size, wanted, target_kind)
            if residual != 0:
                add_residuals(residual + begun, target + begun, some, outputs * size, wanted, target_kind, word)
            top += chunk
        unit = next_unit


def units(call: int, thread: int) -> None:
    """Computes units of outputs until none is left."""
    word = control_word()
    set_control_word(word | types.uint32(FLUSH))  # dot products do the same
    multiply(call, thread, word)
    set_control_word(word)


_sem_wait = types.ExternalFunction("sem_wait", types.int32(I64))
_sem_post = types.ExternalFunction("sem_post", types.int32(I64))


_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@_called
def wait_a_little(looks: int) -> None:
    """Called after each look at another thread's progress that found it unfinished. looks: their number"""
    if looks < SPINS:
        pause()
    else:
        _sched_yield()


@_called
def wait(semaphore: int) -> None:
    while _sem_wait(semaphore) != 0:  # a signal interrupts it
        pass


@_called
def begin_sharing(call: int, function: int, helpers: int, count: int) -> None:
    """Starts a kernel of (call, thread) in `count` helpers. helpers: the address of their memory"""
    for helper in range(count):
        memory = helpers + helper * HELPER_BYTES
        state = longs(memory)
        state[FUNCTION], state[CALL] = function, call
        _sem_post(memory + START)


@_called
def end_sharing(helpers: int, count: int) -> None:
    """Waits until the helpers are done."""
    for helper in range(count):
        wait(helpers + helper * HELPER_BYTES + DONE)


@_called
def share(call: int, function: int, helpers: int, count: int) -> None:
    """Runs a kernel of (call, thread) in this thread and in `count` helpers, until all are done.

    helpers: the address of their memory
    """
    begin_sharing(call, function, helpers, count)
    call_kernel(function, call, 0)
    end_sharing(helpers, count)


def product(call: int, given: int, given_kind: int, function: int, helpers: int, count: int) -> None:
    """Compute one product. given: the address of the inputs, of `given_kind`; `call[X]`: where they are in the form
    that tiles take.

    function: the address of `units`   helpers: of `count` helpers' memory
    """
    arguments = longs(call)
    if arguments[X_BYTES] == 2:
        pair(given, arguments[X], arguments[ROWS] * arguments[INPUTS])
    elif given != arguments[X]:
        widen(given, arguments[X], arguments[ROWS] * arguments[INPUTS], given_kind)
    arguments[NEXT] = 0
    share(call, function, helpers, count)


def serve(memory: int) -> None:
    """A helper thread: runs its part of the calls that it is handed, and never returns."""
    state = longs(memory)
    while True:
        wait(memory + START)
        call_kernel(state[FUNCTION], state[CALL], state[THREAD])
        _sem_post(memory + DONE)


KERNELS = {"product": (product, "iiiiii"), "units": (units, "ii"), "serve": (serve, "i")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
