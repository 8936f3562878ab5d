"""Kinds of bridges, which differ in how a tree of drafter ids becomes a tree of target ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from dendro.shapes import TreeShape
from dendro.tree import EMPTY_TRACE, DraftTree, IntArray
from tree_layers.errors import CheckpointError

from drafter_service.bridge.branches import target_tree
from drafter_service.bridge.byte_codec import ByteCodec
from drafter_service.bridge.translation import Translation
from drafter_service.bridge.vocabularies import NO_TOKEN, VocabularyMap

BridgeKind = Literal["string", "intersection"]


class Bridge(ABC):
    """A bridge between the tokenizers of one target and one drafter. It has no state and serves any number of texts."""

    kind: BridgeKind

    def __init__(self, target: ByteCodec, drafter: ByteCodec, tokenizer: str) -> None:
        """tokenizer: fingerprint of the target's tokenizer. Raises CheckpointError if no token can be guessed."""
        self.tokenizer = tokenizer
        self.target = target
        self.drafter = drafter
        self.vocabulary = VocabularyMap.of(target, drafter)
        if not (self.noise_ids != NO_TOKEN).any():
            raise CheckpointError(f"a bridge of kind {self.kind} has nothing to guess: no tokens are common")

    def __str__(self) -> str:
        shared, whole = self.vocabulary.common, len(self.drafter.bytes_of) + len(self.drafter.control)
        return f"{self.kind}; {shared} of the drafter's {whole} tokens are tokens of the target, too"

    def translation(self) -> Translation:
        """Begin the translation of a new text."""
        return Translation(self.target, self.drafter, self.vocabulary.controls)

    @property
    @abstractmethod
    def noise_ids(self) -> IntArray:
        """Target id whose noise a guess of each drafter id gets, [drafter's vocabulary]; NO_TOKEN for ids that are not
        guessed."""

    @abstractmethod
    def tree(self, drafted: DraftTree, ids: Sequence[int], shape: TreeShape) -> DraftTree:
        """Called with each drafted tree. Returns the tree in target ids, with at most the shape's rows and depth.

        drafted: tree of drafter ids   ids: the text in target ids, whose last token is the root
        """


class StringBridge(Bridge):
    """Encodes the drafted text by the target's tokenizer (SLEM, Timor et al. 2025).

    A guess gets the noise of the target token that begins its bytes, at the position that the guess would have if every
    drafter token were one target token. Below tokens of other lengths that is the wrong position; such a guess is as
    good as one made without shared noise.
    """

    kind: BridgeKind = "string"

    @property
    def noise_ids(self) -> IntArray:
        return self.vocabulary.first

    def tree(self, drafted: DraftTree, ids: Sequence[int], shape: TreeShape) -> DraftTree:
        return target_tree(drafted, ids, shape, self.target, self.drafter, self.vocabulary)


class IntersectionBridge(Bridge):
    """Lets the drafter guess only tokens whose bytes are a token of the target, too (TLI, Timor et al. 2025).

    A guess gets the noise of that target token at the guess's position, as if the drafter had the target's tokenizer.
    """

    kind: BridgeKind = "intersection"

    @property
    def noise_ids(self) -> IntArray:
        return self.vocabulary.same

    def tree(self, drafted: DraftTree, ids: Sequence[int], shape: TreeShape) -> DraftTree:
        same = self.vocabulary.same
        rows = [0]  # rows that are kept: all but those below a guess that the target lacks
        place = {0: 0}
        for row in range(1, drafted.rows):
            if int(drafted.parents[row]) in place and same[drafted.tokens[row]] != NO_TOKEN:
                place[row] = len(rows)
                rows.append(row)
        tokens = same[drafted.tokens[rows]]
        tokens[0] = ids[-1]
        parents = drafted.parents[rows].copy()
        parents[1:] = [place[int(parent)] for parent in parents[1:]]
        return DraftTree(
            tokens, parents, drafted.values[rows], drafted.proposer, EMPTY_TRACE, drafted.draft_us, drafted.texts
        )


KINDS: dict[BridgeKind, type[Bridge]] = {kind.kind: kind for kind in (StringBridge, IntersectionBridge)}
