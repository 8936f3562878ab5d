"""The noise that target and drafter share: public contract, version 1 (README.md in this folder)."""

from tree_kernels.noise.cpu import prepare_kernel
from tree_kernels.noise.reference import NOISE_VERSION, gumbel_of_words, philox4x32, uniform_words
from tree_kernels.noise.rows import NoiseRows, NoiseTokens, gumbel_noise

__all__ = [
    "NOISE_VERSION",
    "NoiseRows",
    "NoiseTokens",
    "gumbel_noise",
    "gumbel_of_words",
    "philox4x32",
    "prepare_kernel",
    "uniform_words",
]
