"""The acceptance head, for numba. Imported only while it is compiled; `cpu.py` calls the machine code."""

from __future__ import annotations

import math

from numba import float32, njit, uint32

from tree_kernels.acceptance_head import constants, shapes
from tree_kernels.mamba_level import shapes as model_shapes
from tree_kernels.mamba_level.curves import LOG2E, LOWEST, ROUNDER, exponential, log_of_one_plus, silu, softplus
from tree_kernels.mamba_level.parts import add_multiple, add_products, copy, dot, product
from tree_kernels.matmul.loops import F32, widen
from tree_kernels.ranking import shapes as ranking_shapes
from tree_kernels.translating import INLINED
from tree_kernels.vectors import bits_of, float_of, floats, fused_multiply_add, longs

inlined = njit(**INLINED, fastmath={"contract"})
summing = njit(**INLINED, fastmath={"contract", "reassoc"})
comparing = njit(**INLINED, fastmath={"nnan", "nsz"})

ONE, ZERO = float32(1.0), float32(0.0)
LN2, HALF, THIRD, FOURTH, FIFTH = (float32(each) for each in (math.log(2), 1 / 2, 1 / 6, 1 / 24, 1 / 120))
WIDEST_GAP, LEAST_LOG_PROB = float32(constants.WIDEST_GAP), float32(constants.LEAST_LOG_PROB)
GAP_UNIT, LAW_UNIT, DEPTH_UNIT = (
    float32(unit) for unit in (constants.GAP_UNIT, constants.LAW_UNIT, constants.DEPTH_UNIT)
)
LOG_SHARPEST, MOST_UNSEEN = float32(constants.LOG_SHARPEST), float32(constants.MOST_UNSEEN)
DEEPEST = constants.DEEPEST


@inlined
def clamped(value: float, least: float, most: float) -> float:
    return least if value < least else most if value > most else value


@comparing
def greatest(logits: int, count: int) -> float:
    """The greatest logit of a row, tokens that the request removed included."""
    given = floats(logits)
    found = given[0]
    for i in range(1, count):
        found = given[i] if given[i] > found else found
    return found


@summing
def add_law(logits: int, shift: float, scale: float, count: int, target: int) -> None:
    """Sums of exp(u) and of u exp(u), with u = (logits - shift) scale, which is at most 0.

    The exponential is a shorter form of `curves.exponential`: errors of single numbers, below 3e-6, are no more than
    those of the sums.
    """
    given, made = floats(logits), floats(target)
    mass, moment, offset = ZERO, ZERO, -shift * scale
    for i in range(count):
        u = fused_multiply_add(given[i], scale, offset)
        u = LOWEST if u < LOWEST else u
        shifted = fused_multiply_add(u, LOG2E, ROUNDER)
        rest = fused_multiply_add(ROUNDER - shifted, LN2, u)
        sum_ = fused_multiply_add(rest, FIFTH, FOURTH)
        sum_ = fused_multiply_add(sum_, rest, THIRD)
        sum_ = fused_multiply_add(sum_, rest, HALF)
        sum_ = fused_multiply_add(sum_, rest, ONE)
        sum_ = fused_multiply_add(sum_, rest, ONE)
        weight = sum_ * float_of((bits_of(shifted) << uint32(23)) + uint32(0x3F800000))
        mass += weight
        moment += weight * u
    made[0], made[1] = mass, moment


