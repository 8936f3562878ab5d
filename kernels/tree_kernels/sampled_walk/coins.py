"""The verifier's coins: functions of seed, length of the text and row, independent of the drafter's draws."""

from __future__ import annotations

import numpy as np

from tree_kernels.noise import gumbel_noise, uniform_words
from tree_kernels.sampled_walk.draws import Floats

ACCEPT_STREAM = 2
DRAW_STREAM = 3

_FIRST = np.zeros(1, np.int64)


class NoiseCoins:
    """Implements `Coins` by the noise of one round, of all tokens of its rows."""

    def __init__(self, seed: int, base: int, sample_index: int = 0) -> None:
        """base: length of the text that the round starts from: rounds from other lengths have other coins"""
        self._seed = seed
        self._base = base
        self._sample = sample_index

    def accept(self, row: int, chance: float) -> bool:
        word = uniform_words(self._seed, self._base, _FIRST, self._sample, ACCEPT_STREAM, row)
        # Strictly less: a chance of 0 never accepts (docs/design/verification.md#multi-step-sampling).
        return (float(word[0]) + 0.5) * 2.0**-32 < chance

    def draw(self, row: int, weights: Floats) -> int:
        noise = gumbel_noise(self._seed, [self._base], len(weights), self._sample, DRAW_STREAM, row)
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(weights) + noise[0].numpy()))
