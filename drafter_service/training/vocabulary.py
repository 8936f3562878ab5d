"""Draft vocabularies: a drafter guesses the most frequent of its target's tokens and reads all of them.

The head has a row for each guessed token, shared with the token's embedding. The embedding of any other token is a row
of low rank times a basis that these tokens share: they are many, and each is seen too seldom for a row of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from tree_layers.draft_vocabulary import IDS, OTHERS_BASIS, OTHERS_ROWS

from drafter_service.draft_ids import DraftIds
from drafter_service.training.labels import Chunk

OF_VOCABULARY = (f".{OTHERS_ROWS}", f".{OTHERS_BASIS}")
"""Ends of the names of a model's parameters that are stored in the file of the draft vocabulary."""
RANK = 16
"""Rank of the embeddings of tokens that are not guessed."""


def most_frequent(chunks: list[Chunk], vocabulary: int, count: int, always: frozenset[int]) -> np.ndarray:
    """The `count` tokens with the largest sums of probabilities in a teacher's labels, those of `always` first:
    [count] int64, ascending. The lower of equal ids is taken, which tokenizers give to the shorter token."""
    mass = np.zeros(vocabulary)
    for chunk in chunks:
        weights = np.exp(chunk.log_probs.astype(np.float32))
        mass += np.bincount(chunk.ids.ravel(), weights.ravel(), minlength=vocabulary)
    mass[sorted(always)] = np.inf
    return np.sort(np.argsort(-mass, kind="stable")[:count])


class DraftEmbedding(nn.Module):
    """Embedding, by target id, of a drafter that guesses N of the target's V tokens."""

    ids: Tensor
    places: Tensor

    def __init__(self, weight: nn.Parameter, ids: Tensor, others_rows: Tensor, others_basis: Tensor) -> None:
        """weight [N, d]: the head's weight   ids [N] int64, ascending: target ids of the guessed tokens
        others_rows [V - N, r], others_basis [r, d]: of the other tokens"""
        super().__init__()
        self.weight = weight
        self.others_rows = nn.Parameter(others_rows)
        self.others_basis = nn.Parameter(others_basis)
        size = len(ids) + len(others_rows)
        places = torch.from_numpy(DraftIds(ids.cpu().numpy(), size).inside(np.arange(size)))
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("places", places.to(ids.device), persistent=False)  # key: target id

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., d] of target ids [...]."""
        places, guessed = self.places[tokens], len(self.ids)
        own = F.embedding(places.clamp(max=guessed - 1), self.weight)
        others = F.embedding((places - guessed).clamp(min=0), self.others_rows) @ self.others_basis
        return torch.where((places < guessed)[..., None], own, others.to(own.dtype))


def draft_embedding(model: PreTrainedModel) -> DraftEmbedding | None:
    """The embedding of a drafter with a draft vocabulary; None for a drafter that guesses all tokens."""
    found = model.get_input_embeddings()
    return found if isinstance(found, DraftEmbedding) else None


def guess(model: PreTrainedModel, ids: np.ndarray, rows: Tensor) -> PreTrainedModel:
    """Give a new model of N tokens, whose head is its embedding, a draft vocabulary.

    ids [N] int64, ascending: target ids of the guessed tokens   rows [V, d]: embeddings of the target's tokens, which
    those of tokens that are not guessed begin with, at low rank
    """
    others = np.setdiff1d(np.arange(len(rows)), ids)
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, nn.Parameter)
    left, scale, right = torch.svd_lowrank(rows[torch.from_numpy(others)].float(), RANK, niter=4)
    both = scale.sqrt()
    embedding = DraftEmbedding(
        weight, torch.from_numpy(ids).to(weight.device), left * both, (right * both).T.contiguous()
    )
    model.set_input_embeddings(embedding.to(weight.device))
    return model


def save_vocabulary(embedding: DraftEmbedding, file: Path) -> None:
    """Write the tensors of a checkpoint's draft vocabulary."""
    others = {OTHERS_ROWS: embedding.others_rows, OTHERS_BASIS: embedding.others_basis}
    narrow = {name: weight.detach().cpu().bfloat16().contiguous() for name, weight in others.items()}
    save_file({IDS: embedding.ids.cpu().int(), **narrow}, file)


def with_vocabulary(model: PreTrainedModel, file: Path) -> PreTrainedModel:
    """Give a loaded checkpoint's model its draft vocabulary, if there is such a file."""
    if file.is_file():
        tensors = load_file(file)
        weight = model.get_input_embeddings().weight
        assert isinstance(weight, nn.Parameter)
        others = (tensors[name].to(weight) for name in (OTHERS_ROWS, OTHERS_BASIS))
        model.set_input_embeddings(DraftEmbedding(weight, tensors[IDS].long().to(weight.device), *others))
    return model