@inlined
def begin_row(call: int, row: int) -> None:
    """Write the head's inputs of a row: `row_law`, `row_numbers`, and the first line of `head_outputs`."""
    its = longs(call)
    model, ranked = longs(its[shapes.MODEL]), longs(its[shapes.RANKED])
    width, guesses = model[model_shapes.WIDTH], ranked[ranking_shapes.WIDTH]
    ids = longs(ranked[ranking_shapes.IDS] + row * guesses * 8)
    scores = floats(ranked[ranking_shapes.SCORES] + row * guesses * 4)
    own_logits = model[model_shapes.LOGITS] + row * model[model_shapes.LOGITS_STEP]
    logits = floats(own_logits)
    vocabulary = longs(ranked[ranking_shapes.TABLE] + row * ranking_shapes.ROW_WORDS * 8)[ranking_shapes.VOCABULARY]
    temperature = floats(ranked[ranking_shapes.TEMPERATURES])[row]
    scale = ONE / (temperature if temperature > ZERO else ONE)
    shift = greatest(own_logits, vocabulary)
    spare = floats(its[shapes.SPARE])
    add_law(own_logits, shift, scale, vocabulary, its[shapes.SPARE])
    mass, moment = spare[0], spare[1]
    log_mass = log_of_one_plus(mass - ONE if mass > ONE else ZERO)
    entropy = log_mass - moment / mass
    log_prob = (logits[ids[0]] - shift) * scale - log_mass

    x, line, numbers = its[shapes.X] + row * its[shapes.STEP], width * 4, its[shapes.NUMBERS]
    copy(its[shapes.BIAS], x, width)
    add_products(x, model[model_shapes.NORMED] + row * line, its[shapes.HIDDEN_SCALE], width)
    token = ids[0] if ids[0] < model[model_shapes.KNOWN] else 0
    kind = model[model_shapes.EMBEDDING_KIND]
    size = 4 if kind == F32 else 2
    widen(model[model_shapes.EMBEDDING] + token * width * size, its[shapes.SPARE], width, kind)
    add_products(x, its[shapes.SPARE], its[shapes.TOKEN_SCALE], width)
    for j in range(1, its[shapes.CANDIDATES]):
        gap = WIDEST_GAP
        if j < guesses and scores[0] - scores[j] < WIDEST_GAP:
            gap = scores[0] - scores[j]
        add_multiple(x, gap / GAP_UNIT, numbers, width)
        numbers += line
    add_multiple(x, entropy / LAW_UNIT, numbers, width)
    add_multiple(x, (log_prob if log_prob > LEAST_LOG_PROB else LEAST_LOG_PROB) / LAW_UNIT, numbers + line, width)
    add_multiple(x, temperature, numbers + 2 * line, width)
    if temperature == ZERO:
        add_multiple(x, ONE, numbers + 3 * line, width)
    depth = float32(min(longs(its[shapes.DEPTHS])[row], DEEPEST))
    add_multiple(x, depth / DEPTH_UNIT, numbers + 4 * line, width)


@inlined
def add_activated(target: int, given: int, count: int) -> None:
    """target += silu(given)"""
    made, sums = floats(target), floats(given)
    for i in range(count):
        made[i] += silu(sums[i])


@inlined
def end_row(call: int, row: int) -> None:
    """The outputs of a row and the chances of its candidates: `log_chances`."""
    its = longs(call)
    model, ranked = longs(its[shapes.MODEL]), longs(its[shapes.RANKED])
    width, guesses = model[model_shapes.WIDTH], ranked[ranking_shapes.WIDTH]
    scores = floats(ranked[ranking_shapes.SCORES] + row * guesses * 4)
    made = floats(its[shapes.CHANCES] + row * guesses * 4)
    x, bias = its[shapes.X] + row * its[shapes.STEP], floats(its[shapes.OUTPUT_BIAS])
    depth = min(longs(its[shapes.DEPTHS])[row], its[shapes.CALIBRATED] - 1)
    moved = floats(its[shapes.CALIBRATION] + depth * constants.OUTPUTS * 4)
    sharp = dot(x, its[shapes.OUTPUT], width) + bias[0] + moved[0]
    unseen = dot(x, its[shapes.OUTPUT] + width * 4, width) + bias[1] + moved[1]
    raised = dot(x, its[shapes.OUTPUT] + 2 * width * 4, width) + bias[2] + moved[2]
    lift = softplus(raised)
    sharpness = exponential(clamped(sharp, -LOG_SHARPEST, LOG_SHARPEST))
    shown = min(guesses, its[shapes.CANDIDATES])
    none = clamped(unseen, -MOST_UNSEEN, MOST_UNSEEN) + (scores[shown - 1] - scores[0]) * sharpness
    others = exponential(none - lift)
    for j in range(1, shown):
        others += exponential((scores[j] - scores[0]) * sharpness - lift)
    normaliser = lift + log_of_one_plus(others)
    for j in range(guesses):
        chance = (scores[j] - scores[0]) * sharpness - normaliser
        if j == 0:
            chance += lift
        made[j] = chance if chance == chance else float32(-math.inf)


def chances(call: int) -> None:
    """The log chance of every candidate of each row; `reference.py`."""
    its = longs(call)
    model = longs(its[shapes.MODEL])
    rows, width, step = model[model_shapes.ROWS], model[model_shapes.WIDTH], its[shapes.STEP]
    blocks = longs(its[shapes.BLOCK_TABLE])
    for row in range(rows):
        begin_row(call, row)
    for block in range(its[shapes.BLOCKS]):
        product(0, its[shapes.X], step, rows, width, blocks[block], its[shapes.SUMS], step, 0, 0)
        for row in range(rows):
            add_activated(its[shapes.X] + row * step, its[shapes.SUMS] + row * step, width)
    for row in range(rows):
        end_row(call, row)


KERNELS = {"chances": (chances, "i")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
