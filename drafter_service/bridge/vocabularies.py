"""Maps a drafter's tokens to a target's tokens by their bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dendro.tree import IntArray

from drafter_service.bridge.byte_codec import ByteCodec

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyMap:
    """Target ids of a drafter's tokens, and drafter ids of the target's control tokens."""

    same: IntArray  # [drafter's vocabulary] target id of the same bytes, or control token of the same text; or NO_TOKEN
    first: IntArray  # [drafter's vocabulary] target id that begins the token's bytes; NO_TOKEN if there is none
    controls: dict[int, int]  # target id -> drafter id of control tokens that both have

    @classmethod
    def of(cls, target: ByteCodec, drafter: ByteCodec) -> VocabularyMap:
        """Compare two tokenizers. Only one of several drafter tokens with equal bytes gets a `same` token."""
        same = np.full(drafter.vocabulary, NO_TOKEN, np.int64)
        for found, token in drafter.id_of.items():
            same[token] = target.id_of.get(found, NO_TOKEN)
        theirs = {text: token for token, text in target.control.items()}
        controls = {theirs[text]: token for token, text in drafter.control.items() if text in theirs}
        for token, own in controls.items():
            same[own] = token
        first = same.copy()
        others = [token for token in drafter.bytes_of if same[token] == NO_TOKEN]
        for token, ids in zip(others, target.encode_all([drafter.bytes_of[each] for each in others]), strict=True):
            if ids:
                first[token] = ids[0]
        return cls(same, first, controls)

    @property
    def common(self) -> int:
        """Number of tokens that both vocabularies have."""
        return int((self.same != NO_TOKEN).sum())
