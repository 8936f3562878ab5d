"""Tiles of float32 weights. Imported only while they are compiled."""

from __future__ import annotations

from tree_kernels.matmul.shapes import Precision
from tree_kernels.matmul.tiles import tiles

TILES = tiles(Precision.F32)
KERNELS: dict[str, object] = {}
