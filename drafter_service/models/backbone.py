"""Parts that drafter models share: embedding, final norm and head; for Mambas also the layers of norm and mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from tree_layers.mixers import unit_rms
from tree_layers.weights import Checkpoint

from drafter_service.draft_ids import DraftIds

Mixer = TypeVar("Mixer")

FOREIGN = 0
"""Token id that is fed in place of ids past the embedding."""


def draft_ids_of(checkpoint: Checkpoint) -> DraftIds | None:
    """Conversion of token ids for a checkpoint with a draft vocabulary; None for others."""
    draft = checkpoint.draft
    return None if draft is None else DraftIds(draft.ids.numpy(), len(draft.ids) + len(draft.others))


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """Embedding, final norm and head of a model. d model width, V tokens that can be guessed."""

    form: ClassVar[str] = "eager"

    embedding: Tensor  # [configured vocabulary, d]; rows of all tokens that are read, in the order of `draft_ids`
    norm: Tensor  # [d]
    head: Tensor  # [d, V]
    eps: float
    draft_ids: DraftIds | None

    @property
    def vocabulary(self) -> int:
        return self.head.shape[1]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights and activations."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding [..., d] for any ids >= 0 [...]. Target ids past the embedding are fed as FOREIGN."""
        return F.embedding(torch.where(tokens < len(self.embedding), tokens, FOREIGN), self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, V] float32 of hidden [rows, d]."""
        return torch.mm(self._norm(hidden, self.norm), self.head).float()

    def normed(self, hidden: Tensor) -> Tensor:
        """Input of the head [rows, d] float32, before it is rounded to `dtype`, for hidden [rows, d]."""
        return unit_rms(hidden.float(), self.eps) * self.norm.float()

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return unit_rms(hidden.float(), self.eps).to(weight.dtype) * weight


@dataclass(frozen=True, slots=True, eq=False)
class Backbone(Ends, Generic[Mixer]):
    """A Mamba language model."""

    layers: tuple[tuple[Tensor, Mixer], ...]  # the norm's weight [d], the mixer
    residual: torch.dtype  # type of the residual stream

    def through(self, tokens: Tensor, mix: Callable[[int, Mixer, Tensor], Tensor]) -> Tensor:
        """Hidden rows [..., d] of tokens [...]. `mix(layer, mixer, normed)` runs the mixer of layer number `layer`."""
        hidden = self.embed(tokens)
        for layer, (norm, mixer) in enumerate(self.layers):
            hidden = hidden.to(self.residual) + mix(layer, mixer, self._norm(hidden, norm))
        return hidden
