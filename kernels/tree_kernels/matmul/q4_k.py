"""Tiles of weights in the form Q4_K. Imported only while they are compiled."""

from __future__ import annotations

from tree_kernels.matmul.quantised_shapes import QuantisedForm
from tree_kernels.matmul.quantised_tiles import quantised_tiles

TILES = quantised_tiles(QuantisedForm.Q4_K)
KERNELS: dict[str, object] = {}
