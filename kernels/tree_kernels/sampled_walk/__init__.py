"""Verification of trees whose guesses were drawn from the drafter's own law (README.md in this folder)."""

from tree_kernels.sampled_walk.coins import NoiseCoins
from tree_kernels.sampled_walk.cpu import block, multi_step
from tree_kernels.sampled_walk.draws import LEAST_PROBABILITY, Floats, SparseLaw, drawn_order, law_of_scores
from tree_kernels.sampled_walk.reference import Coins, lenient_greedy

__all__ = [
    "LEAST_PROBABILITY",
    "Coins",
    "Floats",
    "NoiseCoins",
    "SparseLaw",
    "block",
    "drawn_order",
    "law_of_scores",
    "lenient_greedy",
    "multi_step",
]
