"""Plans of the drafter's forwards as plain arrays: made by the scheduler, run by the runner.

A *text slot* holds the memory of a text: a state, or keys and values. A *node slot* holds what a model stores of one
node of a tree: a whole state, the node's inputs, or its keys and values. Slot 0 of either kind is reserved: it is the
empty text, and no node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from dendro.grammars import Bits
from dendro.tree import FloatArray, IntArray

BoolArray = npt.NDArray[np.bool_]

EMPTY_TEXT = 0
NO_NODE = 0


@dataclass(frozen=True, slots=True)
class Chains:
    """Consecutive tokens of several texts, one row per text: a prefill, or the tokens up to and with a round's root."""

    tokens: IntArray  # [rows, time]
    lengths: IntArray  # [rows] tokens of each row without padding, 1 to time
    starts: IntArray  # [rows] tokens that the source slot has consumed
    source: IntArray  # [rows] text slot from which each row starts
    target: IntArray  # [rows] text slot in which each row ends; may be its source
    roots: IntArray  # [rows] node slot for the row's last token, which is not put into the text (lengths are then at
    # least 2). Empty if all tokens are put into the text.

    @classmethod
    def of(
        cls,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        source: Sequence[int],
        target: Sequence[int],
        roots: Sequence[int],
    ) -> Chains:
        """Chains of these tokens, which are padded with zeros."""
        lengths = np.array([len(row) for row in tokens], np.int64)
        padded = np.zeros((len(tokens), int(lengths.max())), np.int64)
        for row, each in zip(padded, tokens, strict=True):
            row[: len(each)] = each
        return cls(padded, lengths, *(np.array(each, np.int64) for each in (starts, source, target, roots)))

    @property
    def places(self) -> IntArray:
        """row * time + t of every token, ascending."""
        return np.flatnonzero(np.arange(self.tokens.shape[1]) < self.lengths[:, None])

    @property
    def kept(self) -> IntArray:
        """Number of tokens of each row that go into the text, [rows]."""
        return self.lengths - 1 if len(self.roots) else self.lengths

    @property
    def count(self) -> int:
        """Number of tokens that go through the model."""
        return int(self.lengths.sum())


class Nodes(NamedTuple):
    """Nodes of one tree in the order in which they go through the model, parents first."""

    slots: Sequence[int]  # node slot of each node
    above: Sequence[int]  # place of each node's parent among the nodes, -1 for the root


@dataclass(frozen=True, eq=False)
class Level:
    """One level of new nodes of each of several trees, tree after tree. A root is a level."""

    tokens: IntArray  # [rows]
    counts: Sequence[int]  # [trees] new rows of each tree
    texts: Sequence[int]  # [trees] slot of each tree's text
    starts: Sequence[int]  # [trees] tokens that the text slot has consumed: the root's position
    depths: Sequence[int]  # [trees] depth of the new nodes
    trees: Sequence[Nodes]  # [trees] all nodes of each tree so far, new nodes last

    @property
    def count(self) -> int:
        """Number of tokens that go through the model."""
        return len(self.tokens)

    @cached_property
    def slots(self) -> IntArray:
        """Node slot of each row, [rows]."""
        both = zip(self.trees, self.counts, strict=True)
        return np.array([slot for nodes, count in both for slot in nodes.slots[-count:]], np.int64)

    @cached_property
    def parents(self) -> IntArray:
        """Node slot of each row's parent, [rows]; NO_NODE for a root."""
        both = zip(self.trees, self.counts, strict=True)
        found = (nodes.slots[at] if at >= 0 else NO_NODE for nodes, count in both for at in nodes.above[-count:])
        return np.fromiter(found, np.int64)

    @cached_property
    def text_of_rows(self) -> IntArray:
        """Slot of each row's text, [rows]."""
        return np.repeat(self.texts, self.counts)

    @cached_property
    def positions(self) -> IntArray:
        """Position of each row's token in its text, [rows]."""
        return np.repeat(np.add(self.starts, self.depths), self.counts)

    def ancestors(self, count: int) -> IntArray:
        """Node slots of each row's ancestors in order of depth, [rows, count], those nearest to the row last; NO_NODE
        before the root."""
        slots, above, at = list[int](), list[int](), list[int]()
        first = 0
        for nodes, new in zip(self.trees, self.counts, strict=True):
            slots += nodes.slots
            above += [first + each if each >= 0 else -1 for each in nodes.above]
            first += len(nodes.slots)
            at += above[-new:]
        of_slots, of_above = np.array([*slots, NO_NODE], np.int64), np.array([*above, -1], np.int64)  # -1 is the last
        found, place = np.empty((len(at), count), np.int64), np.array(at, np.int64)
        for back in range(count):
            found[:, count - 1 - back] = of_slots[place]
            place = of_above[place]
        return found

    @cached_property
    def nodes(self) -> IntArray:
        """Node slots of each tree's nodes, [trees, most], new nodes last; padded with NO_NODE at the front."""
        most = max(len(nodes.slots) for nodes in self.trees)
        return np.array([[NO_NODE] * (most - len(nodes.slots)) + list(nodes.slots) for nodes in self.trees], np.int64)

    @cached_property
    def lines(self) -> BoolArray:
        """Ancestor masks [trees, most, most]: True at [tree, i, j] if node j is node i or one of its ancestors."""
        trees, most = self.nodes.shape
        padding = [most - len(nodes.slots) for nodes in self.trees]
        both = zip(padding, self.trees, strict=True)
        above = np.array(
            [[-1] * first + [at + first if at >= 0 else -1 for at in nodes.above] for first, nodes in both]
        )
        found = np.zeros((trees, most, most), np.bool_)
        tree, node = np.nonzero(np.arange(most) >= np.array(padding)[:, None])
        ancestor = node
        while len(node):
            found[tree, node, ancestor] = True
            ancestor = above[tree, ancestor]
            below = ancestor >= 0
            tree, node, ancestor = tree[below], node[below], ancestor[below]
        return found


