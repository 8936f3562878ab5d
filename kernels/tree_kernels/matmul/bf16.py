"""Tiles of bfloat16 weights. Imported only while they are compiled."""

from __future__ import annotations

from tree_kernels.matmul.tiles import pair_tiles

TILES = pair_tiles()
KERNELS: dict[str, object] = {}
