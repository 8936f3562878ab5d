"""Prepares and calls a layer's program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tree_kernels.decoder_layer.shapes import LENGTH, RECORDS, Operation
from tree_kernels.kernel_cache import NoKernelsError, load_kernels
from tree_kernels.matmul import PackedWeight
from tree_kernels.matmul.cpu import MOST_HELPERS, PRECISIONS, helpers
from tree_kernels.matmul.shapes import SCRATCH, Argument, Precision, float_bits
from tree_kernels.row_functions.cpu import row_kernels
from tree_kernels.row_functions.shapes import UNIT, GateArgument, NormArgument, WidenArgument, norm_scratch
from tree_kernels.tree_attention.compiled import (
    CompiledStep,
    HeadRows,
    RowRotation,
    attention_kernels,
    layer_words,
)
from tree_kernels.tree_attention.rows import LOG2_E, Layout
from tree_kernels.tree_attention.shapes import BLOCK_ROWS, AttentionArgument, scratch_floats

if TYPE_CHECKING:
    from tree_kernels.machine_code import Kernels

Words = npt.NDArray[np.int64]
LINE = 64
"""Bytes of a cache line; every array of the workspace begins at one."""
MOST_PROGRAMS = 64
"""Programs that a layer keeps, one for each number of rows and of near keys."""


@cache
def why_not_compiled() -> str:
    """Reason why layers cannot be compiled here; empty if they can."""
    try:
        _kernels()
    except NoKernelsError as error:
        return str(error)
    return ""


def _kernels() -> Kernels:
    return load_kernels("tree_kernels.decoder_layer.loops")


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of a layer, all of one dtype: bfloat16, float16 or float32."""

    norms: tuple[Tensor, Tensor]  # [D], before the attention and before the MLP
    eps: tuple[float, float]
    query: PackedWeight
    key: PackedWeight
    value: PackedWeight
    output: PackedWeight
    gate: PackedWeight
    up: PackedWeight
    down: PackedWeight
    layout: Layout
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]


