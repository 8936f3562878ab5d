"""Tokens that rounds of any static shape would have emitted on a request's text, from the ranks of the text's tokens.

A drafter reports the rank rho[i] of the text's token i among its candidates, 0 for the first (`tree.trace`). In a tree
of static shape a row has a child of rank r if and only if it has more than r children, so a round that starts at text
length L emits

    1 + max{d : rho[L + i - 1] < N_i for all i <= d}

tokens in a tree of levels N_1, N_2, ...; in any other static tree, one more than the levels that the ranks lead down
from the root. This is exact, since the text does not depend on the trees. (docs/design/policies.md#rank-replay)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from dendro.shapes import LevelShape, NodeShape, TreeShape, child_counts
from dendro.text import Verdict
from dendro.tree import LONGEST_TRACE, RANKED, DraftTree, IntArray

from cluster.arms import Arm

WINDOW = 128
"""Last text tokens over which arms are judged: 30 to 60 rounds."""


def replayed(shape: TreeShape) -> bool:
    """True if ranks determine what a shape emits: a static shape of at most RANKED children a row."""
    return isinstance(shape, LevelShape | NodeShape) and not shape.off and shape.width <= RANKED


def replayed_arms(arms: Iterable[Arm], drafter: str) -> list[Arm]:
    """A drafter's arms whose emitted tokens ranks determine."""
    return [arm for arm in arms if arm.maker == drafter and replayed(arm.shape)]


@functools.lru_cache(maxsize=1024)
def _first_children(shape: TreeShape) -> tuple[int, ...]:
    """Index of each row's first child; meaningless for rows without children."""
    return tuple(accumulate(child_counts(shape), initial=1))


def static_path(shape: TreeShape, ranks: Iterable[int]) -> tuple[int, ...]:
    """Rows on the path, root first, that a text whose tokens have these ranks takes through a static tree.

    >>> static_path(LevelShape((2, 1)), [1, 0, 3])  # second child of the root, row 2, and its only child, row 4
    (0, 2, 4)
    """
    counts, first = child_counts(shape), _first_children(shape)
    path = [0]
    for rank in ranks:
        if rank >= counts[path[-1]]:
            break
        path.append(first[path[-1]] + rank)
    return tuple(path)


def round_lengths(shape: TreeShape, ranks: Sequence[int]) -> list[int]:
    """Tokens emitted by each round if every round drafts a tree of this static shape, for an answer whose tokens have
    these ranks. Rounds that the answer's end could cut short are not counted.

    >>> round_lengths(LevelShape((1, 1)), [0, 1, 0, 0, 8, 0, 0])  # right, wrong | right, right, wrong | too few left
    [2, 3]
    """
    lengths, position = [], 0
    while position + shape.depth < len(ranks):
        lengths.append(len(static_path(shape, ranks[position : position + shape.depth])))
        position += lengths[-1]
    return lengths


def mean_emitted(shape: TreeShape, chances: npt.NDArray[np.float64]) -> float:
    """E[N] of a round with a tree of fixed form: the sum over its rows of the chance to reach them, 1 for the root
    (docs/design/policies.md#priors). chances: [depths, children] that a child of an accepted row has the text's token;
    those of the last depth count for all greater ones, too"""
    reached, depths = [1.0], [0]
    for row, count in enumerate(child_counts(shape)):
        reached += (reached[row] * chances[min(depths[row], len(chances) - 1), :count]).tolist()
        depths += [depths[row] + 1] * count
    return sum(reached)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Ranks that one tree's trace gives to text tokens, in the order of the text."""

    ranks: tuple[int, ...]  # one per token, 0 to RANKED
    depths: tuple[int, ...]  # place of each token in its round, from 1 on
    joined: bool  # True if the first token directly follows the last token that was ranked before


UNRANKED = Ranked((), (), True)
"""Result for a tree without a trace."""


