"""Register tiles of matrix products, as functions in LLVM's intermediate representation.

A tile keeps the sums of a few rows and a few panels of outputs in vector registers while it goes through the inputs.
numba does not keep a small array of sums in registers, so the tiles' loops are written without it; kernels call them by
their symbols. Imported only while kernels are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tree_kernels.matmul.shapes import PANELS, Precision, symbol
from tree_kernels.processor import has_dots, lanes, panel

LANES, PANEL = lanes(), panel()
F32, I8, I32, I64, HALF = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.HalfType()
VECTOR, WORDS, NARROW, HALVES = (ir.VectorType(kind, LANES) for kind in (F32, I32, HALF, ir.IntType(16)))
EACH = PANEL // LANES
"""Vectors of a panel."""
ENTRY_BYTES = {Precision.BF16: 2 * PANEL, Precision.F16: 2 * PANEL, Precision.F32: 4 * PANEL}
"""Bytes of one input's weights in a panel."""
UNROLLED = 4
"""Inputs in one pass of a tile's loop."""
AHEAD = 1024
"""Bytes by which weights are prefetched: the processor's own prefetching stops at the end of a 4 KiB page."""
LINE = 64
"""Bytes of a cache line."""


@intrinsic
def call_tile(
    typingctx: Any,
    function: Any,
    x: Any,
    x_step: Any,
    weights: Any,
    panel_step: Any,
    sums: Any,
    sums_step: Any,
    inputs: Any,
    begin: Any,
) -> Any:
    """Calls the tile at the address `function`.

    x  address of [rows, inputs] float32, x_step bytes between rows
    weights  address of the panels, each [inputs, PANEL] numbers; panel_step bytes between them
    sums  address of [rows, panels * PANEL] float32, sums_step bytes between rows; written
    begin  1: the sums begin at zero; 0: at what `sums` holds

    Each sum adds its inputs one after the other with fused multiply-adds. So its bits depend neither on the tile's rows
    nor on its panels, nor on where a caller splits the inputs into several calls.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 8)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@intrinsic
def call_product_tile(
    typingctx: Any,
    function: Any,
    x: Any,
    x_step: Any,
    weights: Any,
    panel_step: Any,
    sums: Any,
    sums_step: Any,
    inputs: Any,
    begin: Any,
    ahead: Any,
    ahead_step: Any,
) -> Any:
    """Call a product's tile like `call_tile`, and begin to load memory at `ahead`: `ahead_step` bytes for each input,
    in steps of UNROLLED inputs, and the same `panel_step` bytes further for each panel."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 10)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


def sizes(kind: Precision) -> Iterator[tuple[int, int]]:
    """Rows and panels of each tile of this kind: for every number of rows a wide one, and one of a single panel."""
    for rows, most in enumerate(PANELS[kind]):
        for panels in sorted({1, most}) if rows else ():
            yield rows, panels


def tiles(kind: Precision) -> ir.Module:
    """A module with all tiles of this kind."""
    module = ir.Module("tiles")
    for rows, panels in sizes(kind):
        PackedTile(module, kind, rows, panels).write()
    return module


def pair_tiles() -> ir.Module:
    """A module with all tiles of bfloat16, and where the processor has dot products with those of these, too."""
    module = ir.Module("tiles")
    for rows, panels in sizes(Precision.BF16):
        OddTile(module, symbol(Precision.BF16, rows, panels), rows, panels).write()
    for rows, panels in sizes(Precision.PAIRS) if has_dots() else ():
        DotTile(module, symbol(Precision.PAIRS, rows, panels), rows, panels).write()
    return module


