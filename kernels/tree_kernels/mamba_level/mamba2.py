"""Mamba-2 (docs/design/scan.md#mamba-2) for rows of texts and of drafted trees, for numba. Imported only while it is
compiled.

Rows of a text advance its state. A new node writes its inputs and reads the states of its path from the inputs of the
path's nodes and the state of its text (docs/design/scan.md#levels). Each function is the torch function that its
docstring names.
"""

from __future__ import annotations

from tree_kernels.mamba_level import shapes
from tree_kernels.mamba_level.curves import exponential, softplus
from tree_kernels.mamba_level.parts import (
    activate,
    add_multiple,
    add_products,
    clear,
    convolve_sequence,
    copy,
    dot,
    embed,
    gate,
    inlined,
    into_mixer,
    keep_tails,
    logits,
    number,
    out_of_mixer,
    round_inputs,
    scale_in_place,
)
from tree_kernels.mamba_level.team import join, lead
from tree_kernels.mamba_level.tiles import call_scan
from tree_kernels.processor import lanes
from tree_kernels.vectors import floats, longs

LANES = lanes()


@inlined
def hang(call: int) -> None:
    """Records the parents and texts of the new nodes."""
    its = longs(call)
    new = longs(its[shapes.NEW_TABLE])
    nodes = longs(its[shapes.NODE_TABLE])
    for node in range(its[shapes.NEW_NODES]):
        slot = new[node * shapes.NEW_WORDS]
        nodes[slot * shapes.NODE_WORDS + shapes.PARENT] = new[node * shapes.NEW_WORDS + 1]
        nodes[slot * shapes.NODE_WORDS + shapes.TEXT] = new[node * shapes.NEW_WORDS + 2]


@inlined
def convolve_node(call: int, layer: int, slot: int, target: int, channels: int) -> None:
    """The convolution and SiLU along a node's path (docs/design/scan.md#convolution); `tree_conv`."""
    its, own = longs(call), longs(layer)
    nodes, back = longs(its[shapes.NODE_TABLE]), its[shapes.TAPS] - 1
    weight, line = own[shapes.CONV_WEIGHT], channels * 4
    tail = own[shapes.TAILS] + nodes[slot * shapes.NODE_WORDS + shapes.TEXT] * back * line
    copy(own[shapes.CONV_BIAS], target, channels)
    at, older = slot, back  # `older`: inputs of the text that are still to come after the path's
    for before in range(back + 1):  # the newest input first
        if at != 0:
            source = own[shapes.NODE_INPUTS] + at * line
            at = nodes[at * shapes.NODE_WORDS + shapes.PARENT]
        else:
            older -= 1
            source = tail + older * line
        add_products(target, source, weight + (back - before) * line, channels)
    activate(target, channels)


@inlined
def step_sizes(call: int, layer: int, row: int, given: int) -> None:
    """dt of a row's heads; `Mamba2Scan._dt`."""
    its, own = longs(call), longs(layer)
    heads, made = its[shapes.HEADS], floats(its[shapes.STEPS] + row * its[shapes.STEPS_STEP])
    raw, bias = floats(given), floats(own[shapes.DT_BIAS])
    least, most = number(call, shapes.LEAST_DT), number(call, shapes.MOST_DT)
    for h in range(heads):
        made[h] = min(max(softplus(raw[h] + bias[h]), least), most)


@inlined
def spread(values: int, target: int, heads: int, width: int) -> None:
    """Repeat each head's number for all of the head's channels."""
    given, made = floats(values), floats(target)
    for h in range(heads):
        for p in range(width):
            made[h * width + p] = given[h]


@inlined
def advance(state: int, decay: int, drive: int, y: int, B: float, C: float, count: int) -> None:
    """Update row n of a state: S = decay S + drive B, y += S C."""
    S, left, driven, made = floats(state), floats(decay), floats(drive), floats(y)
    for i in range(count):
        S[i] = left[i] * S[i] + driven[i] * B
        made[i] += S[i] * C


