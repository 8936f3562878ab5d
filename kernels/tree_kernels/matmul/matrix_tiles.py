"""Register tiles of products by the processor's matrix tiles (AMX), in LLVM's intermediate representation.

A matrix tile has up to 16 rows of 64 bytes, and a processor has eight. One instruction multiplies a tile of rows with
one of packed weights, 32 inputs of 16 outputs, and adds the products to a tile of sums. Imported only while kernels are
compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from tree_kernels.matmul.shapes import MATRIX_INPUTS, MATRIX_PANELS, matrix_symbol
from tree_kernels.matmul.tiles import I8, I64, LINE, PANEL, Tile

TILES = 8
PALETTE = 1
"""The number of the configuration that has TILES tiles, of any rows and any bytes of a row up to 16 and 64."""
BYTES_AT, ROWS_AT, CONFIGURATION = 16, 48, 64
"""Where a configuration has a tile's bytes of a row, in two bytes, and its rows, in one byte; and its own length."""
COLUMNS = 16
"""Rows, and outputs, of a matrix tile."""
EACH = PANEL // COLUMNS
"""Matrix tiles of a panel's weights of MATRIX_INPUTS inputs."""
PAIR_BYTES = 4 * PANEL
"""Bytes of two inputs in a packed panel of bfloat16."""
GROUP_BYTES = PAIR_BYTES * MATRIX_INPUTS // 2
"""Bytes of MATRIX_INPUTS inputs in a packed panel of bfloat16."""
EARLY = 3072
"""Bytes by which the weights that a caller wants to be loaded ahead are loaded earlier still: a pass takes GROUP_BYTES
of each panel."""


def matrix_tiles(module: ir.Module) -> None:
    """Write the tiles of bfloat16 weights into the module."""
    for rows, most in enumerate(MATRIX_PANELS):
        for panels in sorted({1, most}) if rows else ():
            MatrixTile(module, matrix_symbol(rows, panels), rows, panels).write()


