"""Register tiles of products with quantised weights, in LLVM's intermediate representation.

A tile unpacks each weight to the number that it has in the unpacked checkpoint and multiplies it as the tile of that
dtype does: the same sums, bit for bit. Imported only while kernels are compiled.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tree_kernels.matmul.matrix_tiles import GROUP_BYTES, PAIR_BYTES, MatrixSums
from tree_kernels.matmul.quantised_shapes import (
    DOT_PANELS,
    FORMS,
    MANTISSA,
    BlockForm,
    FieldPlace,
    QuantisedForm,
    dot_symbol,
    quantised_matrix_symbol,
    tile_panels,
    tile_symbol,
    unpack_symbol,
)
from tree_kernels.matmul.shapes import MATRIX_INPUTS, MATRIX_PANELS
from tree_kernels.matmul.tiles import EACH, I8, I64, LANES, LINE, NARROW, PAIRS, PANEL, VECTOR, WORDS, Tile
from tree_kernels.processor import has_dots, writes_matrix_tiles

UPPER = 0xFFFF0000


def quantised_tiles(form: QuantisedForm) -> ir.Module:
    """A module with all tiles of this form."""
    module = ir.Module("tiles")
    for rows, panels in enumerate(tile_panels()):
        for count in sorted({1, panels} if rows else ()):
            tile = PairsTile if has_dots() else SinglesTile
            tile(module, tile_symbol(form, rows, count), form, rows, count).write()
    for rows, panels in enumerate(DOT_PANELS if has_dots() else ()):
        for count in sorted({1, panels} if rows else ()):
            DotsTile(module, dot_symbol(form, rows, count), form, rows, count).write()
    for rows, panels in enumerate(MATRIX_PANELS if writes_matrix_tiles() else ()):
        for count in sorted({1, panels} if rows else ()):
            QuantisedMatrixTile(module, quantised_matrix_symbol(form, rows, count), form, rows, count).write()
    if writes_matrix_tiles():
        Unpacking(module, unpack_symbol(form), form, 1, 1).write()
    return module


class QuantisedTile(Tile):
    """Writes one tile's function. Its inputs are a multiple of the form's block."""

    def __init__(self, module: ir.Module, name: str, form: QuantisedForm, rows: int, panels: int) -> None:
        self._form: BlockForm = FORMS[form]
        super().__init__(module, name, rows, panels)

    def _after(self, totals: list[Any], inputs: Any) -> list[Any]:
        form = self._form
        return self._counted(totals, self._in.udiv(inputs, I64(form.block)), self._of_block)

    def _of_block(self, totals: list[Any], block: Any) -> list[Any]:
        """The totals after a block of inputs, whose weights have common scales."""
        raise NotImplementedError

    def _blocks(self, block: Any) -> list[Any]:
        """Address of the block in each panel."""
        build = self._in
        return [build.add(begin, build.mul(block, I64(self._form.block_bytes(PANEL)))) for begin in self._weights]

    def _factors(self, place: Any, vector: int) -> tuple[Any, Any]:
        """Scales of a vector of a panel, and offsets; None without these."""
        build, size = self._in, 4 if self._form.wide else 2
        scale = self._factor(build.add(place, I64(size * vector * LANES)))
        if not self._form.offset:
            return scale, None
        return scale, self._factor(build.add(place, I64(size * (PANEL + vector * LANES))))

    def _factor(self, place: Any) -> Any:
        if self._form.wide:
            return self._load(place, VECTOR)
        return self._in.fpext(self._load(place, NARROW), VECTOR)

    def _added_to_fields(self, scale: Any, offset: Any) -> dict[int, Any]:
        """What is added to a scale times a field, by the field's position."""
        form = self._form
        if form.wide:
            return {each.position: offset for each in form.places}
        if offset is None:
            return {
                each.position: self._in.fmul(scale, VECTOR([-float(each.base + form.zero)] * LANES))
                for each in form.places
            }
        return {each.position: self._fma(scale, VECTOR([-float(each.base)] * LANES), offset) for each in form.places}

    def _shifted(self, words: Any) -> dict[int, Any]:
        """The words, shifted in each way that a place of the form needs, by that shift."""
        return {
            shift: (self._in.shl if shift > 0 else self._in.lshr)(words, WORDS([abs(shift)] * LANES))
            if shift
            else words
            for shift in {each.shift for each in self._form.places}
        }

    def _unpacked(self, words: dict[int, Any], place: FieldPlace, scale: Any, added: dict[int, Any]) -> Any:
        """The weights of the field there. It becomes the last bits of a number with a known exponent."""
        build, form = self._in, self._form
        field = build.and_(words[place.shift], WORDS([((1 << form.bits) - 1) << place.position] * LANES))
        exponent = (place.base.bit_length() - 1 + 127) << MANTISSA
        number = build.bitcast(build.or_(field, WORDS([exponent] * LANES)), VECTOR)
        offset = added[place.position]
        if form.wide:
            number = build.fsub(number, VECTOR([float(place.base + form.zero)] * LANES))
        return build.fmul(number, scale) if offset is None else self._fma(number, scale, offset)


