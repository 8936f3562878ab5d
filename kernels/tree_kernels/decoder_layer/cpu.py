"""Prepares and calls the compiled program of decoder layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tree_kernels.decoder_layer.shapes import LENGTH, RECORDS, Operation
from tree_kernels.kernel_cache import load_kernels, why_missing
from tree_kernels.matmul import PackedWeight
from tree_kernels.matmul.cpu import PRECISIONS, helpers
from tree_kernels.matmul.shapes import SCRATCH, Argument, Precision, float_bits
from tree_kernels.row_functions.cpu import row_kernels
from tree_kernels.row_functions.shapes import UNIT, GateArgument, NormArgument, WidenArgument, norm_scratch
from tree_kernels.tree_attention.compiled import (
    CompiledStep,
    HeadRows,
    attention_kernels,
    layer_words,
    pool_words,
)
from tree_kernels.tree_attention.rows import LOG2_E, Layout, RowRotation
from tree_kernels.tree_attention.shapes import BLOCK_ROWS, AttentionArgument, scratch_floats

if TYPE_CHECKING:
    from tree_kernels.machine_code import Kernels

MODULE = "tree_kernels.decoder_layer.loops"
Words = npt.NDArray[np.int64]
LINE = 64
"""Bytes of a cache line; every array of the workspace begins at one."""
MOST_PROGRAMS = 256
"""Programs that are kept. A target has up to three for each size of its steps."""
OPERATIONS = 13
"""Operations of a layer."""
ATTENDED = 6
"""Operations of a layer up to its attention, whose results are widened by the next one."""


def why_not_compiled() -> str:
    """Reason why layers cannot be compiled here; empty if they can."""
    return why_missing(MODULE)


def _kernels() -> Kernels:
    return load_kernels(MODULE)


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

    @property
    def products(self) -> tuple[PackedWeight, ...]:
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down


class Workspace:
    """Memory for results between the operations of a model's layers, which use it one after another."""

    def __init__(self) -> None:
        self._memory = np.zeros(0, np.uint8)
        self.address = self._memory.ctypes.data

    def of(self, sizes: Sequence[int]) -> tuple[int, list[int]]:
        """The memory's address, and addresses of arrays of these numbers of bytes in it. A call may move the memory;
        earlier addresses are then invalid."""
        room = [-(-size // LINE) * LINE for size in sizes]
        if sum(room) + LINE > len(self._memory):
            self._memory = np.zeros(sum(room) + LINE, np.uint8)
            self.address = self._memory.ctypes.data
        ends = np.cumsum(room)
        first = -(-self.address // LINE) * LINE
        return self.address, [first + int(end) - size for end, size in zip(ends, room, strict=True)]

    def rows(self, address: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The array [rows, width] at an address of this memory, not a copy."""
        first = address - self.address
        return torch.from_numpy(self._memory[first : first + rows * width * dtype.itemsize]).view(dtype).view(rows, -1)


def _x_kind(rows: int, *weights: PackedWeight) -> Precision:
    """Type in which all these weights can read the same rows."""
    kinds = {each.x_kind(rows) for each in weights}
    return kinds.pop() if len(kinds) == 1 else Precision.F32


@dataclass(slots=True, eq=False)
class _LayersProgram:
    """A prepared call, and the arguments that each step sets: arrays of one line a layer."""

    words: Words
    address: int  # address of the words
    calls: tuple[Words, ...]  # calls whose addresses are in the words
    widening: Words  # the call that widens what the last layer's attention gives
    workspace: int  # address of the workspace when the program was made
    norms: Words
    attentions: Words
    outputs: Words
    downs: Words


class DecoderLayers:
    """Layers one after another, each x -> m + down(silu(gate(n2(m))) * up(n2(m))), where
    m = x + output(attention(n1(x))). Not thread-safe."""

    def __init__(self, weights: Sequence[LayerWeights], workspace: Workspace, threads: int = 1) -> None:
        """Raises ValueError for weights that do not fit each other, NoKernelsError where nothing can be compiled."""
        self.weights, self._workspace = tuple(weights), workspace
        self._threads = threads
        self._norms = [[each.detach().contiguous() for each in its.norms] for its in weights]
        self._sinks = [
            None if its.sinks is None else (its.sinks.detach().float() * LOG2_E).contiguous() for its in weights
        ]
        self._end = len(weights) * OPERATIONS
        self._attended = self._end - OPERATIONS + ATTENDED  # operations up to the last layer's attention
        self._programs: dict[tuple[int, ...], _LayersProgram] = {}
        products = (each for its in weights for each in its.products)
        self._limits = [*{id(each.limit): each.limit for each in products if each.limit is not None}.values()]
        self.dtype, self.width = self._norms[0][0].dtype, self.weights[0].query.inputs
        self._key_dim = min(its.layout.key_dim for its in weights)
        for its, norms in zip(self.weights, self._norms, strict=True):
            self._check(its, norms)
        kernels = _kernels()
        self._start, self._operations = kernels.functions["run"], kernels.address("operations")

    def prepare(self, rows: int, columns: int, wanted: int) -> None:
        """Make in advance the programs of steps of so many rows, with `columns` near keys each, of which all or
        `wanted` rows are wanted."""
        for end in (self._end, self._attended):
            self._program(rows, columns, 0, end)
        self._program(wanted, 0, self._attended, self._end)

    def _check(self, its: LayerWeights, norms: Sequence[Tensor]) -> None:
        layout, own = its.layout, (its.query, its.key, its.value, its.gate, its.up)
        heads = its.query.outputs // layout.key_dim
        shapes = {
            "dtypes": {*(each.dtype for each in norms), *(each.dtype for each in its.products)} == {self.dtype},
            "inputs": {*(each.inputs for each in own), *map(len, norms)} == {self.width},
            "outputs": its.output.outputs == its.down.outputs == self.width,
            "heads": heads * layout.key_dim == its.query.outputs and heads % layout.kv_heads == 0,
            "keys": its.key.outputs == layout.kv_heads * layout.key_dim,
            "values": its.value.outputs == layout.kv_heads * layout.value_dim,
            "attention": its.output.inputs == heads * layout.value_dim,
            "MLP": its.gate.outputs == its.up.outputs == its.down.inputs,
        }
        if not all(shapes.values()):
            raise ValueError(f"weights do not fit each other: {[name for name, fits in shapes.items() if not fits]}")

    def __call__(
        self,
        x: Tensor,
        pools: Sequence[Tensor],
        step: CompiledStep,
        rotation: RowRotation,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Run all layers: x [rows, D] -> [rows, D], or the results of the `wanted` rows [k] alone, [k, D]: the last
        layer runs on these only, after its attention. pools: each layer's [slots, kv_heads, width], written; float32 or
        of x's dtype. Raises ValueError for rows of another dtype or number than the weights', the step's or the
        rotation's."""
        rows, words = len(x), step.words
        cos, sin = rotation.cos, rotation.sin
        if x.dtype != self.dtype or x.shape != (words[AttentionArgument.PADDED], self.width):
            raise ValueError(f"rows {[*x.shape]} of {x.dtype} do not fit the step's {words[AttentionArgument.PADDED]}")
        if not rotation.fits(rows, self.dtype, self._key_dim):
            raise ValueError(f"a rotation {[*cos.shape]} of {cos.dtype} does not fit {rows} rows of {x.dtype}")
        if not all(pool.dtype in (torch.float32, self.dtype) for pool in pools):
            raise ValueError(f"a pool's dtype is neither float32 nor that of the rows, {x.dtype}")
        x, cos, sin, made = x.contiguous(), cos.contiguous(), sin.contiguous(), torch.empty_like(x)
        program = self._program(rows, step.columns, 0, self._end if wanted is None else self._attended)
        # A layer writes its result when nothing reads its rows any more, so all layers' results have one place.
        result = made.data_ptr()
        program.norms[:, NormArgument.X] = program.outputs[:, Argument.RESIDUAL] = result
        program.norms[0, NormArgument.X] = program.outputs[0, Argument.RESIDUAL] = x.data_ptr()
        program.downs[:, Argument.TARGET] = result
        attentions = program.attentions
        attentions[:, : AttentionArgument.QUERY] = words[: AttentionArgument.QUERY]
        attentions[:, AttentionArgument.POOL : AttentionArgument.KV_HEADS] = [pool_words(pool) for pool in pools]
        attentions[:, AttentionArgument.COSINES : AttentionArgument.TILES] = (
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
        )
        self._run(program)
        if wanted is None:
            return made
        results = int(program.widening[WidenArgument.SOURCE])
        few = self._workspace.rows(results, rows, self.weights[-1].output.inputs, self.dtype)[wanted]
        x, made = (made if len(self.weights) > 1 else x)[wanted], made.new_empty(len(wanted), self.width)
        program = self._program(len(wanted), 0, self._attended, self._end)
        program.widening[WidenArgument.SOURCE] = few.data_ptr()
        program.outputs[-1, Argument.RESIDUAL], program.downs[-1, Argument.TARGET] = x.data_ptr(), made.data_ptr()
        self._run(program)
        return made

    def _run(self, program: _LayersProgram) -> None:
        helpers().share(self._threads, partial(self._start, program.address, self._operations))

    def _program(self, rows: int, columns: int, first: int, end: int) -> _LayersProgram:
        """The program of the operations [first, end), numbered through all layers, for `rows` rows with `columns` near
        keys each."""
        key = rows, columns, first, end, *(limit.rows for limit in self._limits)
        found = self._programs.get(key)
        while found is None or found.workspace != self._workspace.address:  # making it may have moved the workspace
            if len(self._programs) >= MOST_PROGRAMS:
                self._programs.clear()
            found = self._programs[key] = self._made(rows, columns, first, end)
        return found

    def _made(self, rows: int, columns: int, first: int, end: int) -> _LayersProgram:
        count = len(self.weights)
        workspace = self._workspace.address
        words = np.zeros(RECORDS + (end - first) * Operation.SIZE, np.int64)
        set_by_steps = (
            np.zeros((count, len(arguments)), np.int64)
            for arguments in (NormArgument, AttentionArgument, Argument, Argument)
        )
        program = _LayersProgram(words, 0, (), words[:0], workspace, *set_by_steps)
        calls: list[Words] = []
        for layer in range(first // OPERATIONS, count):
            listed, before = self._listed(layer, program, rows, columns), layer * OPERATIONS - first
            calls += [call for _, call, _, _ in listed]
            for number, (kernel, call, counter, needs) in enumerate(listed, before):
                if 0 <= number < end - first:
                    place, own = RECORDS + number * Operation.SIZE, call.ctypes.data
                    program.words[place : place + Operation.ENTERED] = kernel, own, own + 8 * counter, before + needs
            program.widening = listed[ATTENDED][1]
        program.words[LENGTH] = end - first
        program.address, program.calls = program.words.ctypes.data, tuple(calls)
        return program

    def _listed(
        self, layer: int, program: _LayersProgram, rows: int, columns: int
    ) -> Sequence[tuple[int, Words, int, int]]:
        """A layer's operations, in order, each as (kernel, arguments, place of its counter, needs). `needs` is the
        number of the layer's first operations that must be complete before this one begins; all operations of earlier
        layers must be complete, too."""
        its, kind, size = self.weights[layer], PRECISIONS[self.dtype], self.dtype.itemsize
        layout, attended = its.layout, its.output.inputs
        heads = its.query.outputs // layout.key_dim
        inner, middling = _x_kind(rows, its.query, its.key, its.value), _x_kind(rows, its.gate, its.up)
        last, final = its.output.x_kind(rows), its.down.x_kind(rows)
        lines = min(rows, BLOCK_ROWS) * (heads // layout.kv_heads)
        each = 4 * scratch_floats(lines, layout.key_dim, layout.value_dim, columns)
        _, addresses = self._workspace.of(
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
        before, after = program.norms[layer], np.zeros(len(NormArgument), np.int64)
        for call, weight, eps, of in zip((before, after), self._norms[layer], its.eps, (inner, middling), strict=True):
            call[:] = 0, weight.data_ptr(), wide, rows, self.width, kind, of, float_bits(eps), norming, 0
        after[NormArgument.X] = middle
        attention = program.attentions[layer]
        given = (
            HeadRows(query, layout.key_dim * size, its.query.outputs * size),
            HeadRows(key, layout.key_dim * size, its.key.outputs * size),
            HeadRows(value, layout.value_dim * size, its.value.outputs * size),
        )
        sink = self._sinks[layer]
        sinks = 0 if sink is None else sink.data_ptr()
        attention[AttentionArgument.QUERY :] = layer_words(
            given, kind, results, kind, (0, 0, 0, 0), layout, heads // layout.kv_heads, its.scaling, its.window,
            its.softcap, sinks, (0, 0, 0),
        )  # fmt: skip
        attention[AttentionArgument.SCRATCH : AttentionArgument.NEXT] = attending, each
        widening = np.array([results, wide, rows * attended, kind, last, 0], np.int64)
        gating = np.array([gates, ups, gated, rows * its.gate.outputs, kind, final, gating_sums, 0], np.int64)
        queries = its.query.call(wide, rows, query, scratch, inner)
        keys = its.key.call(wide, rows, key, scratch, inner)
        values = its.value.call(wide, rows, value, scratch, inner)
        output, down = program.outputs[layer], program.downs[layer]
        output[:] = its.output.call(wide, rows, middle, scratch, last)
        gate = its.gate.call(wide, rows, gates, scratch, middling)
        up = its.up.call(wide, rows, ups, scratch, middling)
        down[:] = its.down.call(gated, rows, 0, scratch, final, middle)
        norms, gates_kernel, widened = row_kernels()
        writing, attend = attention_kernels()
        product = its.query.kernel
        return (
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
