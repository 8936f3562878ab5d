"""The inner loops of attention, as functions in LLVM's intermediate representation.

A tile keeps sums of a few lines and a few keys, or of a few lines and a few numbers of their results, in vector
registers. numba does not keep a small array of sums in registers, so the tiles are written without it; kernels call
them by `call_tile`. Imported only while kernels are compiled.

A score is LANES partial sums over the dimension, in order, which are then added pairwise in one fixed way. A result
adds its values in the order of their keys. So the bits depend neither on the lines nor on the keys of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from tree_kernels.processor import lanes
from tree_kernels.tree_attention.shapes import LANES, TILE_LINES, WEIGHTS_SYMBOL, scores_symbol, sums_symbol

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, WORDS, FOUR = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(F32, 4)
BYTES = 4 * LANES
TOGETHER = {1: 8, 2: 4, 3: 4}
"""Number of keys of a tile of scores, by its number of lines: enough sums to hide the latency of an addition."""
VECTORS = {1: 8, 2: 4, 3: 4}
"""Number of vectors of results of a tile of weighted values, by its number of lines. Each number of a vector is a sum
of its own, so the vectors may be as wide as the processor's."""
ROUNDER = 12582912.0
"""1.5 * 2**23: adding it rounds to a whole number, which is then in the low bits."""
LOWEST = -126.0
"""2**x is a normal number from here on; below, this exp2 is 0."""
EXP2 = (
    1.0,
    0.6931472067028329,
    0.24022650922289554,
    0.05550327226669895,
    0.00961805667843204,
    0.0013400428177711937,
    0.00015461444724808513,
)
"""2**x for |x| <= 1/2 as a polynomial, the constant first. Chebyshev interpolation; relative error below 1e-8."""