class Tile:
    """Writes one tile's function. This base has the part that all forms of weights share."""

    def __init__(self, module: ir.Module, name: str, rows: int, panels: int, arguments: int = 10) -> None:
        self._module, self._rows, self._panels = module, rows, panels
        self._function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), name)
        self._in = ir.IRBuilder(self._function.append_basic_block())

    def write(self) -> None:
        x, x_step, weights, panel_step, sums, sums_step, inputs, begin, ahead, self._ahead_step = self._function.args
        build = self._in
        self._ahead = [self._moved(ahead, panel_step, number) for number in range(self._panels)]
        self._x = [self._moved(x, x_step, row) for row in range(self._rows)]
        self._weights = [self._moved(weights, panel_step, number) for number in range(self._panels)]
        places = [
            build.add(self._moved(sums, sums_step, row), I64(4 * LANES * vector))
            for row in range(self._rows)
            for vector in range(self._panels * EACH)
        ]
        with build.if_else(build.icmp_signed("!=", begin, I64(0))) as (fresh, held):
            with fresh:
                fresh_block = build.block
            with held:
                kept = [self._load(place, VECTOR) for place in places]
                held_block = build.block
        totals = [self._phi(VECTOR, {fresh_block: VECTOR(None), held_block: value}) for value in kept]
        totals = self._after(totals, inputs)
        for place, total in zip(places, totals, strict=True):
            build.store(total, build.inttoptr(place, VECTOR.as_pointer()), align=4)
        build.ret_void()

    def _after(self, totals: list[Any], inputs: Any) -> list[Any]:
        """The totals after all inputs."""
        raise NotImplementedError

    def _counted(self, totals: list[Any], count: Any, body: Callable[[list[Any], Any], list[Any]]) -> list[Any]:
        """The totals after `count` passes of a loop, each of which gets them and its number."""
        build = self._in
        before = build.block
        head, inner, done = (self._function.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        number = self._phi(I64, {before: I64(0)})
        carried = [self._phi(VECTOR, {before: total}) for total in totals]
        build.cbranch(build.icmp_signed("<", number, count), inner, done)
        build.position_at_end(inner)
        for phi, value in zip(carried, body(list(carried), number), strict=True):
            phi.add_incoming(value, build.block)
        number.add_incoming(build.add(number, I64(1)), build.block)
        build.branch(head)
        build.position_at_end(done)
        return list(carried)

    def _added(self, totals: list[Any], weights: list[Any], k: Any) -> list[Any]:
        """Add the products of input k and these weights to every row's totals, panel after panel."""
        given = (self._broadcast(self._in.add(begin, self._in.mul(k, I64(4)))) for begin in self._x)
        pairs = ((value, weight) for value in given for weight in weights)
        return [self._fma(value, weight, total) for (value, weight), total in zip(pairs, totals, strict=True)]

    def _added_pair(self, totals: list[Any], words: list[Any], k: Any) -> list[Any]:
        """Add the products of inputs k and k + 1 to every row's totals. A word has the weight of input k in its upper
        half and that of k + 1 in its lower one."""
        build = self._in
        upper = [build.bitcast(build.and_(word, WORDS([0xFFFF0000] * LANES)), VECTOR) for word in words]
        lower = [build.bitcast(build.shl(word, WORDS([16] * LANES)), VECTOR) for word in words]
        return self._added(self._added(totals, upper, k), lower, build.add(k, I64(1)))

    def _dotted(self, totals: list[Any], words: list[Any], k: Any) -> list[Any]:
        """Add two inputs by the processor's dot products of pairs: fma(x[k], w[k], sum), then fma(x[k + 1], w[k + 1],
        sum). Both read and write zeros for numbers that are not normal. x is PAIRS."""
        build = self._in
        weights = [build.bitcast(word, PAIRS) for word in words]
        found = []
        for row, begin in enumerate(self._x):
            number = self._load(build.add(begin, build.mul(k, I64(2))), I32)
            one = build.insert_element(WORDS(ir.Undefined), number, I32(0))
            given = build.bitcast(build.shuffle_vector(one, WORDS(ir.Undefined), WORDS([0] * LANES)), PAIRS)
            own = totals[row * len(weights) : (row + 1) * len(weights)]
            found += [self._dot(total, given, weight) for total, weight in zip(own, weights, strict=True)]
        return found

    def _dot(self, total: Any, x: Any, weight: Any) -> Any:
        function = self._declared("llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [VECTOR, PAIRS, PAIRS])
        return self._in.call(function, [total, x, weight])

    def _prefetched(self, k: Any, size: int) -> None:
        """Begins to load so many bytes of each panel ahead."""
        for begin in self._ahead:
            here = self._in.add(begin, self._in.mul(k, self._ahead_step))
            for line in range(0, size, LINE):
                self._prefetch(self._in.add(here, I64(line)))

    def _broadcast(self, place: Any) -> Any:
        one = self._in.insert_element(VECTOR(ir.Undefined), self._load(place, F32), I32(0))
        return self._in.shuffle_vector(one, VECTOR(ir.Undefined), WORDS([0] * LANES))

    def _moved(self, place: Any, step: Any, times: int) -> Any:
        return self._in.add(place, self._in.mul(step, I64(times)))

    def _phi(self, kind: Any, incoming: dict[Any, Any]) -> Any:
        phi = self._in.phi(kind)
        for block, value in incoming.items():
            phi.add_incoming(value, block)
        return phi

    def _load(self, place: Any, kind: Any) -> Any:
        return self._in.load(self._in.inttoptr(place, kind.as_pointer()), align=4)

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        return self._in.call(self._declared(f"llvm.fma.v{LANES}f32", VECTOR, [VECTOR] * 3), [a, b, c])

    def _prefetch(self, place: Any) -> None:
        """Begins to load a cache line, which need not be mapped: reading, to be used soon, as data."""
        pointer = I8.as_pointer()
        function = self._declared("llvm.prefetch.p0", ir.VoidType(), [pointer, I32, I32, I32])
        self._in.call(function, [self._in.inttoptr(place, pointer), I32(0), I32(3), I32(1)])

    def _declared(self, name: str, result: Any, arguments: list[Any]) -> Any:
        found = self._module.globals.get(name)
        return found or ir.Function(self._module, ir.FunctionType(result, arguments), name)


class BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat16, which llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


PAIRS = ir.VectorType(BFloat(), 2 * LANES)


class PairTile(Tile):
    """A tile of bfloat16 weights, which are packed two by two."""

    def _after(self, totals: list[Any], inputs: Any) -> list[Any]:
        build = self._in
        passes = build.udiv(inputs, I64(UNROLLED))
        totals = self._counted(totals, passes, self._pairs)
        whole = build.mul(passes, I64(UNROLLED))
        pairs = build.lshr(build.sub(inputs, whole), I64(1))
        return self._counted(
            totals, pairs, lambda found, number: self._pair(found, build.add(whole, build.shl(number, I64(1))))
        )

    def _pairs(self, totals: list[Any], number: Any) -> list[Any]:
        first = self._in.mul(number, I64(UNROLLED))
        self._prefetched(first, UNROLLED * ENTRY_BYTES[Precision.BF16])
        for k in range(0, UNROLLED, 2):
            totals = self._pair(totals, self._in.add(first, I64(k)))
        return totals

    def _pair(self, totals: list[Any], k: Any) -> list[Any]:
        """The totals after inputs k and k + 1 of every row."""
        return self._added_pair(totals, self._words(k), k)

    def _words(self, k: Any) -> list[Any]:
        """The weights of inputs k and k + 1, panel after panel."""
        at = self._in.mul(k, I64(ENTRY_BYTES[Precision.BF16]))
        places = [self._in.add(begin, at) for begin in self._weights]
        return [
            self._load(self._in.add(place, I64(4 * LANES * vector)), WORDS)
            for place in places
            for vector in range(EACH)
        ]


class OddTile(PairTile):
    """A tile of bfloat16 weights for any number of inputs, odd ones, too."""

    def _after(self, totals: list[Any], inputs: Any) -> list[Any]:
        build = self._in
        totals = super()._after(totals, inputs)
        last = build.and_(inputs, I64(-2))
        return self._counted(totals, build.and_(inputs, I64(1)), lambda found, _: self._single(found, last))

    def _single(self, totals: list[Any], k: Any) -> list[Any]:
        """The totals after the last input, which has no other beside it."""
        build = self._in
        at = build.mul(k, I64(ENTRY_BYTES[Precision.BF16]))
        places = [build.add(begin, at) for begin in self._weights]
        halves = [
            self._load(build.add(place, I64(2 * LANES * vector)), HALVES) for place in places for vector in range(EACH)
        ]
        wide = [build.bitcast(build.shl(build.zext(half, WORDS), WORDS([16] * LANES)), VECTOR) for half in halves]
        return self._added(totals, wide, k)


class DotTile(PairTile):
    """A tile of bfloat16 weights by the processor's dot products."""

    def _pair(self, totals: list[Any], k: Any) -> list[Any]:
        return self._dotted(totals, self._words(k), k)


class PackedTile(Tile):
    """A tile of weights that are packed one by one."""

    def __init__(self, module: ir.Module, kind: Precision, rows: int, panels: int) -> None:
        self._kind = kind
        super().__init__(module, symbol(kind, rows, panels), rows, panels)

    def _after(self, totals: list[Any], inputs: Any) -> list[Any]:
        build = self._in
        passes = build.udiv(inputs, I64(UNROLLED))
        totals = self._counted(totals, passes, lambda found, number: self._steps(found, number, UNROLLED))
        whole = build.mul(passes, I64(UNROLLED))
        left = build.sub(inputs, whole)
        return self._counted(totals, left, lambda found, number: self._step(found, build.add(whole, number)))

    def _steps(self, totals: list[Any], number: Any, unrolled: int) -> list[Any]:
        first = self._in.mul(number, I64(unrolled))
        self._prefetched(first, unrolled * ENTRY_BYTES[self._kind])
        for k in range(unrolled):
            totals = self._step(totals, self._in.add(first, I64(k)))
        return totals

    def _step(self, totals: list[Any], k: Any) -> list[Any]:
        """The totals after input k of every row."""
        return self._added(totals, [vector for begin in self._weights for vector in self._vectors(begin, k)], k)

    def _vectors(self, begin: Any, k: Any) -> list[Any]:
        """The weights of input k in the panel that begins there, as float32."""
        build = self._in
        place = build.add(begin, build.mul(k, I64(ENTRY_BYTES[self._kind])))
        if self._kind == Precision.F32:
            return [self._load(build.add(place, I64(4 * LANES * vector)), VECTOR) for vector in range(EACH)]
        parts = (self._load(build.add(place, I64(2 * LANES * vector)), NARROW) for vector in range(EACH))
        return [build.fpext(part, VECTOR) for part in parts]
