"""Levels of draft trees, for numba. Imported only while they are compiled; `cpu.py` calls the machine code."""

from __future__ import annotations

from tree_kernels.acceptance_head.shapes import CHANCES, DEPTHS
from tree_kernels.ranking.shapes import IDS, ROW_WORDS, ROWS, SCORES, TABLE, TEMPERATURES, WIDTH
from tree_kernels.tree_levels import shapes
from tree_kernels.vectors import call_words, longs


def levels(call: int) -> None:
    """Folds, then forward, logits, ranking and acceptance head of each level. The next level's tokens are guesses of
    rows above."""
    its = longs(call)
    model, ranking = longs(its[shapes.MODEL]), longs(its[shapes.RANKED])
    counts, tokens = longs(its[shapes.COUNTS]), longs(its[shapes.TOKENS])
    above, ranks = longs(its[shapes.ABOVE]), longs(its[shapes.RANKS])
    table, temperatures = ranking[TABLE], ranking[TEMPERATURES]
    ids, scores, width = ranking[IDS], ranking[SCORES], ranking[WIDTH]
    head, depths, chances = longs(its[shapes.HEAD_WORDS]), 0, 0
    if its[shapes.HEAD] != 0:
        depths, chances = head[DEPTHS], head[CHANCES]
    if its[shapes.FOLD] != 0 and model[its[shapes.FOLDS_AT]] != 0:
        call_words(its[shapes.FOLD], its[shapes.MODEL])
        model[its[shapes.FOLDS_AT]] = 0
    guesses, first, entry = longs(ids), 0, 0
    for level in range(its[shapes.LEVELS]):
        count = entries = counts[level]
        if level == 0:
            entries = its[shapes.ENTRIES]
        else:
            for row in range(first, first + count):
                tokens[row] = guesses[above[row] * width + ranks[row]]
        model[its[shapes.ROWS_AT]] = ranking[ROWS] = count
        model[its[shapes.COUNT_AT]] = entries
        model[its[shapes.TOKENS_AT]] = its[shapes.TOKENS] + first * 8
        model[its[shapes.TABLE_AT]] = its[shapes.TABLE] + entry * its[shapes.ENTRY]
        ranking[TABLE] = table + first * ROW_WORDS * 8
        ranking[TEMPERATURES] = temperatures + first * 4
        ranking[IDS], ranking[SCORES] = ids + first * width * 8, scores + first * width * 4
        call_words(its[shapes.FORWARD], its[shapes.MODEL])
        model[its[shapes.TEXTS_AT]] = 0
        call_words(its[shapes.LOGITS], its[shapes.MODEL])
        call_words(its[shapes.RANKING], its[shapes.RANKED])
        if its[shapes.HEAD] != 0:
            head[DEPTHS], head[CHANCES] = depths + first * 8, chances + first * width * 4
            call_words(its[shapes.HEAD], its[shapes.HEAD_WORDS])
        first += count
        entry += entries
    ranking[TABLE], ranking[TEMPERATURES] = table, temperatures
    ranking[IDS], ranking[SCORES] = ids, scores
    if its[shapes.HEAD] != 0:
        head[DEPTHS], head[CHANCES] = depths, chances


KERNELS = {"levels": (levels, "i")}
"""The functions that are compiled, and their arguments: i int64, f float32."""
