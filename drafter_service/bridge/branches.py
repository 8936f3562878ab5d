"""Translates a tree of drafter ids into a tree of target ids: the target's tokenizer encodes every branch's text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from dendro.shapes import TreeShape
from dendro.tree import EMPTY_TRACE, DraftTree

from drafter_service.bridge.byte_codec import ByteCodec
from drafter_service.bridge.vocabularies import NO_TOKEN, VocabularyMap
from drafter_service.grow import rerank

LONGEST_TAIL = 16
"""Most tokens of the committed text that are encoded together with a branch."""
SPACES = b"\t\n\r "


@dataclass(frozen=True, slots=True)
class Branch:
    """A path of drafted tokens from below the root to a leaf."""

    text: bytes  # the branch's bytes up to its last complete character
    ends: tuple[tuple[int, int], ...]  # pairs, one per row: bytes from the branch's start to the row's end, and the row
    control: tuple[int, int] | None = None  # the target's control token after the text, and its drafted row

    def row_at(self, end: int) -> int:
        """The first row at whose end the branch has at least `end` bytes."""
        return next((row for reached, row in self.ends if reached >= end), self.ends[-1][1])


@dataclass(slots=True)
class _Node:
    """A row of the target's tree."""

    rows: set[int] = field(default_factory=set)  # drafted rows that reach this row; none of them is below another
    below: dict[int, _Node] = field(default_factory=dict)

    def chance(self, values: Sequence[float], most: float) -> float:
        """Log of the chance that the row is reached: the sum over its drafted rows, at most `most`.

        values: log chances of the drafted rows   most: log chance of the parent
        """
        return min(math.log(sum(math.exp(values[row]) for row in self.rows)), most)


def target_tree(
    drafted: DraftTree,
    ids: Sequence[int],
    shape: TreeShape,
    target: ByteCodec,
    drafter: ByteCodec,
    vocabulary: VocabularyMap,
) -> DraftTree:
    """Translate a tree into the target's ids. The rows of greatest value are kept, within the shape's rows and depth.

    drafted: tree of drafter ids   ids: the text in target ids, whose last token is the root

    A branch is encoded together with the newest tokens of the text. If the tokenizer then encodes these tokens in
    another way than the text has them, the branch is encoded alone.
    """
    branches = branches_of(drafted, drafter, vocabulary)
    tail, data = tail_of(ids, target)
    top = _Node()
    for branch, whole in zip(branches, target.encode_all([data + branch.text for branch in branches]), strict=True):
        goes_on = whole[: len(tail)] == tail
        _add(top, branch, whole[len(tail) :] if goes_on else target.encode(branch.text), target, shape.depth)
    return _numbered(top, ids[-1], drafted, shape)


def branches_of(drafted: DraftTree, drafter: ByteCodec, vocabulary: VocabularyMap) -> list[Branch]:
    """The tree's branches with text or a control token. A branch ends at a token without bytes."""
    return [branch for branch in _branches(drafted, drafter, vocabulary) if branch.text or branch.control]


def _branches(drafted: DraftTree, drafter: ByteCodec, vocabulary: VocabularyMap) -> Iterator[Branch]:
    parents = set(drafted.parents.tolist())
    for leaf in range(1, drafted.rows):
        if leaf in parents:
            continue
        text, ends, control = b"", list[tuple[int, int]](), None
        for row in drafted.path_to(leaf)[1:]:
            token = int(drafted.tokens[row])
            more = drafter.bytes_of.get(token)
            if more is None:
                mapped = int(vocabulary.same[token])
                control = None if mapped == NO_TOKEN else (mapped, row)
                break
            text += more
            ends.append((len(text), row))
        yield Branch(text[: complete(text)], tuple(ends), control)


def complete(text: bytes) -> int:
    """Length of the text without an incomplete UTF-8 character at its end.

    >>> complete("né".encode()), complete("né".encode()[:2])
    (3, 1)
    """
    for back in range(1, min(len(text), 3) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:  # begins a character, of one to four bytes
            size = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if size > back else len(text)
    return len(text)


def tail_of(ids: Sequence[int], target: ByteCodec) -> tuple[list[int], bytes]:
    """The newest tokens of the text and their bytes, beginning where the target's tokenizer splits texts."""
    tail: list[int] = []
    data = b""
    for token in reversed(ids[-LONGEST_TAIL:]):
        found = target.bytes_of.get(token)
        if found is None or (data[:1] in SPACES and data and found[-1:].isalnum()):
            break
        tail.append(token)
        data = found + data
    return tail[::-1], data


def _add(top: _Node, branch: Branch, ids: Sequence[int], target: ByteCodec, depth: int) -> None:
    """Add a branch's target tokens below the root, down to a depth; the last token only if it is settled."""
    kept = ids if _last_is_settled(branch, ids, target) else ids[:-1]
    node, end = top, 0
    for token in kept[:depth]:
        end += len(target.bytes_of.get(token, b""))
        node = node.below.setdefault(token, _Node())
        node.rows.add(branch.row_at(end))
    if branch.control is not None and len(kept) < depth:
        token, row = branch.control
        node.below.setdefault(token, _Node()).rows.add(row)


def _last_is_settled(branch: Branch, ids: Sequence[int], target: ByteCodec) -> bool:
    """True if the last token of a branch likely stays the same when the text goes on: if a control token follows, or if
    it is exactly one drafted token, which the drafter preferred to longer ones."""
    if branch.control is not None or not ids:
        return True
    starts = [0, *(end for end, _ in branch.ends)]
    size = len(target.bytes_of.get(ids[-1], b""))
    return starts[-1] == len(branch.text) and starts[-2] == len(branch.text) - size


def _numbered(top: _Node, root: int, drafted: DraftTree, shape: TreeShape) -> DraftTree:
    """Number the nodes level by level, a row's children adjacent and best first, and keep at most the shape's rows."""
    values = drafted.values.tolist()
    tokens, parents, chances, level = [root], [-1], [0.0], [(0, top)]
    while level:
        deeper = []
        for row, node in level:
            most = chances[row]
            below = [(child.chance(values, most), token, child) for token, child in node.below.items()]
            for chance, token, child in sorted(below, key=lambda each: each[0], reverse=True):
                deeper.append((len(tokens), child))
                tokens.append(token)
                parents.append(row)
                chances.append(chance)
        level = deeper
    ids, above, logs = np.array(tokens), np.array(parents), np.array(chances, np.float32)
    kept = rerank(logs, above, shape.rows - 1)
    places = np.append(-1, np.searchsorted(kept, above[kept[1:]]))
    made = EMPTY_TRACE, drafted.draft_us, drafted.texts
    return DraftTree(ids[kept], places, logs[kept], drafted.proposer, *made)
