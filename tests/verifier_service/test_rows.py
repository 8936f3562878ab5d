"""The rows of a step as plain arrays."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from dendro.tree import DraftTree
from tree_kernels.row_slots import cpu
from tree_kernels.tree_attention import NEAR_CHOICES, PAGE

from verifier_service.recurrent import Extent, place_of, recurrent_rows_of
from verifier_service.rows import NO_ROWS, RowPaths, TextPart, rows_of_texts

LENGTHS = [1, 2, *(multiple + more for multiple in (16, 32, 64, 128, 192, 256) for more in (-1, 0, 1, 2)), 1000]
DEPTH = 16
SCRATCH = 70_000
MOST_CALLS = 3
"""Calls of NumPy for a text's tree; operators of arrays are none."""


@pytest.fixture(params=["kernel", "reference"], autouse=True)
def form(request, monkeypatch):
    """Compute slots by the kernel, then where none can be compiled."""
    if request.param == "reference":
        monkeypatch.setattr(cpu, "row_slots_kernel", lambda: None)
    else:
        assert cpu.row_slots_kernel() is not None


class SomeTexts:
    """Texts of all LENGTHS: roots, trees, trees after missing tokens and parts of prompts, in turn."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.parts, self.pages = [], []
        for number, length in enumerate(LENGTHS):
            ids, done = rng.integers(0, 100, length).tolist(), int(rng.integers(max(0, length - 40), length))
            kind = "root" if length == 1 else ("root", "tree", "missing", "prompt")[(number + seed) % 4]
            tree = None if kind == "prompt" else self.tree(rng, ids[-1], 1 if kind == "root" else 12)
            last = done + 1 if kind == "prompt" else length - 1
            self.parts.append(TextPart(ids, np.arange(done, last) if kind in ("prompt", "missing") else NO_ROWS, tree))
            self.pages.append((1 + rng.permutation(1000)[: -(-(length + DEPTH) // PAGE)]).tolist())

    @staticmethod
    def tree(rng, root, rows):
        depths, parents = [0], [-1]
        for row in range(1, rows):
            parents.append(int(rng.choice([each for each in range(row) if depths[each] < DEPTH][-3:])))
            depths.append(depths[parents[-1]] + 1)
        return DraftTree.of([root, *range(100, 99 + rows)], parents)

    def paths(self):
        """The text of each row in turn, its token, and its path: for each position the row of the step that has it,
        or None for one that is in place already."""
        found, first = [], 0
        for text, (ids, committed, tree) in enumerate(self.parts):
            rows = {position: first + row for row, position in enumerate(committed.tolist())}
            for position in rows:
                found.append((text, ids[position], [rows.get(at) for at in range(position + 1)]))
            root, first = len(ids) - 1, first + len(rows)
            for row in range(tree.rows if tree is not None else 0):
                before = [rows.get(at) for at in range(root)]
                found.append((text, int(tree.tokens[row]), [*before, *(first + each for each in tree.path_to(row))]))
            first += tree.rows if tree is not None else 0
        return found


def columns(slots, block):
    """Of the two last blocks before the end of the block of a path's last position, by definition."""
    first = block * ((len(slots) - 1) // block - 1)
    return [slots[at] if 0 <= at < len(slots) else 0 for at in range(first, first + 2 * block)]


@pytest.mark.parametrize("window", [None, 1, 70, 128])
@pytest.mark.parametrize("near", NEAR_CHOICES)
def test_rows_have_the_slots_of_their_own_paths_and_their_texts_far_pages(near, window):
    texts = SomeTexts(seed=near)
    rows = rows_of_texts(RowPaths.of(texts.parts), texts.pages, SCRATCH, near, window)
    paths = texts.paths()
    ends = [len(ids) - 1 for ids, _, _ in texts.parts]
    guesses = [row for row, (text, _, path) in enumerate(paths) if len(path) - 1 > ends[text]]
    own = {row: SCRATCH + place for place, row in enumerate(guesses)}
    far = {each.start: each for each in rows.far}
    for row, (text, token, path) in enumerate(paths):
        homes = [texts.pages[text][at // PAGE] * PAGE + at % PAGE for at in range(len(path))]
        slots = [own.get(at, home) for at, home in zip(path, homes, strict=True)]
        assert (rows.tokens[row], rows.positions[row]) == (token, len(path) - 1)
        assert (rows.homes[row], rows.slots[row]) == (homes[-1], slots[-1])
        assert rows.near[row].tolist() == columns(slots, near)
    first = 0
    for text, (_, committed, tree) in enumerate(texts.parts):
        stop = first + len(committed) + (tree.rows if tree is not None else 0)
        its = [len(path) - 1 for _, _, path in paths[first:stop]]
        begin = 0 if window is None else max(min(its) - window + 1, 0) // PAGE
        pages = texts.pages[text][begin : -(-max(near * (max(its) // near - 1), 0) // PAGE)]
        assert (first in far) == bool(pages)
        if pages:
            assert (far[first].stop, far[first].first, list(far[first].pages)) == (stop, begin, pages)
        first = stop


@pytest.mark.parametrize("block", [16, 32])
def test_rows_for_mixers_have_the_slots_of_their_own_paths_and_one_fold_for_each_block(block):
    texts, extent = SomeTexts(seed=block), Extent.of(block, DEPTH + 1, DEPTH)
    places = [place_of(number, extent) for number in range(len(LENGTHS))]
    done = [int(part.committed[0]) if len(part.committed) else len(part.ids) - 1 for part in texts.parts]
    for number, (place, tokens) in enumerate(zip(places, done, strict=True)):
        place.folded = max(tokens // block - 1 - number % 2, 0)
    before = [place.folded for place in places]
    rows = recurrent_rows_of(RowPaths.of(texts.parts), places, SCRATCH)
    after = [[] for _ in places]  # for each text, the checkpoint that each of its rows starts from
    for row, (text, _, path) in enumerate(texts.paths()):
        ring = places[text].token_slots(np.arange(len(path))).tolist()
        slots = [home if at is None else SCRATCH + at for at, home in zip(path, ring, strict=True)]
        assert rows.columns[row].tolist() == columns(slots, block)
        assert rows.columns[row, rows.own[row]] == SCRATCH + row and rows.homes[row] == ring[-1]
        after[text].append((row, max((len(path) - 1) // block - 1, 0)))
    number = 0
    for place, old, its, part in zip(places, before, after, texts.parts, strict=True):
        made = {}
        for at in range(old + 1, max(each for _, each in its) + 1):
            fold, number, made[at] = rows.folds[number], number + 1, -1 - number
            assert fold.source == made.get(at - 1, place.state_slot(at - 1))
            assert fold.target in (place.state_slot(at), -1)
            positions = np.arange((at - 1) * block, at * block)
            missing = dict(zip(part.committed.tolist(), range(its[0][0], len(rows.own)), strict=False))
            ring = place.token_slots(positions).tolist()
            found = [
                SCRATCH + missing[at] if at in missing else home
                for at, home in zip(positions.tolist(), ring, strict=True)
            ]
            assert fold.columns.tolist() == found
        for row, at in its:
            assert rows.sources[row] == made.get(at, place.state_slot(at))
        assert place.folded == max(old, *(each for _, each in its))
    assert number == len(rows.folds) > 0


def test_a_further_text_of_a_step_takes_few_calls():
    """Each call of NumPy takes microseconds, and a step of 32 texts waits for all of them."""

    def of_numpy(event, called):
        return event == "c_call" and (
            isinstance(getattr(called, "__self__", None), np.ndarray | np.ufunc)
            or (called.__module__ or "").startswith("numpy")
        )

    texts = SomeTexts(seed=2)
    trees = [(part, pages) for part, pages in zip(texts.parts, texts.pages, strict=True) if part.tree is not None]
    tree, its_pages = max(trees, key=lambda each: each[0].tree.rows)
    assert tree.tree.rows == 12 and tree.tree.depth

    def calls(count):
        found = []
        sys.setprofile(lambda frame, event, called: found.append(called) if of_numpy(event, called) else None)
        try:
            rows_of_texts(RowPaths.of([tree] * count), [its_pages] * count, SCRATCH, 16)
        finally:
            sys.setprofile(None)
        return len(found)

    assert calls(32) - calls(8) <= 24 * MOST_CALLS
