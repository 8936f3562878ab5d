"""The noise that target and drafter share: public contract, version 1 (README.md in this folder)."""

from tree_kernels.noise.reference import (
    NOISE_VERSION,
    NoiseRows,
    NoiseTokens,
    gumbel_noise,
    gumbel_of_words,
    philox4x32,
    uniform_words,
)

__all__ = [
    "NOISE_VERSION",
    "NoiseRows",
    "NoiseTokens",
    "gumbel_noise",
    "gumbel_of_words",
    "philox4x32",
    "uniform_words",
]
