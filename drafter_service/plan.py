"""The drafter's forwards, planned by the scheduler and run by the runner, as plain arrays.

A *text slot* holds the memory of a text. A *node slot* holds what a model stores of one node of a tree: a whole state,
the node's inputs, or its keys and values. Slot 0 of either kind is reserved: the empty text, and no node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from dendro.tree import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]

EMPTY_TEXT = 0
NO_NODE = 0


@dataclass(frozen=True, slots=True)
class Chains:
    """Consecutive tokens of several texts, one row per text."""

    tokens: IntArray  # [rows, time]
    lengths: IntArray  # [rows] tokens of each row without padding, 1 to time
    starts: IntArray  # [rows] tokens that the source has consumed
    source: IntArray  # [rows] text slot each row starts from
    target: IntArray  # [rows] text slot each row ends in; may be its source
    roots: IntArray  # [rows] node slot of the row's last token, which is not put into the text; lengths are at least 2.
    # Empty: all tokens are put into the text

    @property
    def kept(self) -> IntArray:
        """[rows] number of tokens that go into the text."""
        return self.lengths - 1 if len(self.roots) else self.lengths

    @property
    def count(self) -> int:
        """Tokens that go through the model."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class Level:
    """New nodes of several trees, tree after tree: one level of each. A root is a level."""

    tokens: IntArray  # [rows]
    parents: IntArray  # [rows] node slot of the parent, NO_NODE for a root
    positions: IntArray  # [rows] of the tokens in their texts
    counts: IntArray  # [trees] rows of each tree
    texts: IntArray  # [trees] slot of each tree's text
    starts: IntArray  # [trees] tokens that this text has consumed: the root's position
    nodes: IntArray  # [trees, most] slots of each tree's nodes, the new ones last; padded with NO_NODE at the front
    lines: BoolArray  # [trees, most, most] whether node j is node i or one of its ancestors

    @property
    def slots(self) -> IntArray:
        """[rows] node slot of each row."""
        most = self.nodes.shape[1]
        return np.concatenate([self.nodes[tree, most - count :] for tree, count in enumerate(self.counts)])

    @property
    def count(self) -> int:
        """Tokens that go through the model."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """One forward, and the tokens whose candidates are wanted."""

    rows: Chains | Level
    scored: IntArray  # [scored] row * time + t of the tokens whose candidates are wanted, ascending
    sessions: IntArray  # [scored] number of the session, which sets the ordering and the noise
    positions: IntArray  # [scored] position of the token to be guessed
    width: int  # candidates per scored token


@dataclass(frozen=True, slots=True)
class TextFold:
    """The accepted nodes of a text's tree, whose contents go into the text's memory."""

    start: int  # tokens that the source has consumed
    source: int  # text slot
    target: int  # text slot; may be the source
    path: tuple[int, ...]  # node slots of a path that begins at the root, at least one


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What the engine runs next: the folds, then the plan, which may overwrite the slots of the folded nodes."""

    folds: tuple[TextFold, ...]
    plan: DraftPlan | None  # None if nothing waits


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """The candidates of each scored token of a forward."""

    candidates: IntArray  # [scored, width] best first
    scores: FloatArray  # [scored, width] by which they are ordered: logits / T plus noise, never increasing along a row
