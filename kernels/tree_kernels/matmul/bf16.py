"""Tiles of bfloat16 weights. Imported only while they are compiled."""

from __future__ import annotations

from tree_kernels.matmul.matrix_tiles import matrix_tiles
from tree_kernels.matmul.tiles import pair_tiles
from tree_kernels.processor import writes_matrix_tiles

TILES = pair_tiles()
if writes_matrix_tiles():
    matrix_tiles(TILES)
KERNELS: dict[str, object] = {}
