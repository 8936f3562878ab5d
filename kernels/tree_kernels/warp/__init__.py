"""One warp for plain decoding and for trees: what a request's parameters make of a row of logits."""

from tree_kernels.warp.reference import (
    SMALLEST_TEMPERATURE,
    Ranking,
    Warp,
    drafter_order,
    drafter_ranking,
    tokens_of,
    warp,
)

__all__ = ["SMALLEST_TEMPERATURE", "Ranking", "Warp", "drafter_order", "drafter_ranking", "tokens_of", "warp"]
