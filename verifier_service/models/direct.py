"""Runs a target's parts one after another: embedding, rotary embedding, layers, norm and head.

The library's code around them takes a millisecond of a step, as long as several layers: it is many functions, and
between two forwards the caches hold the target's weights, so each is read from memory again.

A target qualifies if its layers run in one call and the logits of a step have the same bits in both ways, also where
the head's results are larger, as the library may cap logits.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from tree_kernels.taken_rows import take_rows
from tree_kernels.tree_attention import RowRotation

from verifier_service.models.comparing import by_our_seats
from verifier_service.models.decoder_layers import CompiledStack
from verifier_service.models.head import Head
from verifier_service.models.scaled_rows import SCALES, same_bits
from verifier_service.models.seats import ForwardContext

MOST_POSITIONS = 1 << 15
"""Most positions of a table; the cosines and sines of later positions are computed in each step."""
BLOCK = 64
"""Positions that are computed at once."""
NEAR = 8
"""Number of positions, across the end of the first block, that are checked: their rows must not depend on the other
positions of a call."""


class RotationTable:
    """Cosines and sines of a rotary embedding, which a module of transformers computes once for each position. Memory
    is taken as texts grow."""

    def __init__(self, rotate: nn.Module, x: Tensor, positions: int) -> None:
        """x [1, rows, D]: hidden rows, of which the module reads dtype and device   positions: number of positions that
        the model has"""
        self._rotate, self._like = rotate, x[:, :1]
        self.most = min(positions, MOST_POSITIONS) // BLOCK * BLOCK
        cos, _ = rotate(self._like, torch.zeros(1, 1, dtype=torch.int64))
        self._cos, self._sin = (torch.empty(self.most, cos.shape[-1], dtype=cos.dtype) for _ in range(2))
        self._filled = 0

    @property
    def fits(self) -> bool:
        """True if the module's rows are the table's: none depends on other positions of the call."""
        if self.most <= BLOCK:
            return False
        near = torch.arange(BLOCK - NEAR // 2, BLOCK + NEAR // 2)
        alone, found = self._rotate(self._like, near[None]), self.at(near, int(near[-1]))
        beside = [self._rotate(self._like, torch.cat([near, torch.tensor([far])])[None]) for far in (0, self.most - 1)]
        return all(
            same_bits(row[0], own) and all(same_bits(row, each[part][:, :NEAR]) for each in beside)
            for part, (row, own) in enumerate(zip(alone, (found.cos, found.sin), strict=True))
        )

    @property
    def digest(self) -> str:
        """8 hex digits of a SHA-256 of the module's last cosines and sines in float32. They are made from powers, of
        which torch rounds some differently with AVX2 than with AVX-512."""
        stop = max(self.most, BLOCK)
        made = self._rotate(self._like.float(), torch.arange(stop - BLOCK, stop)[None])
        return hashlib.sha256(b"".join(each.numpy().tobytes() for each in made)).hexdigest()[:8]

    def at(self, positions: Tensor, furthest: int) -> RowRotation:
        """The cosines and sines of positions [rows]. furthest: the greatest of these positions, below `most`"""
        while self._filled <= furthest:
            block = slice(self._filled, self._filled + BLOCK)
            cos, sin = self._rotate(self._like, torch.arange(block.start, block.stop)[None])
            self._cos[block], self._sin[block] = cos[0], sin[0]
            self._filled = block.stop
        cos, sin = (each.new_empty(len(positions), each.shape[1]) for each in (self._cos, self._sin))
        take_rows(positions, (self._cos, cos), (self._sin, sin))
        return RowRotation(cos, sin)


class DirectForward:
    """The forward of a target by its parts."""

    def __init__(self, stack: CompiledStack, head: Head, positions: int) -> None:
        """positions: number of positions that the model has"""
        self._stack, self._head = stack, head
        embed: Any = stack.parts.embed
        plain = type(embed) is nn.Embedding and "forward" not in embed.__dict__ and embed.weight.is_contiguous()
        self._embedding: Tensor | None = embed.weight.detach() if plain else None
        table = RotationTable(stack.parts.rotate, embed(torch.zeros(1, 1, dtype=torch.int64)), positions)
        self._rotations = table if table.fits else None
        self.rotation_digest = table.digest  # part of the fingerprint

    def logits(self, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor | None:
        """Logits [k, vocabulary] float32 of the wanted rows [k] of tokens and positions [rows]; None where the layers
        must run one by one, as under a trace."""
        if not self._stack.ready:
            return None
        x = self._embedded(tokens)
        hidden = self._stack.normed_rows(x, self._rotation(x, positions), wanted)
        return self._head.product(hidden[None])[0]

    def prepare(self, rows: int, columns: int, wanted: int) -> None:
        """Make in advance what steps of so many rows need, with `columns` near keys each, of which all or `wanted` rows
        are wanted."""
        self._stack.own.prepare(rows, columns, wanted)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings [1, rows, D] of tokens [rows]."""
        if self._embedding is None:
            found: Tensor = self._stack.parts.embed(tokens[None])
            return found
        assert min(its := tokens.tolist()) >= 0 and max(its) < len(self._embedding)
        x = self._embedding.new_empty(len(tokens), self._embedding.shape[1])
        take_rows(tokens, (self._embedding, x))
        return x[None]

    def _rotation(self, x: Tensor, positions: Tensor) -> RowRotation:
        furthest = max(positions.tolist())
        if self._rotations is not None and furthest < self._rotations.most:
            return self._rotations.at(positions, furthest)
        return self._stack.rotation(x, positions[None])


def direct_forward(
    model: PreTrainedModel,
    head: Head,
    stack: CompiledStack | None,
    run: ForwardContext,
    tokens: Tensor,
    positions: int,
) -> DirectForward | None:
    """The forward by parts; None where its logits have other bits than the model's.

    stack: the layers as one call; None if they do not run so   tokens [rows]: a short text
    positions: number of positions that the model has
    """
    if stack is None:
        return None
    with torch.inference_mode():
        direct = DirectForward(stack, head, positions)

    every = torch.arange(len(tokens))
    some, agreed = every.flip(0)[::2], list[bool]()

    def by_parts(tokens: Tensor, positions: Tensor) -> Tensor:
        found, few = (direct.logits(tokens, positions, wanted) for wanted in (every, some))
        assert found is not None and few is not None, "nothing traces this step"
        agreed.append(same_bits(few, found[some]))
        return found

    with torch.inference_mode():
        for factor in SCALES:
            with head.scaled(factor):
                library, ours = (
                    by_our_seats(model, run, (), tokens, every.flip(0), forward) for forward in (None, by_parts)
                )
                if not same_bits(ours, library) or not all(agreed):
                    return None
    return direct