class MatrixSums:
    """Writes the instructions for the sums of a few rows and panels in matrix tiles.

    Each sum adds its inputs in groups of 32: the products of the group's even inputs one after the other, from zero;
    those of its odd inputs likewise; then the sum of the two to the sum of the groups before. So its bits depend
    neither on the number of rows and panels, nor on where a caller splits the inputs between groups.
    """

    def __init__(self, module: ir.Module, build: ir.IRBuilder, name: str, rows: int, panels: int) -> None:
        """name: of the configuration of the tiles in the module"""
        self._module, self._in, self._name = module, build, name
        self._parts = [min(COLUMNS, rows - first) for first in range(0, rows, COLUMNS)]
        """Rows of each matrix tile of rows."""
        across = panels * EACH
        self._sums = [range(part * across, (part + 1) * across) for part in range(len(self._parts))]
        """Numbers of the tiles with sums, for each part of the rows: one for each tile of weights."""
        used = len(self._parts) * across
        self._rows = range(used, used + len(self._parts))
        self._weights = range(self._rows.stop, TILES)

    def begin(self, fresh: Any, sums: Any, step: Any) -> None:
        """Configure the tiles, and let the sums begin at zero, or where this is 0 at those in memory."""
        self._configure()
        with self._in.if_else(self._in.icmp_signed("!=", fresh, I64(0))) as (zero, held):
            with zero:
                for its in self._sums:
                    for tile in its:
                        self._call("tilezero", [I8(tile)])
            with held:
                for tile, place in self._places(sums, step):
                    self._call("tileloadd64", [I8(tile), place, step])

    def add(self, x: Any, step: Any, panels: Sequence[Any]) -> None:
        """Add the products of MATRIX_INPUTS inputs. x: address of the rows, PAIRS, from these inputs on, `step` bytes
        apart   panels: addresses of the panels' packed weights of these inputs"""
        build = self._in
        for part, tile in enumerate(self._rows):
            first = build.add(x, build.mul(step, I64(part * COLUMNS)))
            self._call("tileloadd64", [I8(tile), self._pointer(first), step])
        for number in range(len(panels) * EACH):
            tile = self._weights[number % len(self._weights)]
            place = build.add(panels[number // EACH], I64(4 * COLUMNS * (number % EACH)))
            self._call("tileloadd64", [I8(tile), self._pointer(place), I64(PAIR_BYTES)])
            for its, rows in zip(self._sums, self._rows, strict=True):
                self._call("tdpbf16ps", [I8(its[number]), I8(rows), I8(tile)])

    def end(self, sums: Any, step: Any) -> None:
        """Write the sums to memory, and give the tiles back."""
        for tile, place in self._places(sums, step):
            self._call("tilestored64", [I8(tile), place, step])
        self._call("tilerelease", [])

    def _places(self, sums: Any, step: Any) -> list[tuple[int, Any]]:
        """The tiles with sums, each with the address of its sums in memory."""
        build = self._in
        firsts = [build.add(sums, build.mul(step, I64(part * COLUMNS))) for part in range(len(self._sums))]
        return [
            (tile, self._pointer(build.add(first, I64(4 * COLUMNS * at))))
            for first, its in zip(firsts, self._sums, strict=True)
            for at, tile in enumerate(its)
        ]

    def _configure(self) -> None:
        """Set the tiles' sizes. A tile of weights has a row for each pair of inputs."""
        rows = [count for count, its in zip(self._parts, self._sums, strict=True) for _ in its]
        rows += [*self._parts, *(MATRIX_INPUTS // 2 for _ in self._weights)]
        lines = bytearray(CONFIGURATION)
        lines[0] = PALETTE
        for tile, count in enumerate(rows):
            lines[BYTES_AT + 2 * tile], lines[ROWS_AT + tile] = LINE, count
        kind = ir.ArrayType(I8, CONFIGURATION)
        place = ir.GlobalVariable(self._module, kind, f"{self._name}_configuration")
        place.initializer, place.global_constant, place.linkage, place.align = kind(lines), True, "internal", LINE
        self._call("ldtilecfg", [self._in.bitcast(place, I8.as_pointer())])

    def _pointer(self, place: Any) -> Any:
        return self._in.inttoptr(place, I8.as_pointer())

    def _call(self, name: str, arguments: Sequence[Any]) -> None:
        full = f"llvm.x86.{name}"
        kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
        self._in.call(self._module.globals.get(full) or ir.Function(self._module, kind, full), arguments)


class MatrixTile(Tile):
    """A tile of bfloat16 weights by matrix tiles. x is PAIRS; the inputs are a multiple of MATRIX_INPUTS."""

    def write(self) -> None:
        x, x_step, weights, panel_step, sums, sums_step, inputs, begin, ahead, self._ahead_step = self._function.args
        build = self._in
        self._ahead = [build.add(self._moved(ahead, panel_step, number), I64(EARLY)) for number in range(self._panels)]
        self._weights = [self._moved(weights, panel_step, number) for number in range(self._panels)]
        matrix = MatrixSums(self._module, build, self._function.name, self._rows, self._panels)
        matrix.begin(begin, sums, sums_step)

        def of_group(_: list[Any], number: Any) -> list[Any]:
            k = build.mul(number, I64(MATRIX_INPUTS))
            with build.if_then(build.icmp_signed("==", self._ahead_step, I64(PAIR_BYTES // 2))):
                self._prefetched(k, GROUP_BYTES)  # several tiles of a part load the next one fast enough
            at = build.mul(number, I64(GROUP_BYTES))
            matrix.add(build.add(x, build.mul(k, I64(2))), x_step, [build.add(each, at) for each in self._weights])
            return []

        self._counted([], build.udiv(inputs, I64(MATRIX_INPUTS)), of_group)
        matrix.end(sums, sums_step)
        build.ret_void()
