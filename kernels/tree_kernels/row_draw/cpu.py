"""Draws a row's token by compiled kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from tree_kernels.kernel_cache import load_kernels
from tree_kernels.matmul.shapes import float_bits
from tree_kernels.noise.reference import Counters, gumbel_of_uniforms
from tree_kernels.row_draw import shapes

if TYPE_CHECKING:
    from tree_kernels.machine_code import Kernels

MODULE = "tree_kernels.row_draw.loops"


class RowDraw:
    """Draws a row's token. Used by one thread.

    The result is None where one pass does not decide: a logit is NaN or plus infinity, all logits or quotients are
    minus infinity, or more than `shapes.MOST` tokens may have the greatest score.
    """

    def __init__(self, vocabulary: int) -> None:
        """Raises NoKernelsError where the kernels cannot be compiled."""
        kernels: Kernels = load_kernels(MODULE)
        self._greatest, self._contenders = kernels.functions["greatest"], kernels.functions["contenders"]
        self._vocabulary = vocabulary
        self._lower = np.array(shapes.lower_bounds(), np.float32)
        self._bounds = np.empty(-(-vocabulary // shapes.CHUNK) * shapes.CHUNK, np.float32)
        self._ids, self._warped = np.empty(shapes.MOST, np.int64), np.empty(shapes.MOST, np.float32)
        self._uniforms = np.empty(shapes.MOST)
        self._words = np.zeros(shapes.CALL_WORDS, np.int64)
        self._words[shapes.VOCABULARY] = vocabulary
        for word, array in (
            (shapes.LOWER, self._lower),
            (shapes.BOUNDS, self._bounds),
            (shapes.IDS, self._ids),
            (shapes.WARPED, self._warped),
            (shapes.UNIFORMS, self._uniforms),
        ):
            self._words[word] = array.ctypes.data
        self._call = self._words.ctypes.data

    def greedy(self, logits: Tensor) -> int | None:
        """The token of the greatest logit, the lowest id among equals. logits [1, vocabulary] float32 on a CPU,
        contiguous"""
        self._give(logits)
        self._greatest(self._call)
        token = int(self._words[shapes.STATUS])
        return None if token == shapes.NOT_FINITE else token

    def sampled(self, logits: Tensor, temperature: float, seed: int, position: int, sample_index: int) -> int | None:
        """argmax(logits / temperature + noise), the lowest id among equals.

        logits: see `greedy`   temperature: above 0, at most LARGEST_TEMPERATURE
        seed, position, sample_index: those of the noise of the token that is drawn, within the generator's limits
        (`noise/reference.py`)
        """
        words, counters = self._words, Counters(seed, [position], sample_index, stream=0, row=0)
        self._give(logits)
        words[shapes.TEMPERATURE], words[shapes.POSITION] = float_bits(temperature), position
        words[shapes.SAMPLE], words[shapes.TAG] = sample_index, counters.tag
        words[shapes.KEY0], words[shapes.KEY1] = counters.key
        self._contenders(self._call)
        found = int(words[shapes.STATUS])
        if found == shapes.NOT_FINITE or found > shapes.MOST:  # a quotient may have overflowed; all logits may be equal
            return None
        scores = self._warped[:found] + gumbel_of_uniforms(self._uniforms[:found].copy())
        return int(self._ids[scores.argmax()])

    def _give(self, logits: Tensor) -> None:
        assert logits.shape == (1, self._vocabulary) and logits.is_contiguous()
        self._words[shapes.LOGITS] = logits.data_ptr()
