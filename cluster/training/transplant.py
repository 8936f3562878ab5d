"""The rows of one vocabulary made from those of another, so that a checkpoint continues under another tokenizer.

A token of the target that the checkpoint's tokenizer has too, with the same bytes, gets that token's row. Any other
gets the mean of the rows of its pieces: the checkpoint's tokens into which its bytes are cut, the longest first from
the left. A token of which some bytes are in no token of the checkpoint gets the mean of all rows. The end of a text
corresponds to the end of a text, and another control token to that of the same text, or else gets the mean of all rows.

The rule is that of Fast Vocabulary Transfer (Gee et al. 2022), where the pieces are the old tokenizer's own
segmentation. The longest match needs no valid text: a token may be half a character.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from dendro.errors import BadRequest
from torch import Tensor
from tree_layers.checkpoint import Facts
from tree_layers.token_bytes import control_tokens, token_bytes
from tree_layers.tokens import TokenTable

from cluster.router.tokenizer import CheckpointTokenizer


@dataclass(frozen=True, slots=True)
class Transplant:
    """Maps each token of a target to tokens of a checkpoint: the token's new row is the mean of their rows."""

    pieces: tuple[tuple[int, ...], ...]  # [target's tokens] ids in the checkpoint; empty: the mean of all rows

    @property
    def words(self) -> str:
        """Numbers of tokens by kind of row, for the card."""
        equal = sum(len(each) == 1 for each in self.pieces)
        absent = sum(not each for each in self.pieces)
        return (
            f"of {len(self.pieces):,} tokens {equal:,} have the row of a token, "
            f"{len(self.pieces) - equal - absent:,} the mean row of their pieces, and {absent:,} the mean of all rows"
        )

    def rows(self, weight: Tensor) -> Tensor:
        """The target's rows [tokens, width] from the checkpoint's [its tokens, width]."""
        flat = torch.tensor([token for each in self.pieces for token in each], dtype=torch.int64)
        starts = [0, *accumulate(len(each) for each in self.pieces)][:-1]
        rows = F.embedding_bag(flat, weight, torch.tensor(starts), mode="mean")
        rows[torch.tensor([not each for each in self.pieces])] = weight.mean(0)
        return rows


def transplant(target: Facts, checkpoint: Facts, ours: CheckpointTokenizer, theirs: CheckpointTokenizer) -> Transplant:
    """The rule above for a target and a checkpoint, both with the tokenizers of their tables.

    Raises BadRequest where a tokenizer is none of the tokenizers library, and where no token is equal.
    """
    assert target.tokens is not None and checkpoint.tokens is not None
    our_bytes, our_controls = _spelt(ours, target.tokens)
    their_bytes, their_controls = _spelt(theirs, checkpoint.tokens)
    named = {text: token for token, text in their_controls.items() if token < checkpoint.vocabulary}
    end = min(checkpoint.end_ids, default=None)
    by_bytes: dict[bytes, int] = {}
    for token, spelt in sorted(their_bytes.items()):
        if spelt and token < checkpoint.vocabulary and token not in checkpoint.end_ids:
            by_bytes.setdefault(spelt, token)
    longest = max(map(len, by_bytes), default=0)
    found: list[tuple[int, ...]] = []
    for token in range(target.vocabulary):
        if token in target.end_ids and end is not None:
            found.append((end,))
        elif token in our_controls:
            same = named.get(our_controls[token])
            found.append(() if same is None else (same,))
        else:
            found.append(tuple(_pieces(our_bytes.get(token, b""), by_bytes, longest)))
    if not any(each and each != (end,) for each in found):
        raise BadRequest("--from", f"no token of {checkpoint.folder} has bytes of the target's tokens")
    return Transplant(tuple(found))


def _pieces(spelt: bytes, by_bytes: Mapping[bytes, int], longest: int) -> Sequence[int]:
    """The longest tokens from the left; empty where some bytes are in none."""
    pieces, at = [], 0
    while at < len(spelt):
        length = next((n for n in range(min(longest, len(spelt) - at), 0, -1) if spelt[at : at + n] in by_bytes), 0)
        if not length:
            return []
        pieces.append(by_bytes[spelt[at : at + length]])
        at += length
    return pieces


def _spelt(tokenizer: CheckpointTokenizer, table: TokenTable) -> tuple[dict[int, bytes], dict[int, str]]:
    """The bytes that each token stands for, where a tokenizer of words has their texts; and the control tokens' texts.

    Raises BadRequest for a tokenizer that is written in Python.
    """
    described = json.loads(tokenizer.backend.to_str())
    controls = control_tokens(described)
    if table.form:
        return token_bytes(described, tokenizer.backend.id_to_token), controls
    return {token: text.encode() for token, text in table.texts.items() if token not in controls}, controls