@dataclass(frozen=True, slots=True)
class Levels:
    """The tokens before a root that the text's memory lacks, then all remaining levels of its tree, in one forward. A
    tree whose form depends on its candidates has only its root here."""

    tokens: Sequence[int]  # tokens of the text before the root, then those of the first level
    source: int  # text slot from which the tokens before the root start
    text: int  # slot of the tree's text, in which they end
    start: int  # tokens that the source slot has consumed
    depth: int  # depth of the first level; 0 if there are tokens before the root
    nodes: Nodes  # nodes of the whole tree, the rows of these levels last
    counts: Sequence[int]  # [levels] nodes of each level
    ranks: Sequence[int]  # [rows] place of each node among its parent's candidates; unused on the first level

    @property
    def text_rows(self) -> int:
        """Number of tokens of the text before the root."""
        return len(self.tokens) - self.counts[0]

    @property
    def groups(self) -> Sequence[int]:
        """`DraftPlan.groups` of a plan with these rows, of which all are scored."""
        return [*[1] * self.text_rows, *self.counts]

    @property
    def count(self) -> int:
        """Number of tokens that go through the model."""
        return self.text_rows + len(self.ranks)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """One forward, and its scored tokens: those after which candidates are wanted. Adjacent scored tokens whose
    candidates are for one position of one text form a group."""

    rows: Chains | Level | Levels
    scored: IntArray | None  # [scored] row * time + t of the tokens whose candidates are wanted, ascending; None: all
    groups: Sequence[int]  # [groups] number of scored tokens of each group, in order
    sessions: Sequence[int]  # [groups] number of the session, which sets the ordering and the noise
    positions: Sequence[int]  # [groups] position of the token to be guessed
    width: int  # candidates per scored token
    masks: Sequence[Bits | None] = ()  # [scored] tokens that may be guessed, None: all. Empty: all after every token

    @property
    def depths(self) -> Sequence[int]:
        """Depth of each group's scored tokens in their tree, [groups]; 0 for tokens of texts."""
        match self.rows:
            case Level():
                return self.rows.depths
            case Levels():
                first = self.rows.depth
                return [0] * self.rows.text_rows + [first + level for level in range(len(self.rows.counts))]
        return [0] * len(self.groups)


class OneForward(NamedTuple):
    """What a forward of a single session may contain besides one level or one chain."""

    levels: bool = False  # True: all levels of a tree whose form is known, after the tokens before its root
    longest_chain: int = 0  # most of these tokens, which alone run as levels of one token; 0: as many as a chain has


@dataclass(frozen=True, slots=True)
class TextFold:
    """Accepted nodes of a text's tree, whose contents are written into the text's memory."""

    start: int  # tokens that the source slot has consumed
    source: int  # text slot that is read
    target: int  # text slot that is written; may be the source
    path: tuple[int, ...]  # node slots of a path that begins at the root, at least one


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Work of an engine's next step: the folds, then the plan, which may overwrite the slots of the folded nodes."""

    folds: tuple[TextFold, ...]
    plan: DraftPlan | None  # None if nothing waits


class DraftOutcome(NamedTuple):
    """The candidates after each scored token of a forward."""

    candidates: IntArray  # [scored, width] best first
    scores: FloatArray  # [scored, width] logits / T plus noise of the candidates, never increasing along a row
    chances: FloatArray | None = None  # [scored, width] log chances by the acceptance head; None without one

    def check(self, rows: slice) -> None:
        """Raise FloatingPointError if scores of these rows are not finite. Only scores of removed candidates, which
        come last, may be minus infinity."""
        scores = self.scores[rows]
        if np.isfinite(scores).all():  # true of nearly all forwards
            return
        if not np.isfinite(scores[:, 0]).all() or np.isnan(scores).any():
            raise FloatingPointError("the scores after the text are not finite")