@dataclass(slots=True)
class RankTrace:
    """Finds for each trace of a request's trees (`tree.trace`, the drafter's ranks of the newest text tokens) which
    tokens it ranks. Tokens that an earlier trace of the drafter has ranked are left out."""

    _depths: list[int] = field(default_factory=list)  # place of each answer token in its round, from 1 on
    _traced: dict[str, int] = field(default_factory=dict)  # by drafter: tokens before its last trace with ranks

    def learn(self, drafter: str, tree: DraftTree, verdict: Verdict) -> Ranked:
        """Record a round. Returns the tokens that its tree's trace ranks, all from earlier rounds; a later trace ranks
        the tokens of this round."""
        if not len(tree.trace):
            self._depths += range(1, len(verdict.tokens) + 1)
            return UNRANKED
        unranked = len(self._depths) - self._traced.get(drafter, 0)
        count = min(len(tree.trace), unranked) if len(tree.trace) <= LONGEST_TRACE else 0
        ranks = tuple(min(rank, RANKED) for rank in tree.trace.tolist()[len(tree.trace) - count :])
        depths = tuple(self._depths[len(self._depths) - count :])
        if count:
            self._traced[drafter] = len(self._depths)
        self._depths += range(1, len(verdict.tokens) + 1)
        return Ranked(ranks, depths, joined=count == unranked)


class Replay:
    """Replays the text with all shapes at once, each as if it alone had been played: a round begins where the last
    round of the same shape ended.

    Five tokens of ranks 0, 1, 0, 0 and 8 take a chain of two guesses 2 rounds, and two siblings 3 rounds:

    >>> replay = Replay([LevelShape((1, 1)), LevelShape((2,))])
    >>> replay.feed([0, 1, 0, 0, 8])
    >>> replay.tokens.tolist(), replay.rounds.tolist()
    ([5, 5], [2, 3])

    Means are over rounds. A mean over positions would be too large: where a text is hard, rounds are short and begin
    more often. (If 5 tokens a round are right in half of a text and none in the other half, a round emits 3 by
    positions and less than 2 by rounds.) An unfinished round does not count yet, and one cut off by a gap in the ranks
    never counts.
    """

    def __init__(self, shapes: Sequence[TreeShape], window: int = WINDOW) -> None:
        """shapes: static ones (`replayed`)   window: number of latest tokens, at least LONGEST_TRACE; only rounds that
        ended within them count"""
        assert window >= LONGEST_TRACE
        self.shapes = tuple(shapes)
        self.positions = 0  # ranked tokens so far
        self.tokens = np.zeros(len(self.shapes), np.int64)  # by shape: tokens of rounds that ended within the window
        self.rounds = np.zeros(len(self.shapes), np.int64)  # by shape: number of rounds that ended within the window
        self._roots, self._next, self._emitted = step_tables(self.shapes)
        self._rows = self._roots.copy()  # by shape: the row that the unfinished round has reached
        self._ended = np.zeros((window, len(self.shapes)), np.int64)  # tokens of the round that ended here, else 0

    def feed(self, ranks: Sequence[int]) -> None:
        """Advance all shapes by text tokens with these ranks, at most LONGEST_TRACE at a time."""
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
        """Discard the unfinished rounds: the next ranks do not follow the last ones."""
        self._rows = self._roots.copy()


@functools.lru_cache(maxsize=64)  # requests with the same arms share them
def step_tables(shapes: tuple[TreeShape, ...]) -> tuple[IntArray, IntArray, IntArray]:
    """Tables over the rows of all shapes, one shape after the other; read-only:

    roots [shapes]                 each shape's root
    following [RANKED + 1, rows]   the row to which a token of this rank leads; the shape's root if it ends the round
    emitted [RANKED + 1, rows]     tokens of the round that a token of this rank ends, else 0
    """
    roots = np.cumsum([0, *(shape.rows for shape in shapes)])
    following = np.zeros((RANKED + 1, roots[-1]), np.int64)
    emitted = np.zeros((RANKED + 1, roots[-1]), np.int64)
    for shape, root in zip(shapes, roots.tolist(), strict=False):
        depths = [0]
        for row, (count, first) in enumerate(zip(child_counts(shape), _first_children(shape), strict=False)):
            following[:, root + row], emitted[:, root + row] = root, depths[row] + 1
            following[:count, root + row], emitted[:count, root + row] = range(root + first, root + first + count), 0
            depths += [depths[row] + 1] * count
    tables = roots[:-1], following, emitted
    for table in tables:
        table.flags.writeable = False
    return tables
