"""Register tiles of products with quantised weights, in LLVM's intermediate representation.

A tile unpacks each weight to the number that it has in the unpacked checkpoint and multiplies it as the tile of that
dtype does: the same sums, bit for bit. Imported only while kernels are compiled.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tree_kernels.matmul.quantised_shapes import (
    FORMS,
    MANTISSA,
    BlockForm,
    FieldPlace,
    QuantisedForm,
    has_conversion,
    tile_panels,
    tile_symbol,
)
from tree_kernels.matmul.tiles import EACH, I64, LANES, NARROW, PAIRS, PANEL, VECTOR, WORDS, Tile

UPPER = 0xFFFF0000


def quantised_tiles(form: QuantisedForm) -> ir.Module:
    """A module with all tiles of this form."""
    module = ir.Module("tiles")
    for rows, panels in enumerate(tile_panels()):
        for count in sorted({1, panels} if rows else ()):
            QuantisedTile(module, form, rows, count).write()
    return module


class QuantisedTile(Tile):
    """Writes one tile's function. Its inputs are a multiple of the form's block."""

    def __init__(self, module: ir.Module, form: QuantisedForm, rows: int, panels: int) -> None:
        self._form: BlockForm = FORMS[form]
        super().__init__(module, tile_symbol(form, rows, panels), rows, panels)

    def _after(self, totals: list[Any], inputs: Any) -> list[Any]:
        form = self._form
        return self._counted(totals, self._in.udiv(inputs, I64(form.block)), self._of_block)

    def _of_block(self, totals: list[Any], block: Any) -> list[Any]:
        """The totals after a block of inputs, whose weights have common scales."""
        build, form = self._in, self._form
        places = [build.add(begin, build.mul(block, I64(form.block_bytes(PANEL)))) for begin in self._weights]
        factors = [self._factors(place) for place in places]
        first = build.mul(block, I64(form.block))

        def of_word(totals: list[Any], word: Any) -> list[Any]:
            k = build.add(first, build.mul(word, I64(form.fields)))
            self._prefetched(k, form.fields * form.entry_bytes(PANEL))
            at = build.add(build.mul(word, I64(4 * PANEL)), I64(form.factor_bytes(PANEL)))
            words = [
                [
                    self._shifted(self._load(build.add(build.add(begin, at), I64(4 * LANES * vector)), WORDS))
                    for vector in range(EACH)
                ]
                for begin in places
            ]
            for number, place in enumerate(form.places):
                weights = []
                for own, factor in zip(words, factors, strict=True):
                    weights += self._rounded(
                        [self._unpacked(each, place, *pair) for each, pair in zip(own, factor, strict=True)]
                    )
                totals = self._added(totals, weights, build.add(k, I64(number)))
            return totals

        return self._counted(totals, I64(form.block // form.fields), of_word)

    def _factors(self, place: Any) -> list[tuple[Any, dict[int, Any]]]:
        """For each vector of a panel: what a field is multiplied by, and what is added, by the field's position."""
        build, form = self._in, self._form
        size = 4 if form.wide else 2
        found = []
        for vector in range(EACH):
            scale = self._factor(build.add(place, I64(size * vector * LANES)))
            offset = self._factor(build.add(place, I64(size * (PANEL + vector * LANES)))) if form.offset else None
            offsets = {}
            if form.wide:
                offsets = {each.position: offset for each in form.places}
            elif offset is not None:
                for each in form.places:
                    offsets[each.position] = self._fma(scale, VECTOR([-float(each.base)] * LANES), offset)
            else:
                for each in form.places:
                    less = -float(each.base + form.zero)
                    offsets[each.position] = build.fmul(scale, VECTOR([less] * LANES))
            found.append((scale, offsets))
        return found

    def _factor(self, place: Any) -> Any:
        if self._form.wide:
            return self._load(place, VECTOR)
        return self._in.fpext(self._load(place, NARROW), VECTOR)

    def _shifted(self, words: Any) -> dict[int, Any]:
        """The words by how they are shifted."""
        return {
            shift: (self._in.shl if shift > 0 else self._in.lshr)(words, WORDS([abs(shift)] * LANES))
            if shift
            else words
            for shift in {each.shift for each in self._form.places}
        }

    def _unpacked(self, words: dict[int, Any], place: FieldPlace, scale: Any, offsets: dict[int, Any]) -> Any:
        """The weights of the field there. It becomes the last bits of a number with a known exponent."""
        build, form = self._in, self._form
        field = build.and_(words[place.shift], WORDS([((1 << form.bits) - 1) << place.position] * LANES))
        exponent = (place.base.bit_length() - 1 + 127) << MANTISSA
        number = build.bitcast(build.or_(field, WORDS([exponent] * LANES)), VECTOR)
        offset = offsets[place.position]
        if form.wide:
            number = build.fsub(number, VECTOR([float(place.base + form.zero)] * LANES))
        return build.fmul(number, scale) if offset is None else self._fma(number, scale, offset)

    def _rounded(self, values: list[Any]) -> list[Any]:
        """A panel's weights rounded to bfloat16, ties to even, as float32."""
        build = self._in
        upper = WORDS([UPPER] * LANES)
        if has_conversion():
            name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
            narrow = build.call(self._declared(name, PAIRS, [VECTOR, VECTOR]), [values[1], values[0]])
            both = build.bitcast(narrow, WORDS)
            return [
                build.bitcast(each, VECTOR) for each in (build.shl(both, WORDS([16] * LANES)), build.and_(both, upper))
            ]
        made = []
        for value in values:
            bits = build.bitcast(value, WORDS)
            odd = build.and_(build.lshr(bits, WORDS([16] * LANES)), WORDS([1] * LANES))
            up = build.add(build.add(bits, odd), WORDS([0x7FFF] * LANES))
            made.append(build.bitcast(build.and_(up, upper), VECTOR))
        return made
