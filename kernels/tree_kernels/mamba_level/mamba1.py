"""Mamba-1 (docs/design/scan.md#mamba-1) for rows of texts and of drafted trees, for numba. Imported only while it is
compiled.

A new node is a sequence of one row from its parent's slot to its own. Each function is the torch function that its
docstring names.
"""

from __future__ import annotations

from tree_kernels.mamba_level import shapes
from tree_kernels.mamba_level.curves import exponential, softplus
from tree_kernels.mamba_level.parts import (
    add_products,
    clear,
    convolve_sequence,
    copy,
    embed,
    gate,
    inlined,
    into_mixer,
    keep_tails,
    logits,
    out_of_mixer,
    product,
    round_inputs,
)
from tree_kernels.mamba_level.team import join, lead
from tree_kernels.vectors import floats, longs


@inlined
def advance(state: int, dt: int, A: int, drive: int, y: int, B: float, C: float, count: int) -> None:
    """Update row n of a state: h = exp(dt A) h + dt x B, y += C h. drive: dt x"""
    h, steps, factors, driven, made = floats(state), floats(dt), floats(A), floats(drive), floats(y)
    for i in range(count):
        h[i] = exponential(steps[i] * factors[i]) * h[i] + driven[i] * B
        made[i] += h[i] * C


@inlined
def advance_sequence(call: int, layer: int, words: int) -> None:
    """Rows of a sequence advance its state and read it; `mamba1_step` and `mamba1_chain` of the state step."""
    its, own, sequence = longs(call), longs(layer), longs(words)
    channels, size = its[shapes.CHANNELS], its[shapes.SIZE]
    states, cells, drive = own[shapes.STATES], channels * size, its[shapes.SPARE]
    before = sequence[shapes.SOURCE]
    for place in range(sequence[shapes.COUNT]):
        slot = sequence[shapes.TARGET] if place < sequence[shapes.KEPT] else sequence[shapes.END]
        state = states + slot * cells * 4
        if slot != before:
            copy(states + before * cells * 4, state, cells)
            before = slot
        row = sequence[shapes.FIRST] + place
        dt, mixed = its[shapes.STEPS] + row * its[shapes.STEPS_STEP], its[shapes.MIXED] + row * its[shapes.MIXED_STEP]
        y = its[shapes.READ] + row * channels * 4
        clear(drive, channels)
        add_products(drive, dt, mixed, channels)
        clear(y, channels)
        B = floats(its[shapes.PICKED] + row * its[shapes.PICKED_STEP] + its[shapes.RANK] * 4)
        for n in range(size):
            line = n * channels * 4
            advance(state + line, dt, own[shapes.A] + line, drive, y, B[n], B[size + n], channels)


@inlined
def mix(call: int, layer: int) -> None:
    """Run a layer's mixer, from the results of in_proj to the inputs of out_proj; `Mamba1Mixer.step` and `.chain`."""
    its, own = longs(call), longs(layer)
    channels, rows = its[shapes.CHANNELS], its[shapes.ROWS]
    raw, step, mixed, mixed_step = its[shapes.INNER], its[shapes.INNER_STEP], its[shapes.MIXED], its[shapes.MIXED_STEP]
    tails = own[shapes.TAILS]
    round_inputs(call, raw, step, channels)
    for number in range(its[shapes.SEQUENCES]):
        words = its[shapes.SEQUENCE_TABLE] + number * shapes.SEQUENCE_WORDS * 8
        weight, bias = own[shapes.CONV_WEIGHT], own[shapes.CONV_BIAS]
        convolve_sequence(call, words, raw, step, tails, weight, bias, mixed, mixed_step, channels)
        keep_tails(call, words, raw, step, tails, channels)
    picked, picked_step, steps = its[shapes.PICKED], its[shapes.PICKED_STEP], its[shapes.STEPS]
    team = its[shapes.TEAM]
    product(team, mixed, mixed_step, rows, channels, own[shapes.PICK], picked, picked_step, 0, 0)
    steps_step = its[shapes.STEPS_STEP]
    product(team, picked, picked_step, rows, its[shapes.RANK], own[shapes.DT_PROJ], steps, steps_step, 0, 0)
    for row in range(rows):
        dt = floats(steps + row * its[shapes.STEPS_STEP])
        for i in range(channels):
            dt[i] = softplus(dt[i])
    for number in range(its[shapes.SEQUENCES]):
        advance_sequence(call, layer, its[shapes.SEQUENCE_TABLE] + number * shapes.SEQUENCE_WORDS * 8)
    for row in range(rows):
        y = its[shapes.READ] + row * channels * 4
        add_products(y, mixed + row * mixed_step, own[shapes.D], channels)
        gate(y, raw + row * step + channels * 4, channels)


def forward(call: int) -> None:
    """Hidden rows of tokens; `Backbone.through`."""
    its = longs(call)
    embed(call)
    for number in range(its[shapes.LAYERS]):
        layer = its[shapes.LAYER_TABLE] + number * shapes.LAYER_WORDS * 8
        into_mixer(call, layer)
        mix(call, layer)
        out_of_mixer(call, layer)


KERNELS = {"forward": (forward, "i"), "logits": (logits, "i"), "join": (join, "ii"), "lead": (lead, "iiiiii")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