class Workspace:
    """Memory for results between the operations of a model's layers, which use it one after another."""

    def __init__(self) -> None:
        self._memory = np.zeros(0, np.uint8)
        self.address = self._memory.ctypes.data

    def of(self, sizes: Sequence[int]) -> tuple[int, list[int]]:
        """Where the memory is, and addresses of arrays of so many bytes in it. It may move: earlier addresses are then
        invalid."""
        room = [-(-size // LINE) * LINE for size in sizes]
        if sum(room) + LINE > len(self._memory):
            self._memory = np.zeros(sum(room) + LINE, np.uint8)
            self.address = self._memory.ctypes.data
        ends = np.cumsum(room)
        first = -(-self.address // LINE) * LINE
        return self.address, [first + int(end) - size for end, size in zip(ends, room, strict=True)]


def _x_kind(rows: int, *weights: PackedWeight) -> Precision:
    """Type in which all these weights can read the same rows."""
    kinds = {each.x_kind(rows) for each in weights}
    return kinds.pop() if len(kinds) == 1 else Precision.F32


@dataclass(slots=True, eq=False)
class _LayerProgram:
    """A prepared call, and the arguments that each step sets."""

    words: Words
    address: int  # address of the words
    calls: tuple[Words, ...]  # calls whose addresses are in the words
    workspace: int  # where that was
    norm: Words
    attention: Words
    output: Words
    down: Words


class DecoderLayer:
    """x -> m + down(silu(gate(n2(m))) * up(n2(m))), where m = x + output(attention(n1(x))). Not thread-safe."""

    def __init__(self, weights: LayerWeights, workspace: Workspace, threads: int = 1) -> None:
        """Raises ValueError for weights that do not fit each other, NoKernelsError where nothing can be compiled."""
        self.weights, self._workspace = weights, workspace
        self._threads = min(threads, 1 + MOST_HELPERS)
        self._norms = [each.detach().contiguous() for each in weights.norms]
        self._sinks = None if weights.sinks is None else (weights.sinks.detach().float() * LOG2_E).contiguous()
        self._programs: dict[tuple[int, int], _LayerProgram] = {}
        self.dtype, self.width = self._norms[0].dtype, weights.query.inputs
        layout, own = weights.layout, (weights.query, weights.key, weights.value, weights.gate, weights.up)
        heads = weights.query.outputs // layout.key_dim
        shapes = {
            "dtypes": {self._norms[1].dtype, weights.output.dtype, weights.down.dtype, *(each.dtype for each in own)}
            == {self.dtype},
            "inputs": {each.inputs for each in own} == {len(each) for each in self._norms} == {self.width},
            "outputs": weights.output.outputs == weights.down.outputs == self.width,
            "heads": heads * layout.key_dim == weights.query.outputs and heads % layout.kv_heads == 0,
            "keys": weights.key.outputs == layout.kv_heads * layout.key_dim,
            "values": weights.value.outputs == layout.kv_heads * layout.value_dim,
            "attention": weights.output.inputs == heads * layout.value_dim,
            "MLP": weights.gate.outputs == weights.up.outputs == weights.down.inputs,
        }
        if not all(shapes.values()):
            raise ValueError(f"weights do not fit each other: {[name for name, fits in shapes.items() if not fits]}")
        self._heads = heads
        kernels = _kernels()
        self._run, self._operations = kernels.functions["run"], kernels.address("operations")

    def __call__(self, x: Tensor, pool: Tensor, step: CompiledStep, rotation: RowRotation) -> Tensor:
        """x [rows, D], pool [slots, kv_heads, width] float32, written -> [rows, D]. Raises ValueError for rows of
        another dtype or number than the weights', the step's or the rotation's."""
        rows, words = len(x), step.words
        cos, sin = rotation.cos, rotation.sin
        if x.dtype != self.dtype or x.shape != (words[AttentionArgument.PADDED], self.width):
            raise ValueError(f"rows {[*x.shape]} of {x.dtype} do not fit the step's {words[AttentionArgument.PADDED]}")
        if (
            not self.dtype == cos.dtype == sin.dtype
            or cos.shape != sin.shape
            or len(cos) != rows
            or cos.shape[1] > self.weights.layout.key_dim
            or cos.shape[1] % 2
        ):
            raise ValueError(f"a rotation {[*cos.shape]} of {cos.dtype} does not fit {rows} rows of {x.dtype}")
        x, cos, sin, made = x.contiguous(), cos.contiguous(), sin.contiguous(), torch.empty_like(x)
        program = self._program(rows, step.columns)
        program.norm[NormArgument.X] = program.output[Argument.RESIDUAL] = x.data_ptr()
        program.down[Argument.TARGET] = made.data_ptr()
        attention = program.attention
        attention[: AttentionArgument.QUERY] = words[: AttentionArgument.QUERY]
        attention[AttentionArgument.POOL] = pool.data_ptr()
        attention[AttentionArgument.COSINES] = cos.data_ptr()
        attention[AttentionArgument.SINES] = sin.data_ptr()
        attention[AttentionArgument.ROTATED] = cos.shape[1]
        shared = helpers()
        held = self._threads > 1 and shared.lock.acquire(blocking=False)  # the bits do not depend on the threads
        try:
            count = shared.at_most(self._threads - 1) if held else 0
            self._run(program.address, self._operations, shared.address, count)
        finally:
            if held:
                shared.lock.release()
        return made

    def _program(self, rows: int, columns: int) -> _LayerProgram:
        """The program for steps of so many rows, with so many near keys each."""
        found = self._programs.get((rows, columns))
        if found is None or found.workspace != self._workspace.address:
            if len(self._programs) >= MOST_PROGRAMS:
                self._programs.clear()
            found = self._programs[rows, columns] = self._made(rows, columns)
        return found

    def _made(self, rows: int, columns: int) -> _LayerProgram:
        its, layout, kind, size = self.weights, self.weights.layout, PRECISIONS[self.dtype], self.dtype.itemsize
        attended = its.output.inputs
        inner, middling = _x_kind(rows, its.query, its.key, its.value), _x_kind(rows, its.gate, its.up)
        last, final = its.output.x_kind(rows), its.down.x_kind(rows)
        lines = min(rows, BLOCK_ROWS) * (self._heads // layout.kv_heads)
        each = 4 * scratch_floats(lines, layout.key_dim, layout.value_dim, columns)
        workspace, addresses = self._workspace.of(
            [
                4 * rows * max(self.width, attended),
                *(size * rows * outputs for outputs in (its.query.outputs, its.key.outputs, its.value.outputs)),
                *(size * rows * outputs for outputs in (attended, self.width, its.gate.outputs, its.gate.outputs)),
                4 * rows * its.down.inputs,
                4 * self._threads * norm_scratch(self.width),
                4 * self._threads * UNIT,
                4 * self._threads * SCRATCH,
                self._threads * each,
            ]
        )
        wide, query, key, value, results, middle, gates, ups, gated, norming, gating_sums, scratch, attending = (
            addresses
        )
        before, after = (
            np.zeros(len(NormArgument), np.int64),
            np.zeros(len(NormArgument), np.int64),
        )
        for call, weight, eps, of in zip((before, after), self._norms, its.eps, (inner, middling), strict=True):
            call[:] = 0, weight.data_ptr(), wide, rows, self.width, kind, of, float_bits(eps), norming, 0
        after[NormArgument.X] = middle
        attention = np.zeros(len(AttentionArgument), np.int64)
        given = (
            HeadRows(query, layout.key_dim * size, its.query.outputs * size),
            HeadRows(key, layout.key_dim * size, its.key.outputs * size),
            HeadRows(value, layout.value_dim * size, its.value.outputs * size),
        )
        sinks = 0 if self._sinks is None else self._sinks.data_ptr()
        attention[AttentionArgument.QUERY :] = layer_words(
            given, kind, results, kind, 0, layout, self._heads // layout.kv_heads, its.scaling, its.window, its.softcap,
            sinks, (0, 0, 0),
        )  # fmt: skip
        attention[AttentionArgument.SCRATCH : AttentionArgument.NEXT] = attending, each
        widening = np.array([results, wide, rows * attended, kind, last, 0], np.int64)
        gating = np.array([gates, ups, gated, rows * its.gate.outputs, kind, final, gating_sums, 0], np.int64)
        queries = its.query.call(wide, rows, query, scratch, inner)
        keys = its.key.call(wide, rows, key, scratch, inner)
        values = its.value.call(wide, rows, value, scratch, inner)
        output = its.output.call(wide, rows, middle, scratch, last)
        gate = its.gate.call(wide, rows, gates, scratch, middling)
        up = its.up.call(wide, rows, ups, scratch, middling)
        down = its.down.call(gated, rows, 0, scratch, final, middle)
        norms, gates_kernel, widened = row_kernels()
        writing, attend = attention_kernels()
        product = its.query.kernel
        # The kernel, its arguments, the place of its counter, and how many operations before it must be complete.
        listed = (
            (norms, before, NormArgument.NEXT, 0),
            (product, queries, Argument.NEXT, 1),
            (product, keys, Argument.NEXT, 1),
            (product, values, Argument.NEXT, 1),
            (writing, attention, AttentionArgument.WRITERS, 4),
            (attend, attention, AttentionArgument.NEXT, 5),
            (widened, widening, WidenArgument.NEXT, 6),
            (product, output, Argument.NEXT, 7),
            (norms, after, NormArgument.NEXT, 8),
            (product, gate, Argument.NEXT, 9),
            (product, up, Argument.NEXT, 9),
            (gates_kernel, gating, GateArgument.NEXT, 11),
            (product, down, Argument.NEXT, 12),
        )
        words = np.zeros(RECORDS + len(listed) * Operation.SIZE, np.int64)
        words[LENGTH] = len(listed)
        for number, (kernel, call, counter, needs) in enumerate(listed):
            place = RECORDS + number * Operation.SIZE
            words[place : place + Operation.ENTERED] = kernel, call.ctypes.data, call.ctypes.data + 8 * counter, needs
        calls = tuple(call for _, call, _, _ in listed)
        return _LayerProgram(words, words.ctypes.data, calls, workspace, before, attention, output, down)
