"""What the scheduler has the runner do, as plain arrays.

A *text slot* holds the memory of a text, a *node slot* what a model keeps of one node of a tree: a whole memory, or no
more than the node's inputs. Which of them, and so what is done here, is the business of the model's memory. Slot 0 of
either kind is nobody's: the empty text, and no node.
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
    """Consecutive tokens of several texts, a row each."""

    tokens: IntArray  # [rows, time]
    lengths: IntArray  # [rows] tokens that count, 1 to time
    starts: IntArray  # [rows] tokens that the source has consumed
    source: IntArray  # [rows] text slot each row starts from
    target: IntArray  # [rows] text slot each row ends in; may be its source
    roots: IntArray  # [rows] node slot of the row's last token, which stays out of the text and is one of at least two;
    # or none at all: then all tokens go into the text

    @property
    def kept(self) -> IntArray:
        """[rows] tokens that go into the text."""
        return self.lengths - 1 if len(self.roots) else self.lengths

    @property
    def count(self) -> int:
        """Tokens that go through the model."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class Level:
    """New nodes of several trees, tree after tree: a level of each, the root alone among them."""

    tokens: IntArray  # [rows]
    parents: IntArray  # [rows] node slot above, NO_NODE for a root
    positions: IntArray  # [rows] of the tokens in their texts
    counts: IntArray  # [trees] rows of each
    texts: IntArray  # [trees] text slot that each hangs off
    starts: IntArray  # [trees] tokens that this text has consumed: the root's position
    nodes: IntArray  # [trees, most] slots of all nodes of each so far, the new ones last; NO_NODE before its first
    lines: BoolArray  # [trees, most, most] whether node j is on the path of node i, itself on its own

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
    """One forward, and which candidates it is for."""

    rows: Chains | Level
    scored: IntArray  # [scored] row * time + t of the tokens whose candidates are wanted, ascending
    sessions: IntArray  # [scored] number of the session: whose law and noise
    positions: IntArray  # [scored] position of the token to be guessed
    width: int  # candidates per scored token


@dataclass(frozen=True, slots=True)
class TextFold:
    """A text that went through nodes of its tree: what they hold goes into the text's memory."""

    start: int  # tokens that the source has consumed
    source: int  # text slot
    target: int  # text slot; may be the source
    path: tuple[int, ...]  # node slots from the root on, at least one


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What a forward found, for each scored token."""

    candidates: IntArray  # [scored, width] best first
    scores: FloatArray  # [scored, width] what ordered them: logits / T plus noise, never increasing along a row
