"""Calls the compiled ranking of each row's best tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tree_kernels.kernel_cache import load_kernels
from tree_kernels.ranking import shapes

if TYPE_CHECKING:
    from tree_kernels.machine_code import Kernels

MODULE = "tree_kernels.ranking.loops"

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


class Orders(NamedTuple):
    """What the tokens of each row, or of each group of rows, are ordered by."""

    temperatures: Sequence[float]  # 0: the logits themselves are the scores
    noise: Sequence[Tensor | None]  # each at least [vocabulary] float32, added to the scores; None: nothing
    vocabularies: Sequence[int]  # tokens from this id on are left out


def ranking_kernels() -> Kernels:
    """The kernel `ranking`, called with the address of its words. Raises NoKernelsError."""
    return load_kernels(MODULE)


class RankingRows:
    """The words of the ranking, with room for some rows. `ids` and `scores` hold its results; the next ranking writes
    them again. Used by one thread."""

    def __init__(self, rows: int, width: int) -> None:
        self.table = np.empty((rows, shapes.ROW_WORDS), np.int64)
        self.temperatures = np.empty(rows, np.float32)
        self.ids, self.scores = np.empty(rows * width, np.int64), np.empty(rows * width, np.float32)
        self._spare = np.empty(shapes.BLOCK, np.float32)
        self.words = np.zeros(shapes.CALL_WORDS, np.int64)
        for word, array in (
            (shapes.TABLE, self.table),
            (shapes.TEMPERATURES, self.temperatures),
            (shapes.IDS, self.ids),
            (shapes.SCORES, self.scores),
            (shapes.SPARE, self._spare),
        ):
            self.words[word] = array.ctypes.data

    def set(self, logits: int, step: int, orders: Orders, counts: Sequence[int], width: int) -> None:
        """Set what the next ranking reads: logits at an address, `step` bytes between rows, and the order of each group
        of `counts` rows. width: guesses of a row"""
        words = self.words
        words[shapes.LOGITS], words[shapes.LOGITS_STEP], words[shapes.WIDTH] = logits, step, width
        first = 0
        for count, temperature, noise, vocabulary in zip(counts, *orders, strict=True):
            rows = slice(first, first + count)
            self.temperatures[rows] = temperature
            self.table[rows, shapes.NOISE] = 0 if noise is None else noise.data_ptr()
            self.table[rows, shapes.VOCABULARY] = vocabulary
            first += count

    def results(self, rows: int, width: int) -> tuple[Ids, Scores]:
        """Copies of ids and scores [rows, width]."""
        count = rows * width
        return self.ids[:count].reshape(rows, width).copy(), self.scores[:count].reshape(rows, width).copy()


def ranking_of(logits: Tensor, groups: Sequence[int], orders: Orders, width: int) -> RankingRows:
    """A ranking of each row's `width` best tokens, the lower id first among equals, with its results. Runs on a CPU.

    logits [rows, V] float32, any distance between rows
    groups: numbers of adjacent rows; orders: of each group, its vocabulary at least `width` and at most V
    Raises NoKernelsError where the kernel cannot be compiled.
    """
    rows, vocabularies = len(logits), orders.vocabularies
    assert (
        logits.stride(1) == 1
        and sum(groups) == rows
        and width <= min(vocabularies)
        and max(vocabularies) <= logits.shape[1]
    )
    made = RankingRows(rows, width)
    made.set(logits.data_ptr(), 4 * logits.stride(0), orders, groups, width)
    made.words[shapes.ROWS] = rows
    ranking_kernels().functions["ranking"](made.words.ctypes.data)
    return made
