"""Loads the tensors of a checkpoint, in the layout of Hugging Face or of state-spaces, under transformers' names."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tree_layers.checkpoint import Facts, weight_files, weights_fingerprint
from tree_layers.draft_vocabulary import DRAFT_VOCABULARY, IDS, OTHERS_BASIS, OTHERS_ROWS, DraftVocabularySizes
from tree_layers.errors import CheckpointError

_RENAMED = {"backbone.embedding.weight": "backbone.embeddings.weight"}

Named = TypeVar("Named")


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The tokens of a target of which a drafter guesses some."""

    ids: Tensor  # [N] int64, ascending: the target's ids of the tokens that are guessed
    others: Tensor  # [V - N, d] float32: the embedding of the others, ascending by id


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint read into memory."""

    facts: Facts
    tensors: dict[str, Tensor]  # key: transformers' name; shapes and dtypes as stored
    fingerprint: str  # SHA-256 over the configuration and the weights
    draft: DraftVocabulary | None = None  # None: the model guesses all of its tokens

    @property
    def path(self) -> Path:
        return self.facts.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration, with transformers' keys."""
        return self.facts.config

    def tensor(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name. Raises CheckpointError unless it has exactly this shape."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        found = self.tensors[name]
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{self.path}: {name} has shape {list(found.shape)}, not {list(shape)}")
        return found

    def embedding_and_head(self, embedding: str, head: str, tied: bool, *shape: int) -> tuple[Tensor, Tensor]:
        """These two tensors, as transformers takes them: of a tied pair, one that is missing is the other.

        tied: what the configuration says. A head in the files is read all the same: some configurations are wrong.
        Raises CheckpointError.
        """
        there = [name for name in (embedding, head) if name in self.tensors]
        if tied and len(there) == 1:
            embedding = head = there[0]
        return self.tensor(embedding, *shape), self.tensor(head, *shape)

    def read_embedding(self, embedding: Tensor) -> Tensor:
        """The embedding [rows, d] of all tokens that the model reads; those that it does not guess come last."""
        if self.draft is None:
            return embedding
        return torch.cat([embedding.float(), self.draft.others])


def read_checkpoint(facts: Facts) -> Checkpoint:
    """Read the weights of a folder. Raises CheckpointError for missing or unreadable files."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(facts.folder):
        tensors |= _read_safetensors(file) if file.suffix == ".safetensors" else read_torch_file(file)
    draft = None if facts.draft is None else _read_draft_vocabulary(facts.folder / DRAFT_VOCABULARY, facts.draft)
    return Checkpoint(facts, library_names(tensors), weights_fingerprint(facts.folder), draft)


def _read_draft_vocabulary(file: Path, sizes: DraftVocabularySizes) -> DraftVocabulary:
    """Raises CheckpointError, naming the tensor."""
    tensors = _read_safetensors(file)
    ids, rows, basis = (tensors[name] for name in (IDS, OTHERS_ROWS, OTHERS_BASIS))
    if ids.dtype != torch.int32:
        raise CheckpointError(f"{file}: {IDS} must be int32; found {ids.dtype}")
    if not bool((ids[1:] > ids[:-1]).all()) or not 0 <= int(ids[0]) <= int(ids[-1]) < sizes.all:
        raise CheckpointError(f"{file}: {IDS} must be ascending, each once, from 0 to {sizes.all - 1}")
    for name, tensor in ((OTHERS_ROWS, rows), (OTHERS_BASIS, basis)):
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{file}: {name} must have finite numbers of a floating-point type")
    others = rows.float() @ basis.float()
    if not bool(others.isfinite().all()):
        raise CheckpointError(f"{file}: the product of {OTHERS_ROWS} and {OTHERS_BASIS} is not finite")
    return DraftVocabulary(ids.long(), others)


def read_torch_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a file in torch's format, memory-mapped if the format allows it. Raises CheckpointError, also for
    a file that contains code; the code is not run."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except Exception as error:  # torch.load raises pickle's errors, and any others for a broken archive
        raise CheckpointError(f"{file} is not a file of plain weights: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file} is not a file of plain weights: it holds no mapping from names to tensors")
    return tensors


def library_names(tensors: dict[str, Named]) -> dict[str, Named]:
    """The tensors under transformers' names; state-spaces names the embedding differently."""
    return {_RENAMED.get(name, name): tensor for name, tensor in tensors.items()}


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
