"""Calls the compiled kernel of draft trees' levels. A call holds no interpreter lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tree_kernels.acceptance_head.cpu import Chances, HeadCalls, head_kernels
from tree_kernels.kernel_cache import load_kernels, why_missing
from tree_kernels.ranking import cpu as ranking
from tree_kernels.ranking.cpu import Ids, Orders, RankingRows, Scores, ranking_kernels
from tree_kernels.tree_levels import shapes

if TYPE_CHECKING:
    from tree_kernels.machine_code import Kernels

MODULE = "tree_kernels.tree_levels.loops"

Ints = npt.NDArray[np.int64]
LEAST_ROOM = 64
"""Rows for which memory is allocated at first."""
GUESSES = 16
"""Guesses of a row for which memory is allocated at first."""


def why_not_compiled() -> str:
    """Reason why the kernels of levels and of their ranking cannot be compiled here; empty if they can."""
    return why_missing(MODULE, ranking.MODULE)


class LevelCalls:
    """The prepared arguments of a model's levels. Used by one thread."""

    def __init__(
        self, kernels: Kernels, model: Ints, places: Sequence[int], entry: int, call: Callable[[int, int, Ints], None]
    ) -> None:
        """kernels: the model's forward and logits   model: their words
        places: the words of `model` with the number of rows, the address of their tokens, the number of entries of the
        table of rows, its address, and the number of texts with rows before those of the table   entry: words of an
        entry   call: calls a kernel, given its address, that of its words, and the model's words

        Raises NoKernelsError.
        """
        self._call, self._kernel = call, load_kernels(MODULE).address("levels")
        self._model, self._entry, self._room, self._width = model, entry, 0, 0
        self.words = np.zeros(shapes.CALL_WORDS, np.int64)
        self._address = int(self.words.ctypes.data)
        self.words[shapes.FORWARD], self.words[shapes.LOGITS] = kernels.address("forward"), kernels.address("logits")
        self.words[shapes.RANKING] = ranking_kernels().address("ranking")
        self._model_address = self.words[shapes.MODEL] = int(model.ctypes.data)
        self.words[shapes.ENTRY] = 8 * entry
        self.words[[shapes.ROWS_AT, shapes.TOKENS_AT, shapes.COUNT_AT, shapes.TABLE_AT, shapes.TEXTS_AT]] = places
        self._head: HeadCalls | None = None
        self._make(LEAST_ROOM, GUESSES)

    def fold_first(self, kernel: int, count: int) -> None:
        """Call this kernel before the first level whenever the model's word `count`, its number of folds, is not 0.

        kernel: address of the model's fold
        """
        self.words[shapes.FOLD], self.words[shapes.FOLDS_AT] = kernel, count

    def use_head(self, head: HeadCalls) -> None:
        """Compute the chances of all guesses by this head from now on. Raises NoKernelsError."""
        self._head = head
        self.words[shapes.HEAD], self.words[shapes.HEAD_WORDS] = head_kernels().address("chances"), head.address

    def _make(self, rows: int, width: int) -> None:
        self._room, self._width = rows, width
        self._ranking = RankingRows(rows, width)
        self._ranking_address = int(self._ranking.words.ctypes.data)
        self._counts, self.tokens, self.above, self.ranks = (np.zeros(rows, np.int64) for _ in range(4))
        self.table = np.zeros((rows, self._entry), np.int64)
        """The table of rows [rows, entry] of the next call."""
        for word, array in (
            (shapes.RANKED, self._ranking.words),
            (shapes.COUNTS, self._counts),
            (shapes.TOKENS, self.tokens),
            (shapes.ABOVE, self.above),
            (shapes.RANKS, self.ranks),
            (shapes.TABLE, self.table),
        ):
            self.words[word] = array.ctypes.data

    def reserve(self, rows: int, width: int) -> None:
        """Make room for this many rows in `tokens`, `above`, `ranks` and `table`, which lose their contents if they
        grow, and for their guesses."""
        if rows > self._room or width > self._width:
            self._make(max(2 * self._room, rows) if rows > self._room else self._room, max(width, self._width))

    def run(
        self,
        levels: Sequence[int],
        groups: Sequence[int],
        depths: Sequence[int],
        orders: Orders,
        width: int,
        logits: int,
        logits_step: int,
        entries: int,
    ) -> tuple[Ids, Scores, Chances | None]:
        """Ids, scores and log chances [rows, width] of the best tokens of all rows, level after level; no chances
        without a head.

        levels: rows of each level   groups: rows of each group, in order; depths, orders: of each group's tokens
        logits: address of memory for the logits of one level, `logits_step` bytes between rows   entries: of the first
        level in `table`; later levels have one for each row
        The caller has set `tokens` of the first level, `table`, and, of levels after the first, `above` and `ranks`.
        """
        rows = sum(levels)
        assert rows <= self._room and width <= min(self._width, *orders.vocabularies) and sum(groups) == rows
        self._ranking.set(logits, logits_step, orders, groups, width)
        self._counts[: len(levels)] = levels
        self.words[shapes.LEVELS], self.words[shapes.ENTRIES] = len(levels), entries
        if self._head is not None:
            self._head.reserve(rows, width)
            self._head.set(self._model_address, self._ranking_address, groups, depths)
        self._call(self._kernel, self._address, self._model)
        chances = None if self._head is None else self._head.results(rows, width)
        return *self._ranking.results(rows, width), chances
