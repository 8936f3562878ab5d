"""Merges several trees into one. Any tree is legal (docs/design/noise.md#shared-noise), so this changes costs but not
tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from dendro.tree import DraftTree


@dataclass(slots=True, eq=False)
class _Guess:
    """The last token of a path that one or more of the trees have."""

    token: int
    depth: int
    chance: float = -np.inf  # log, given its parent: the greatest of the trees that have it
    by: int = 0  # bit i: the i-th tree has it
    below: dict[int, _Guess] = field(default_factory=dict)


def merge(trees: Sequence[DraftTree], max_rows: int, max_depth: int) -> DraftTree:
    """Merge trees with one root into their union, cut to the `max_rows` rows of greatest value, root included.

    A row's value is the sum over its path of log chances, each the greatest that any tree gives. So no row's value is
    above its parent's, and a row that stays has all its ancestors. Siblings are in order of value; equal ones in the
    order of the trees. The first tree is the drafter's; its other fields are kept. Raises ValueError for trees with
    different roots.

    Both trees guess 5 after the root, with the chances 0.5 and 0.75; below it the first guesses 1 with half of its
    chance. The merged tree has 5 with 0.75 and 1 with 0.75 / 2:

    >>> one = DraftTree.of([9, 5, 1], [-1, 0, 1], np.log([1.0, 0.5, 0.25]))
    >>> two = DraftTree.of([9, 5, 7], [-1, 0, 0], np.log([1.0, 0.75, 0.2]))
    >>> merged = merge([one, two], max_rows=4, max_depth=4)
    >>> merged.tokens.tolist(), merged.parents.tolist(), [round(float(np.exp(value)), 3) for value in merged.values]
    ([9, 5, 1, 7], [-1, 0, 1, 0], [1.0, 0.75, 0.375, 0.2])
    """
    first = trees[0]
    if any(tree.tokens[0] != first.tokens[0] for tree in trees):
        raise ValueError(f"trees: begin with {[int(tree.tokens[0]) for tree in trees]}; they must have one root")
    if len(trees) == 1 and first.rows <= max_rows and first.depth <= max_depth:
        return first
    root = _Guess(int(first.tokens[0]), 0, 0.0)
    for number, tree in enumerate(trees):
        _add(root, tree, 1 << number)
    tokens, parents, values, by = [root.token], [-1], [0.0], 0
    proposed: list[int] = []
    found = 0
    paths: list[tuple[float, int, int, _Guess]] = []  # a heap: the likeliest first; of equals, the first found
    guess, row = root, 0
    while True:
        if guess.depth < max_depth:
            for child in guess.below.values():
                heapq.heappush(paths, (-values[row] - child.chance, found, row, child))
                found += 1
        if not paths or len(tokens) >= max_rows:
            break
        less, _, parent, guess = heapq.heappop(paths)
        row = len(tokens)
        tokens.append(guess.token)
        parents.append(parent)
        values.append(-less)
        by |= guess.by
        if not guess.by & 1:
            proposed.append(row)
    return DraftTree.unchecked(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        np.minimum(np.array(values), 0).astype(np.float32),
        "+".join(tree.proposer for number, tree in enumerate(trees) if by >> number & 1 and tree.proposer),
        first.trace,
        first.draft_us,
        first.texts,
        first.missed,
        frozenset(proposed),
    )


def _add(root: _Guess, tree: DraftTree, bit: int) -> None:
    tokens, parents, values = tree.tokens.tolist(), tree.parents.tolist(), tree.values.tolist()
    guesses = [root]
    for row in range(1, tree.rows):
        above = guesses[parents[row]]
        guess = above.below.get(tokens[row])
        if guess is None:
            guess = above.below[tokens[row]] = _Guess(tokens[row], above.depth + 1)
        guess.chance = max(guess.chance, min(values[row] - values[parents[row]], 0.0))
        guess.by |= bit
        guesses.append(guess)