class _Function:
    """A function of eight int64 arguments, and what its loops are built with."""

    def __init__(self, module: ir.Module, name: str) -> None:
        self._module = module
        self._function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 8), name)
        self.args = self._function.args
        self.build = ir.IRBuilder(self._function.append_basic_block())

    def loop(
        self, first: Any, last: Any, step: int, carried: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]]
    ) -> list[Any]:
        """The carried values after the body was run with first, first + step, ... below last."""
        build = self.build
        before = build.block
        head, inside, done = (self._function.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        k = build.phi(I64)
        k.add_incoming(first, before)
        held = [build.phi(value.type) for value in carried]
        for phi, value in zip(held, carried, strict=True):
            phi.add_incoming(value, before)
        build.cbranch(build.icmp_signed("<", k, last), inside, done)
        build.position_at_end(inside)
        found = body(k, [*held])
        for phi, value in zip(held, found, strict=True):
            phi.add_incoming(value, build.block)
        k.add_incoming(build.add(k, I64(step)), build.block)
        build.branch(head)
        build.position_at_end(done)
        return [*held]

    def load(self, place: Any, kind: Any) -> Any:
        return self.build.load(self.build.inttoptr(place, kind.as_pointer()), align=8 if kind == I64 else 4)

    def store(self, value: Any, place: Any) -> None:
        self.build.store(value, self.build.inttoptr(place, value.type.as_pointer()), align=4)

    def at(self, place: Any, step: Any, times: Any) -> Any:
        """place + step * times"""
        return self.build.add(place, self.build.mul(step, times))

    def splat(self, number: Any, kind: Any = VECTOR) -> Any:
        """A vector of this kind that has the number everywhere."""
        one = self.build.insert_element(kind(ir.Undefined), number, I32(0))
        return self.build.shuffle_vector(one, kind(ir.Undefined), ir.VectorType(I32, kind.count)([0] * kind.count))

    def pick(self, a: Any, b: Any, places: Sequence[int]) -> Any:
        return self.build.shuffle_vector(a, b, ir.VectorType(I32, len(places))([*places]))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        name = f"llvm.fma.v{c.type.count}f32"
        found = self._module.globals.get(name)
        if found is None:
            found = ir.Function(self._module, ir.FunctionType(c.type, [c.type] * 3), name)
        return self.build.call(found, [a, b, c])

    def sum_of(self, a: Any) -> Any:
        """The sum of a vector's numbers, as `of_four` adds them."""
        build = self.build
        half = build.fadd(self.pick(a, a, (0, 1, 2, 3)), self.pick(a, a, (4, 5, 6, 7)))
        pair = build.fadd(half, self.pick(half, half, (2, 3, 2, 3)))
        return build.fadd(build.extract_element(pair, I32(0)), build.extract_element(pair, I32(1)))

    def of_four(self, a: Any, b: Any, c: Any, d: Any) -> Any:
        """The sums of four vectors' numbers: i and i + 4 first, of these sums i and i + 2, then both that remain."""
        low, high = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
        first, second = (self.build.fadd(self.pick(x, y, low), self.pick(x, y, high)) for x, y in ((a, c), (b, d)))
        pairs = self.build.fadd(
            self.pick(first, second, (0, 8, 1, 9, 4, 12, 5, 13)), self.pick(first, second, (2, 10, 3, 11, 6, 14, 7, 15))
        )
        return self.build.fadd(self.pick(pairs, pairs, (0, 1, 4, 5)), self.pick(pairs, pairs, (2, 3, 6, 7)))

    def exp2(self, x: Any) -> Any:
        """2**x of a vector of x <= 0; a NaN stays one."""
        build = self.build
        low = build.fcmp_ordered("<", x, VECTOR([LOWEST] * LANES))
        inside = build.select(low, VECTOR([LOWEST] * LANES), x)
        shifted = build.fadd(inside, VECTOR([ROUNDER] * LANES))
        rest = build.fsub(inside, build.fsub(shifted, VECTOR([ROUNDER] * LANES)))
        total = VECTOR([EXP2[-1]] * LANES)
        for factor in EXP2[-2::-1]:
            total = self.fma(total, rest, VECTOR([factor] * LANES))
        exponent = build.shl(build.bitcast(shifted, WORDS), WORDS([23] * LANES))
        scale = build.bitcast(build.add(exponent, WORDS([0x3F800000] * LANES)), VECTOR)
        return build.select(low, VECTOR([0.0] * LANES), build.fmul(total, scale))


def scores(module: ir.Module, lines: int) -> None:
    """A tile: products of lines with keys.

    Arguments: queries [lines, vectors * LANES] and the step between lines; the address to which the keys' offsets are
    added; offsets [count] int64; scores [lines, count], written, and their step; count, a multiple of 8; vectors
    """
    make = _Function(module, scores_symbol(lines))
    queries, query_step, keys, offsets, target, target_step, count, vectors = make.args
    build, together = make.build, TOGETHER[lines]
    own = [make.at(queries, query_step, I64(line)) for line in range(lines)]
    targets = [make.at(target, target_step, I64(line)) for line in range(lines)]
    end = build.mul(vectors, I64(BYTES))

    def some_keys(key: Any, _: list[Any]) -> list[Any]:
        here = make.at(offsets, I64(8), key)
        places = [build.add(keys, make.load(build.add(here, I64(8 * ahead)), I64)) for ahead in range(together)]

        def some_dimensions(at: Any, sums: list[Any]) -> list[Any]:
            given = [make.load(build.add(line, at), VECTOR) for line in own]
            found = []
            for number, place in enumerate(places):
                vector = make.load(build.add(place, at), VECTOR)
                held = sums[number * lines : (number + 1) * lines]
                found += [make.fma(query, vector, one) for query, one in zip(given, held, strict=True)]
            return found

        sums = make.loop(I64(0), end, BYTES, [VECTOR([0.0] * LANES)] * (together * lines), some_dimensions)
        for line in range(lines):
            for four in range(0, together, 4):
                made = make.of_four(*sums[four * lines + line : (four + 4) * lines : lines])
                make.store(made, build.add(make.at(targets[line], I64(4), key), I64(4 * four)))
        return []

    make.loop(I64(0), count, together, [], some_keys)
    build.ret_void()


def sums(module: ir.Module, lines: int) -> None:
    """A tile: adds weighted values to results.

    Arguments: weights [lines, count] and the step between lines; the address to which the values' offsets are added;
    offsets [count] int64; results [lines, vectors * LANES], changed, and their step; count; vectors
    """
    make = _Function(module, sums_symbol(lines))
    weights, weight_step, values, offsets, target, target_step, count, vectors = make.args
    build = make.build
    own = [make.at(weights, weight_step, I64(line)) for line in range(lines)]
    targets = [make.at(target, target_step, I64(line)) for line in range(lines)]

    def some_columns(width: int, kind: Any) -> Callable[[Any, list[Any]], list[Any]]:
        """A loop's body for `width` vectors of this kind."""
        size = 4 * kind.count

        def columns(vector: Any, _: list[Any]) -> list[Any]:
            at = build.mul(vector, I64(BYTES))
            begin = build.add(values, at)
            places = [build.add(build.add(line, at), I64(size * each)) for line in targets for each in range(width)]

            def one_key(key: Any, held: list[Any]) -> list[Any]:
                place = build.add(begin, make.load(make.at(offsets, I64(8), key), I64))
                given = [make.splat(make.load(make.at(line, I64(4), key), F32), kind) for line in own]
                found = [*held]
                for each in range(width):
                    value = make.load(build.add(place, I64(size * each)), kind)
                    for line, weight in enumerate(given):
                        found[line * width + each] = make.fma(weight, value, found[line * width + each])
                return found

            before = [make.load(place, kind) for place in places]
            for place, value in zip(places, make.loop(I64(0), count, 1, before, one_key), strict=True):
                make.store(value, place)
            return []

        return columns

    first = I64(0)
    for width, kind in _passes(lines):
        step = width * kind.count // LANES
        last = build.and_(vectors, I64(-step))
        make.loop(first, last, step, [], some_columns(width, kind))
        first = last
    build.ret_void()


def _passes(lines: int) -> list[tuple[int, Any]]:
    """Numbers and kinds of the vectors of results that a tile takes together, the most first."""
    widest = ir.VectorType(F32, lanes())
    found = [(VECTORS[lines], widest), (4, widest), (1, widest), (1, VECTOR)]
    return [each for number, each in enumerate(found) if each not in found[:number]]


def weights(module: ir.Module) -> None:
    """Turns scores into weights, relative to the highest score of a line so far, and scales what was summed before.

    Arguments: scores [lines, count], changed, and the step between lines; lines; count, a multiple of LANES; states
    [lines, 2], changed: the highest score and the sum of weights; results [lines, vectors * LANES], changed; their
    step; vectors
    """
    make = _Function(module, WEIGHTS_SYMBOL)
    given, given_step, lines, count, states, target, target_step, vectors = make.args
    build = make.build
    end, width = build.mul(count, I64(4)), build.mul(vectors, I64(BYTES))

    def one_line(line: Any, _: list[Any]) -> list[Any]:
        own, state = make.at(given, given_step, line), make.at(states, I64(8), line)
        results = make.at(target, target_step, line)
        before = make.splat(make.load(state, F32))

        def higher(a: Any, b: Any) -> Any:
            return build.select(build.fcmp_ordered(">", a, b), a, b)

        def highest(at: Any, held: list[Any]) -> list[Any]:
            return [higher(make.load(build.add(own, at), VECTOR), held[0])]

        (top,) = make.loop(I64(0), end, BYTES, [before], highest)
        for turned in ((4, 5, 6, 7, 0, 1, 2, 3), (2, 3, 0, 1, 6, 7, 4, 5), (1, 0, 3, 2, 5, 4, 7, 6)):
            top = higher(make.pick(top, top, turned), top)

        def weighted(at: Any, held: list[Any]) -> list[Any]:
            place = build.add(own, at)
            weight = make.exp2(build.fsub(make.load(place, VECTOR), top))
            make.store(weight, place)
            return [build.fadd(held[0], weight)]

        (total,) = make.loop(I64(0), end, BYTES, [VECTOR([0.0] * LANES)], weighted)
        factor = make.exp2(build.fsub(before, top))
        sum_place = build.add(state, I64(4))
        earlier = build.fmul(make.load(sum_place, F32), build.extract_element(factor, I32(0)))
        make.store(build.extract_element(top, I32(0)), state)
        make.store(build.fadd(earlier, make.sum_of(total)), sum_place)
        changed = build.fcmp_ordered("<", build.extract_element(before, I32(0)), build.extract_element(top, I32(0)))
        with build.if_then(changed):

            def scaled(at: Any, _: list[Any]) -> list[Any]:
                place = build.add(results, at)
                make.store(build.fmul(make.load(place, VECTOR), factor), place)
                return []

            make.loop(I64(0), width, BYTES, [], scaled)
        return []

    make.loop(I64(0), lines, 1, [], one_line)
    build.ret_void()


def tiles() -> ir.Module:
    """A module with all tiles."""
    module = ir.Module("attention")
    for lines in range(1, TILE_LINES + 1):
        scores(module, lines)
        sums(module, lines)
    weights(module)
    return module
