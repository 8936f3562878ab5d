"""The walk: go to the child that has the target's token; stop if there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Walk:
    """The accepted path of a tree. N, the number of emitted tokens, is the number of accepted guesses plus one."""

    path: tuple[int, ...]  # rows, from the root (0) to the last accepted one
    tokens: tuple[int, ...]  # emitted: the tokens of path[1:], then the target's next token
    ranks: tuple[int, ...]  # index of each accepted guess among its siblings in row order


def walk(tokens: Sequence[int], parents: Sequence[int], pick: Callable[[int], int]) -> Walk:
    """Walk the tree of `tokens` and `parents` (parents[0] is -1, parents[i] < i) with the target's tokens.

    `pick(row)` is the target's token after that row's path. It is called once for each visited row, in order, and
    for no other. The emitted tokens are exactly those picked: if the pick depends only on the text, the emitted
    tokens are those of plain decoding.

    The root 9 has the guesses 5 and 7, and below 5 is the guess 1. The target's token after the root is 5, after 5 it
    is 1, and after 1 it is 8, so the round emits 5, 1 and 8:

    >>> walk([9, 5, 7, 1], [-1, 0, 0, 1], {0: 5, 1: 1, 3: 8}.__getitem__)
    Walk(path=(0, 1, 3), tokens=(5, 1, 8), ranks=(0, 0))
    """
    children = children_of(tokens, parents)
    path, emitted, ranks = [0], list[int](), list[int]()
    while True:
        siblings = children[path[-1]]
        token = pick(path[-1])
        emitted.append(token)
        rank = next((rank for rank, row in enumerate(siblings) if tokens[row] == token), None)
        if rank is None:
            return Walk(tuple(path), tuple(emitted), tuple(ranks))
        path.append(siblings[rank])
        ranks.append(rank)


def children_of(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Children of each row, in row order. Raises ValueError unless every parent comes before its children."""
    if len(tokens) != len(parents):
        raise ValueError(f"parents: {len(parents)} for {len(tokens)} tokens")
    children: list[list[int]] = [[] for _ in tokens]
    for row in range(1, len(parents)):
        if not 0 <= parents[row] < row:
            raise ValueError(f"parents: row {row} has parent {parents[row]}; a parent must come before its children")
        children[parents[row]].append(row)
    return children
