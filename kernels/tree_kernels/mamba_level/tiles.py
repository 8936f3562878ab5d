"""Register tiles of Mamba-2's recurrence, in LLVM's intermediate representation. Imported only while they are compiled.

A tile takes a text's state through a few tokens. It keeps a vector of channels of each token's decay, drive and result
in registers while it goes through the state's rows, so each row is read and written once for all tokens.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tree_kernels.mamba_level.shapes import SCAN_TOKENS, scan_symbol
from tree_kernels.matmul.tiles import I64, LANES, VECTOR, Tile


@intrinsic
def call_scan(
    typingctx: Any,
    function: Any,
    state: Any,
    line: Any,
    size: Any,
    decay: Any,
    step: Any,
    B: Any,
    apart: Any,
    shared_step: Any,
    y: Any,
    y_step: Any,
    vectors: Any,
) -> Any:
    """Call the tile at the address `function`: S = decay S + drive B^T and y = S C, token after token.

    state  address of [size, channels] float32, `line` bytes between rows; advanced in place
    decay  address of the tokens' decays [tokens, channels], `step` bytes between tokens; their drives lie
        SCAN_TOKENS * step bytes after them
    B  address of the first token's B [size], whose C [size] lies `apart` bytes after it; shared_step bytes between
        tokens
    y  address of [tokens, channels], y_step bytes between tokens; written
    vectors  the number of vectors of channels
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * 11)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12), generate


class ScanTile(Tile):
    """Writes the function for a number of tokens."""

    def __init__(self, module: ir.Module, tokens: int) -> None:
        super().__init__(module, scan_symbol(tokens), tokens, 0, arguments=11)

    def write(self) -> None:
        state, line, size, decay, step, first_B, apart, shared_step, y, y_step, vectors = self._function.args
        build, tokens = self._in, range(self._rows)
        drive = self._moved(decay, step, SCAN_TOKENS)
        B = [self._moved(first_B, shared_step, token) for token in tokens]
        C = [build.add(begin, apart) for begin in B]

        def of_vector(_: list[Any], vector: Any) -> list[Any]:
            at = build.mul(vector, I64(4 * LANES))
            left, driven = (
                [self._load(build.add(self._moved(begin, step, token), at), VECTOR) for token in tokens]
                for begin in (decay, drive)
            )
            first = build.add(state, at)

            def of_row(totals: list[Any], row: Any) -> list[Any]:
                place, number = build.add(first, build.mul(row, line)), build.mul(row, I64(4))
                held, made = self._load(place, VECTOR), []
                for token in tokens:
                    added = build.fmul(driven[token], self._broadcast(build.add(B[token], number)))
                    held = self._fma(held, left[token], added)
                    made.append(self._fma(held, self._broadcast(build.add(C[token], number)), totals[token]))
                build.store(held, build.inttoptr(place, VECTOR.as_pointer()), align=4)
                return made

            totals = self._counted([VECTOR([0.0] * LANES) for _ in tokens], size, of_row)
            for token, total in enumerate(totals):
                place = build.add(self._moved(y, y_step, token), at)
                build.store(total, build.inttoptr(place, VECTOR.as_pointer()), align=4)
            return []

        self._counted([], vectors, of_vector)
        build.ret_void()


def scan_tiles() -> ir.Module:
    """A module with the tiles of all numbers of tokens."""
    module = ir.Module("tiles")
    for tokens in range(1, SCAN_TOKENS + 1):
        ScanTile(module, tokens).write()
    return module


TILES = scan_tiles()
KERNELS: dict[str, object] = {}
