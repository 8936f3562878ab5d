"""The sizes of blocks and tiles: facts of the processor that both the compiled loops and their caller use."""

from __future__ import annotations

from tree_kernels.processor import lanes

CHUNK = 48
"""Rows that go through all parts of a block before the next rows do."""
PART_BYTES = 32768
"""Of a panel's weights in one part."""
MOST = 6
"""Rows of a tile."""
PANELS = (0, 4, 2, 2, 1, 1, 1) if lanes() == 8 else (0, 4, 4, 4, 2, 2, 2)
"""Panels of a tile by its rows: enough sums to hide the latency of an addition, few enough for the registers."""
WIDEST = 4
"""The most panels of a block."""


def symbol(kind: str, rows: int, panels: int) -> str:
    """The name of a tile's function. kind: bf16, f16 or f32"""
    return f"dendro_tile_{kind}_{rows}_{panels}"
