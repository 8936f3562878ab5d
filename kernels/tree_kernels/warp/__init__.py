"""Sampling parameters applied to rows of logits, for plain decoding and for trees (README.md in this folder)."""

from tree_kernels.warp.history import History
from tree_kernels.warp.processors import Processors, processed
from tree_kernels.warp.reference import (
    LARGEST_TEMPERATURE,
    SMALLEST_TEMPERATURE,
    Ranking,
    Warp,
    drafter_order,
    drafter_ranking,
    tokens_of,
    warp,
)

__all__ = [
    "LARGEST_TEMPERATURE",
    "SMALLEST_TEMPERATURE",
    "History",
    "Processors",
    "Ranking",
    "Warp",
    "drafter_order",
    "drafter_ranking",
    "processed",
    "tokens_of",
    "warp",
]
