"""What the compiled loops and their caller agree on: sizes of blocks and tiles, and the layout of a call in memory."""

from __future__ import annotations

import struct
from enum import IntEnum

from tree_kernels.processor import lanes, panel

CHUNK = 48
"""Rows that go through all parts of a block before the next rows do."""
MATRIX_CHUNK = 96
"""CHUNK with matrix tiles, which take less time for a row."""
MATRIX_PART_BYTES = 65536
"""PART_BYTES with matrix tiles, whose sums go to memory and back between two parts."""
PART_BYTES = 32768
"""The most bytes of a panel's weights in one part."""
PART_MULTIPLE = 32
"""Number of which a part's inputs are a multiple, except in the last part: quantised weights come in blocks."""
WIDEST = 4
"""The most panels of a block."""
UNPACKED_CHUNK = 256
"""Rows of a chunk for which matrix tiles' quantised weights are unpacked once."""
SUM_NUMBERS = UNPACKED_CHUNK * WIDEST * panel()
"""float32 numbers of a thread's sums."""
SCRATCH = SUM_NUMBERS + WIDEST * MATRIX_PART_BYTES // 4
"""float32 numbers of scratch memory that a thread needs: its sums, then a part's unpacked weights."""


class Precision(IntEnum):
    """Type of floating-point numbers in memory."""

    BF16 = 0
    F16 = 1
    F32 = 2
    PAIRS = 3  # bfloat16, of each two neighbours the second first: what dot products take beside a packed weight


_FEW, _ONE = (0, 4, 4, 2, 2, 2, 2), (1,) * 8
PANELS: dict[Precision, tuple[int, ...]] = (
    dict.fromkeys(Precision, (0, 4, 2, 2, 1, 1, 1))
    if lanes() == 8
    else {**dict.fromkeys(Precision, _FEW + _ONE), Precision.BF16: (0, 4, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1)}
)
"""Panels of a tile by its rows, from 1 to the most that a tile of this kind has: enough sums to hide the latency of an
addition, few enough for the registers. PAIRS stands for tiles of dot products. BF16 needs more registers beside the
sums, for weights that it unpacks."""

MATRIX_INPUTS = 32
"""Inputs that one instruction of matrix tiles adds."""
MATRIX_PANELS = (0,) + (2,) * 16 + (1,) * 16
"""Panels of tiles with matrix tiles, by number of rows: 8 of these are to hold sums, rows and weights."""


SPINS = 2000
"""Looks at another thread's progress before this one offers its processor to others: some tens of microseconds."""


class Argument(IntEnum):
    """Places of a product's arguments in an array of int64. Arrays are given by their addresses."""

    X = 0  # [rows, inputs] float32, or PAIRS for tiles of dot products
    ROWS = 1
    INPUTS = 2
    WEIGHTS = 3  # packed weights (`packing.pack`)
    BIAS = 4  # [outputs] float32, or 0
    TARGET = 5  # [rows, outputs] of TARGET_KIND
    OUTPUTS = 6
    TARGET_KIND = 7
    SCRATCH = 8  # [threads, SCRATCH] float32
    UNITS = 9  # blocks of panels
    UNIT_PANELS = 10  # panels of a block
    ENTRY_BYTES = 11  # bytes of one input's weights in a panel
    TILES = 12  # three words per number of rows: panels of the wide tile, its address, address of the tile of one panel
    NEXT = 13  # the next unit that no thread has taken
    RESIDUAL = 14  # [rows, outputs] of TARGET_KIND, which the rounded results are added to; or 0
    TILE_ROWS = 15  # the most rows of a tile
    X_BYTES = 16  # bytes of one number of X
    CHUNK_ROWS = 17  # CHUNK, MATRIX_CHUNK or UNPACKED_CHUNK
    PART = 18  # PART_BYTES or MATRIX_PART_BYTES
    UNPACK = 19  # address of what unpacks inputs of a panel; 0: weights are not unpacked for several tiles
    UNPACKED_TILES = 20  # TILES of unpacked weights


class Helper(IntEnum):
    """Places in a helper thread's memory, an array of int64. START and DONE are semaphores, of 32 bytes each."""

    START = 0
    DONE = 8
    CALL = 16  # the address of the call's arguments
    THREAD = 17
    FUNCTION = 18  # the address of what the thread runs with CALL and THREAD
    SIZE = 24


def float_bits(number: float) -> int:
    """The bits of the nearest float32, as a call's arguments hold them."""
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    return bits


def symbol(kind: Precision, rows: int, panels: int) -> str:
    """The name of a tile's function. PAIRS: of a tile of dot products"""
    return f"dendro_tile_{kind.name}_{rows}_{panels}"


def matrix_symbol(rows: int, panels: int) -> str:
    """The name of the function of a tile with matrix tiles."""
    return f"dendro_matrix_{rows}_{panels}"