@inlined
def drives(call: int, layer: int, row: int, decay: int, drive: int) -> None:
    """The decay of a row's channels, and dt x, which drives the state."""
    its, A = longs(call), floats(longs(layer)[shapes.A])
    channels, heads = its[shapes.CHANNELS], its[shapes.HEADS]
    dt = its[shapes.STEPS] + row * its[shapes.STEPS_STEP]
    steps, x, factors = floats(dt), floats(its[shapes.MIXED] + row * its[shapes.MIXED_STEP]), floats(drive)
    for h in range(heads):
        factors[h] = exponential(steps[h] * A[h])
    spread(drive, decay, heads, channels // heads)
    spread(dt, drive, heads, channels // heads)
    for i in range(channels):
        factors[i] *= x[i]


@inlined
def advance_text(call: int, layer: int, words: int) -> None:
    """Rows of a text advance its state and read it; `mamba2_chain` and `mamba2_fold` of the state step."""
    its, own, sequence = longs(call), longs(layer), longs(words)
    channels, groups, size = its[shapes.CHANNELS], its[shapes.GROUPS], its[shapes.SIZE]
    members, cells, line, mixed_step = channels // groups, channels * size, channels * 4, its[shapes.MIXED_STEP]
    source = own[shapes.STATES] + sequence[shapes.SOURCE] * cells * 4
    state = own[shapes.STATES] + sequence[shapes.TARGET] * cells * 4
    if source != state:
        copy(source, state, cells)
    decay, drive = its[shapes.SPARE], its[shapes.SPARE] + shapes.SCAN_TOKENS * line
    tiles, place = longs(its[shapes.SCANS]), 0
    while place < sequence[shapes.COUNT]:
        row, count = sequence[shapes.FIRST] + place, min(shapes.SCAN_TOKENS, sequence[shapes.COUNT] - place)
        for token in range(count):
            drives(call, layer, row + token, decay + token * line, drive + token * line)
        y, shared = its[shapes.READ] + row * line, its[shapes.MIXED] + row * mixed_step + line
        for g in range(groups):
            at = g * members * 4
            B, apart = shared + g * size * 4, groups * size * 4
            if count > 1 and members % LANES == 0:  # a lone token's state is read faster row by row
                tile, vectors = tiles[count - 1], members // LANES
                call_scan(tile, state + at, line, size, decay + at, line, B, apart, mixed_step, y + at, line, vectors)
            else:
                for token in range(count):
                    b, c, here = (
                        floats(B + token * mixed_step),
                        floats(B + token * mixed_step + apart),
                        token * line + at,
                    )
                    clear(y + here, members)
                    for n in range(size):
                        advance(state + n * line + at, decay + here, drive + here, y + here, b[n], c[n], members)
        place += count


@inlined
def keep_node(call: int, layer: int, row: int, slot: int) -> None:
    """Writes a node's x, B and dt, which its descendants read."""
    its, own = longs(call), longs(layer)
    channels, heads = its[shapes.CHANNELS], its[shapes.HEADS]
    shared = its[shapes.GROUPS] * its[shapes.SIZE]
    mixed = its[shapes.MIXED] + row * its[shapes.MIXED_STEP]
    copy(mixed, own[shapes.NODE_X] + slot * channels * 4, channels)
    copy(mixed + channels * 4, own[shapes.NODE_B] + slot * shared * 4, shared)
    copy(its[shapes.STEPS] + row * its[shapes.STEPS_STEP], own[shapes.NODE_DT] + slot * heads * 4, heads)


@inlined
def read_four(state: int, step: int, C: int, y: int, count: int) -> None:
    """y += S C of four rows n of a state, which are `step` bytes apart."""
    S0, S1, S2, S3 = floats(state), floats(state + step), floats(state + 2 * step), floats(state + 3 * step)
    made, factors = floats(y), floats(C)
    C0, C1, C2, C3 = factors[0], factors[1], factors[2], factors[3]
    for i in range(count):
        made[i] += (C0 * S0[i] + C1 * S1[i]) + (C2 * S2[i] + C3 * S3[i])


@inlined
def read_state(call: int, state: int, C: int, y: int) -> None:
    """y = S C of every channel."""
    its = longs(call)
    channels, groups, size = its[shapes.CHANNELS], its[shapes.GROUPS], its[shapes.SIZE]
    members, step = channels // groups, channels * 4
    factors = floats(C)
    clear(y, channels)
    for g in range(groups):
        at = g * members * 4
        for four in range(size // 4):
            n = 4 * four
            read_four(state + n * step + at, step, C + (g * size + n) * 4, y + at, members)
        for n in range(size // 4 * 4, size):
            add_multiple(y + at, factors[g * size + n], state + n * step + at, members)


@inlined
def scan_node(call: int, layer: int, row: int, slot: int) -> None:
    """y = S C of a new node along its path (docs/design/scan.md#levels), without D x; `level_scan`."""
    its, own = longs(call), longs(layer)
    channels, heads, groups, size = (
        its[shapes.CHANNELS],
        its[shapes.HEADS],
        its[shapes.GROUPS],
        its[shapes.SIZE],
    )
    width, members = channels // heads, heads // groups
    nodes, A = longs(its[shapes.NODE_TABLE]), floats(own[shapes.A])
    C = its[shapes.MIXED] + row * its[shapes.MIXED_STEP] + (channels + groups * size) * 4
    y, before = its[shapes.READ] + row * channels * 4, its[shapes.SPARE]
    decayed, weights = floats(before + channels * 4), floats(before + 2 * channels * 4)
    clear(y, channels)
    clear(before + channels * 4, heads)  # the logarithm of each head's decay from a node on the path to the new node
    at = slot
    while at != 0:
        dt, B = floats(own[shapes.NODE_DT] + at * heads * 4), own[shapes.NODE_B] + at * groups * size * 4
        for g in range(groups):
            alike = dot(B + g * size * 4, C + g * size * 4, size)
            for h in range(g * members, (g + 1) * members):
                weights[h] = exponential(decayed[h]) * dt[h] * alike
                decayed[h] += dt[h] * A[h]
        x = own[shapes.NODE_X] + at * channels * 4
        for h in range(heads):
            add_multiple(y + h * width * 4, weights[h], x + h * width * 4, width)
        at = nodes[at * shapes.NODE_WORDS + shapes.PARENT]
    text = nodes[slot * shapes.NODE_WORDS + shapes.TEXT]
    read_state(call, own[shapes.STATES] + text * channels * size * 4, C, before)
    for h in range(heads):
        add_multiple(y + h * width * 4, exponential(decayed[h]), before + h * width * 4, width)


@inlined
def mix(call: int, layer: int) -> None:
    """Run a layer's mixer, from the results of in_proj to the inputs of out_proj; `Mamba2Mixer.level` and `.chain`."""
    its, own = longs(call), longs(layer)
    channels, groups = its[shapes.CHANNELS], its[shapes.GROUPS]
    mixed = channels + 2 * groups * its[shapes.SIZE]
    inner, step = its[shapes.INNER], its[shapes.INNER_STEP]
    raw = inner + channels * 4  # raw inputs lie after the gate
    rows = its[shapes.ROWS]
    round_inputs(call, raw, step, mixed)
    for row in range(rows):
        step_sizes(call, layer, row, raw + row * step + mixed * 4)
    for each in range(its[shapes.SEQUENCES]):
        words = its[shapes.SEQUENCE_TABLE] + each * shapes.SEQUENCE_WORDS * 8
        convolve_sequence(
            call,
            words,
            raw,
            step,
            own[shapes.TAILS],
            own[shapes.CONV_WEIGHT],
            own[shapes.CONV_BIAS],
            its[shapes.MIXED],
            its[shapes.MIXED_STEP],
            mixed,
        )
        keep_tails(call, words, raw, step, own[shapes.TAILS], mixed)
        advance_text(call, layer, words)
    new, first = longs(its[shapes.NEW_TABLE]), rows - its[shapes.NEW_NODES]
    for node in range(its[shapes.NEW_NODES]):
        slot, row = new[node * shapes.NEW_WORDS], first + node
        copy(raw + row * step, own[shapes.NODE_INPUTS] + slot * mixed * 4, mixed)
        convolve_node(call, layer, slot, its[shapes.MIXED] + row * its[shapes.MIXED_STEP], mixed)
        keep_node(call, layer, row, slot)
        scan_node(call, layer, row, slot)
    for row in range(rows):
        y = its[shapes.READ] + row * channels * 4
        add_products(y, its[shapes.MIXED] + row * its[shapes.MIXED_STEP], own[shapes.D], channels)
        gate(y, inner + row * step, channels)
        part = channels // groups
        for g in range(groups):
            scale_in_place(y + g * part * 4, own[shapes.GATE_NORM] + g * part * 4, part, number(call, shapes.GATE_EPS))


def forward(call: int) -> None:
    """Hidden rows of tokens; `Backbone.through`."""
    its = longs(call)
    embed(call)
    hang(call)
    for each in range(its[shapes.LAYERS]):
        layer = its[shapes.LAYER_TABLE] + each * shapes.LAYER_WORDS * 8
        into_mixer(call, layer)
        mix(call, layer)
        out_of_mixer(call, layer)


@inlined
def drive_state(state: int, decay: int, drive: int, B: float, count: int) -> None:
    """Update row n of a state: S = decay S + drive B."""
    S, left, driven = floats(state), floats(decay), floats(drive)
    for i in range(count):
        S[i] = left[i] * S[i] + driven[i] * B


@inlined
def advance_by_path(call: int, layer: int, words: int) -> None:
    """A text's state after the nodes of a path: S' = e^{c_l} S + sum_j e^{c_l - c_j} dt_j x_j B_j^T
    (docs/design/scan.md#folds).

    `mamba2_drive` and `mamba2_fold` of the state step.
    """
    its, own, fold = longs(call), longs(layer), longs(words)
    channels, heads, groups, size = (
        its[shapes.CHANNELS],
        its[shapes.HEADS],
        its[shapes.GROUPS],
        its[shapes.SIZE],
    )
    width, members, cells = channels // heads, channels // groups, channels * size
    path, A = longs(its[shapes.PATHS] + fold[shapes.PATH] * 8), floats(own[shapes.A])
    length = fold[shapes.LENGTH]
    source = own[shapes.STATES] + fold[shapes.BEGIN] * cells * 4
    state = own[shapes.STATES] + fold[shapes.END_TEXT] * cells * 4
    if source != state:
        copy(source, state, cells)
    decay, drive = its[shapes.SPARE], its[shapes.SPARE] + channels * 4
    left, factors = floats(its[shapes.SPARE] + 2 * channels * 4), floats(drive)
    for place in range(length):
        node = path[place]
        dt, x = floats(own[shapes.NODE_DT] + node * heads * 4), floats(own[shapes.NODE_X] + node * channels * 4)
        B = floats(own[shapes.NODE_B] + node * groups * size * 4)
        for h in range(heads):
            left[h] = exponential(dt[h] * A[h])
        spread(its[shapes.SPARE] + 2 * channels * 4, decay, heads, width)
        spread(own[shapes.NODE_DT] + node * heads * 4, drive, heads, width)
        for i in range(channels):
            factors[i] *= x[i]
        for g in range(groups):
            at = g * members * 4
            for n in range(size):
                drive_state(state + n * channels * 4 + at, decay + at, drive + at, B[g * size + n], members)


@inlined
def keep_path_tail(call: int, layer: int, words: int) -> None:
    """Writes the last W - 1 inputs of the convolution after a path's nodes to its text."""
    its, own, fold = longs(call), longs(layer), longs(words)
    mixed = its[shapes.CHANNELS] + 2 * its[shapes.GROUPS] * its[shapes.SIZE]
    back, line, length = its[shapes.TAPS] - 1, mixed * 4, fold[shapes.LENGTH]
    path = longs(its[shapes.PATHS] + fold[shapes.PATH] * 8)
    before = own[shapes.TAILS] + fold[shapes.BEGIN] * back * line
    target = own[shapes.TAILS] + fold[shapes.END_TEXT] * back * line
    for tap in range(back):  # ascending: a text that is its own source is read before it is overwritten
        at = length - back + tap
        source = before + (at + back) * line if at < 0 else own[shapes.NODE_INPUTS] + path[at] * line
        copy(source, target + tap * line, mixed)


def fold(call: int) -> None:
    """Advances texts by the nodes of paths, in all layers; `NodeStates.fold`."""
    its = longs(call)
    for each in range(its[shapes.LAYERS]):
        layer = its[shapes.LAYER_TABLE] + each * shapes.LAYER_WORDS * 8
        for row in range(its[shapes.FOLDS]):
            words = its[shapes.FOLD_TABLE] + row * shapes.FOLD_WORDS * 8
            advance_by_path(call, layer, words)
            keep_path_tail(call, layer, words)


KERNELS = {
    "forward": (forward, "i"),
    "fold": (fold, "i"),
    "logits": (logits, "i"),
    "join": (join, "ii"),
    "lead": (lead, "iiiiii"),
}
"""The functions that are compiled, and their arguments: i int64, f float32."""
