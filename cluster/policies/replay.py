"""What rounds of any static shape would have emitted on the text that was written, from the ranks of its tokens.

A drafter says of each token of the text which of its candidates it was (`tree.trace`). In a tree of static shape the
child of rank r is there if and only if the row has more than r children, so a round that starts at text length L emits

    1 + max{d : rho[L + i - 1] < N_i for all i <= d}

tokens in a tree of levels N_1, N_2, ...; in any other static tree, one more than the ranks lead down from the root.
That is exact: in our modes the text does not depend on the trees. (ALGORITHMS 2.4.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from dendro.shapes import LevelShape, NodeShape, TreeShape, child_counts
from dendro.text import Verdict
from dendro.tree import DraftTree, IntArray

RANKED = 8
"""Candidates among which a drafter ranks the text's tokens; that number stands for all ranks past them."""
LONGEST_TRACE = 64
"""Tokens since its last tree that a drafter ranks. Of more, it reads the first without, and says so of none: such a
trace is left aside whole."""
WINDOW = 128
"""Text tokens that a replay is judged by: 30 to 60 rounds."""


def replayed(shape: TreeShape) -> bool:
    """Whether ranks say what a shape emits: where they do not reach, or values choose the tree, they do not."""
    return isinstance(shape, LevelShape | NodeShape) and not shape.off and shape.width <= RANKED


@dataclass(frozen=True, slots=True)
class Ranked:
    """Ranks that one tree brought of text tokens, in order."""

    ranks: tuple[int, ...]  # 0 to RANKED
    depths: tuple[int, ...]  # of each, which token of its round it was, from 1 on
    joined: bool  # whether the first of them follows the last one before


@dataclass(slots=True)
class RankTrace:
    """Follows one request's text and says of its tokens what the trees' traces tell, each once."""

    _untold: list[int] = field(default_factory=list)  # depths of the tokens since the last one told
    _broken: bool = False

    def learn(self, tree: DraftTree, verdict: Verdict) -> Ranked:
        """Take in a round; its own tokens are told of with a later tree."""
        count = min(len(tree.trace), len(self._untold)) if len(tree.trace) <= LONGEST_TRACE else 0
        ranks = tuple(min(rank, RANKED) for rank in tree.trace.tolist()[len(tree.trace) - count :])
        depths = tuple(self._untold[len(self._untold) - count :])
        joined = count == len(self._untold) and not self._broken
        if len(tree.trace):
            self._broken = not count and bool(self._untold)
            self._untold.clear()
        self._untold += range(1, len(verdict.tokens) + 1)
        return Ranked(ranks, depths, joined)


class Replay:
    """Plays the text with every shape at once, each as if it alone had been played: a round begins where the last one
    of the same shape ended.

    That is the law of rounds when a shape is played, which the mean over all places is not: where a text is hard,
    rounds are short and begin more often. (Half a text where 5 tokens are right and half where none is: by places a
    round emits 3, by rounds less than 2.) A round that is not over yet counts for nothing; one that a gap in the ranks
    cuts off, never.
    """

    def __init__(self, shapes: Sequence[TreeShape], window: int = WINDOW) -> None:
        """shapes: those for which `replayed` is true   window: the last tokens whose rounds are counted, LONGEST_TRACE
        of them at least"""
        assert window >= LONGEST_TRACE
        self.shapes = tuple(shapes)
        self.positions = 0  # ranked tokens so far
        self.tokens = np.zeros(len(self.shapes), np.int64)  # of the rounds that ended within the window ...
        self.rounds = np.zeros(len(self.shapes), np.int64)  # ... and their number
        self._roots, self._next, self._emitted = _steps(self.shapes)
        self._rows = self._roots.copy()  # where the rounds are that are not over
        self._ended = np.zeros((window, len(self.shapes)), np.int64)  # N where a round ended at this token, else 0

    def feed(self, ranks: Sequence[int]) -> None:
        """Go on by tokens of these ranks, LONGEST_TRACE of them at most."""
        places = np.arange(self.positions, self.positions + len(ranks)) % len(self._ended)
        forgotten = self._ended[places]
        ended = np.empty_like(forgotten)
        for place, rank in enumerate(ranks):
            self._emitted[rank].take(self._rows, out=ended[place])
            self._rows = self._next[rank].take(self._rows)
        self._ended[places] = ended
        self.tokens += ended.sum(0) - forgotten.sum(0)
        self.rounds += (ended > 0).sum(0) - (forgotten > 0).sum(0)
        self.positions += len(ranks)

    def cut(self) -> None:
        """What comes next does not follow: the rounds that are not over never will be."""
        self._rows = self._roots.copy()


def _steps(shapes: Sequence[TreeShape]) -> tuple[IntArray, IntArray, IntArray]:
    """Of all shapes' rows, one shape after the other: [shapes] the roots; [RANKED + 1, rows] the row that a rank leads
    to, the root where the round ends with it; [RANKED + 1, rows] the tokens of a round that does, else 0."""
    roots = np.cumsum([0, *(shape.rows for shape in shapes)])
    following = np.zeros((RANKED + 1, roots[-1]), np.int64)
    emitted = np.zeros((RANKED + 1, roots[-1]), np.int64)
    for shape, root in zip(shapes, roots.tolist(), strict=False):
        depths, child = [0], root + 1
        for row, count in enumerate(child_counts(shape)):
            following[:, root + row], emitted[:, root + row] = root, depths[row] + 1
            following[:count, root + row], emitted[:count, root + row] = range(child, child + count), 0
            depths += [depths[row] + 1] * count
            child += count
    return roots[:-1], following, emitted
