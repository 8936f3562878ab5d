"""The drafter models, registered under the `model_type` of their configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from dendro.errors import BadRequest
from torch import Tensor
from tree_layers.checkpoint import read_facts, refuse_quantised
from tree_layers.errors import CheckpointError
from tree_layers.weights import Checkpoint, read_checkpoint

from drafter_service.models.llama import LlamaModel
from drafter_service.models.mamba import Mamba1Model, Mamba2Model
from drafter_service.models.memory import DrafterMemory


class DrafterModel(Protocol):
    """A drafter model: creates memories, which turn tokens into hidden rows, and computes logits of hidden rows."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Most tokens of a text."""
        ...

    def memory(self, texts: int, nodes: int) -> DrafterMemory:
        """A memory with this many text slots and node slots, slot 0 of either kind included."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, d] -> [rows, V] float32."""
        ...


MODELS: dict[str, Callable[[Checkpoint, torch.dtype, torch.device], DrafterModel]] = {
    "llama": LlamaModel.of,
    "mamba": Mamba1Model.of,
    "mamba2": Mamba2Model.of,
    "qwen2": LlamaModel.of,
    "qwen3": LlamaModel.of,
}


def load_model(
    path: str | Path, dtype: torch.dtype, device: torch.device, tokenizer: Path | None = None
) -> tuple[DrafterModel, Checkpoint]:
    """Load a drafter. Raises BadRequest with the reason if the checkpoint cannot be used.

    tokenizer: the folder with the tokenizer, if it is not the checkpoint's.
    """
    try:
        facts = read_facts(path, tokenizer)
        refuse_quantised(facts)
        kind = facts.model_type
        if kind not in MODELS:
            raise CheckpointError(f"{path}: a drafter of type {kind!r} is not supported; supported: {sorted(MODELS)}")
        checkpoint = read_checkpoint(facts)
        return MODELS[kind](checkpoint, dtype, device), checkpoint
    except CheckpointError as error:
        raise BadRequest("checkpoint", str(error)) from error