class SinglesTile(QuantisedTile):
    """A word has neighbouring inputs of an output."""

    def _of_block(self, totals: list[Any], block: Any) -> list[Any]:
        build, form = self._in, self._form
        places = self._blocks(block)
        factors = [
            (scale, self._added_to_fields(scale, offset))
            for place in places
            for scale, offset in (self._factors(place, vector) for vector in range(EACH))
        ]
        first = build.mul(block, I64(form.block))

        def of_word(totals: list[Any], word: Any) -> list[Any]:
            k = build.add(first, build.mul(word, I64(form.fields)))
            self._prefetched(k, form.fields * form.entry_bytes(PANEL))
            at = build.add(build.mul(word, I64(4 * PANEL)), I64(form.factor_bytes(PANEL)))
            words = [
                self._shifted(self._load(build.add(build.add(begin, at), I64(4 * LANES * vector)), WORDS))
                for begin in places
                for vector in range(EACH)
            ]
            for number, place in enumerate(form.places):
                weights = [
                    self._rounded(self._unpacked(each, place, *its)) for each, its in zip(words, factors, strict=True)
                ]
                totals = self._added(totals, weights, build.add(k, I64(number)))
            return totals

        return self._counted(totals, I64(form.block // form.fields), of_word)

    def _rounded(self, value: Any) -> Any:
        """Weights rounded to bfloat16, ties to even, as float32."""
        build = self._in
        bits = build.bitcast(value, WORDS)
        odd = build.and_(build.lshr(bits, WORDS([16] * LANES)), WORDS([1] * LANES))
        up = build.add(build.add(bits, odd), WORDS([0x7FFF] * LANES))
        return build.bitcast(build.and_(up, WORDS([UPPER] * LANES)), VECTOR)


FIRST, SECOND = ([pair * 4 + at // 2 + side for pair in range(LANES // 4) for at in range(4)] for side in (0, 2))
"""Places of outputs in a vector of factors: FIRST has the first half of the outputs, each twice; SECOND the second
half."""


class PairsTile(QuantisedTile):
    """A word has every second input of an output, and the word beside it those between.

    A vector of words so has half as many outputs as lanes. One instruction rounds two vectors of weights to bfloat16
    and puts them one after the other: a word of the result has two neighbouring inputs of an output, as a word of a
    packed bfloat16 weight has.
    """

    def _of_block(self, totals: list[Any], block: Any) -> list[Any]:
        """Panel after panel: all factors of several would not fit into the registers."""
        found, width = list(totals), self._panels * EACH
        for panel, place in enumerate(self._blocks(block)):
            at = [row * width + panel * EACH + vector for row in range(self._rows) for vector in range(EACH)]
            for each, total in zip(at, self._of_panel([found[each] for each in at], block, place, panel), strict=True):
                found[each] = total
        return found

    def _of_panel(self, totals: list[Any], block: Any, place: Any, panel: int) -> list[Any]:
        """The totals of a panel, whose block is at this place, after the block."""
        build, form = self._in, self._form
        first = build.mul(block, I64(form.block))
        factors = [self._doubled(*self._factors(place, vector)) for vector in range(EACH)]

        def of_words(totals: list[Any], number: Any) -> list[Any]:
            k = build.add(first, build.mul(number, I64(2 * form.fields)))
            if not panel:
                self._prefetched(k, 2 * form.fields * form.entry_bytes(PANEL))
            at = build.add(place, build.add(build.mul(number, I64(8 * PANEL)), I64(form.factor_bytes(PANEL))))
            words = [
                self._shifted(self._load(build.add(at, I64(4 * LANES * vector)), WORDS)) for vector in range(2 * EACH)
            ]
            for field, its_place in enumerate(form.places):
                weights = [
                    self._narrowed(
                        [
                            self._unpacked(words[2 * vector + half], its_place, *factors[vector][half])
                            for half in range(2)
                        ]
                    )
                    for vector in range(EACH)
                ]
                totals = self._after_pair(totals, weights, build.add(k, I64(2 * field)))
            return totals

        return self._counted(totals, I64(form.block // (2 * form.fields)), of_words)

    def _doubled(self, scale: Any, offset: Any) -> list[tuple[Any, dict[int, Any]]]:
        """Factors of both vectors of words."""
        found = []
        for mask in (FIRST, SECOND):
            its = [
                None if each is None else self._in.shuffle_vector(each, VECTOR(ir.Undefined), WORDS(mask))
                for each in (scale, offset)
            ]
            found.append((its[0], self._added_to_fields(*its)))
        return found

    def _narrowed(self, values: list[Any]) -> Any:
        """Words of two vectors of weights, rounded to bfloat16, ties to even."""
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        narrow = self._in.call(self._declared(name, PAIRS, [VECTOR, VECTOR]), [values[1], values[0]])
        return self._in.bitcast(narrow, WORDS)

    def _after_pair(self, totals: list[Any], words: list[Any], k: Any) -> list[Any]:
        return self._added_pair(totals, words, k)


class DotsTile(PairsTile):
    """A tile of quantised weights that adds by dot products of pairs."""

    def _after_pair(self, totals: list[Any], words: list[Any], k: Any) -> list[Any]:
        return self._dotted(totals, words, k)


class QuantisedMatrixTile(PairsTile):
    """A tile of quantised weights by matrix tiles. The inputs are a multiple of MATRIX_INPUTS.

    A group's weights are unpacked to memory, as a packed bfloat16 weight has them, while the group before is
    multiplied: what was written a moment ago cannot be loaded into a tile yet.
    """

    def write(self) -> None:
        x, x_step, weights, panel_step, sums, sums_step, inputs, begin, ahead, self._ahead_step = self._function.args
        build = self._in
        room = build.alloca(ir.ArrayType(I8, 2 * self._panels * GROUP_BYTES))
        room.align = LINE
        buffers = build.ptrtoint(room, I64)
        self._ahead = [self._moved(ahead, panel_step, number) for number in range(self._panels)]
        self._weights = [self._moved(weights, panel_step, number) for number in range(self._panels)]
        matrix = MatrixSums(self._module, build, self._function.name, self._rows, self._panels)
        matrix.begin(begin, sums, sums_step)
        groups = build.udiv(inputs, I64(MATRIX_INPUTS))

        def places(group: Any) -> list[Any]:
            """Addresses of the unpacked panels of a group."""
            first = build.mul(build.and_(group, I64(1)), I64(self._panels * GROUP_BYTES))
            return [build.add(buffers, build.add(first, I64(panel * GROUP_BYTES))) for panel in range(self._panels)]

        def step(_: list[Any], group: Any) -> list[Any]:
            with build.if_then(build.icmp_signed("<", group, groups)):
                self._unpack(group, places(group))
            with build.if_then(build.icmp_signed(">", group, I64(0))):
                before = build.sub(group, I64(1))
                k = build.mul(before, I64(MATRIX_INPUTS))
                matrix.add(build.add(x, build.mul(k, I64(2))), x_step, places(before))
            return []

        self._counted([], build.add(groups, I64(1)), step)
        matrix.end(sums, sums_step)
        build.ret_void()

    def _unpack(self, group: Any, places: list[Any]) -> None:
        build, blocks = self._in, MATRIX_INPUTS // self._form.block
        first_k = build.mul(group, I64(MATRIX_INPUTS))
        for number in range(blocks):
            block = build.add(build.mul(group, I64(blocks)), I64(number))
            for panel, place in enumerate(self._blocks(block)):
                self._first = build.sub(places[panel], build.mul(first_k, I64(PAIR_BYTES // 2)))
                self._of_panel([], block, place, panel)

    def _after_pair(self, totals: list[Any], words: list[Any], k: Any) -> list[Any]:
        build = self._in
        place = build.add(self._first, build.mul(k, I64(PAIR_BYTES // 2)))
        for vector, its in enumerate(words):
            at = build.add(place, I64(4 * LANES * vector))
            build.store(its, build.inttoptr(at, WORDS.as_pointer()), align=LINE)
        return totals


class Unpacking(QuantisedMatrixTile):
    """Unpacks inputs of a panel to memory, which has them then as a packed bfloat16 weight. It is called as a tile is:
    the memory is in place of the sums, and there are no rows."""

    def write(self) -> None:
        _, _, weights, _, unpacked, _, inputs, _, ahead, self._ahead_step = self._function.args
        self._ahead, self._weights = [ahead], [weights]

        def step(_: list[Any], group: Any) -> list[Any]:
            self._unpack(group, [self._in.add(unpacked, self._in.mul(group, I64(GROUP_BYTES)))])
            return []

        self._counted([], self._in.udiv(inputs, I64(MATRIX_INPUTS)), step)
        self._in.ret_void()
