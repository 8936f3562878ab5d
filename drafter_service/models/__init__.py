"""The models a drafter can be. A model is registered under the `model_type` of its configuration."""

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
    """What the engine asks of a model: memories that turn tokens into hidden rows, and logits of these."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_length(self) -> int:
        """Tokens of the longest text."""
        ...

    def memory(self, texts: int, nodes: int) -> DrafterMemory:
        """Of so many text slots and node slots, those of number 0 among them."""
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
    """Load a drafter. Raises BadRequest, saying what is wrong with the checkpoint.

    tokenizer: the folder with the tokenizer, where that is not the checkpoint.
    """
    try:
        facts = read_facts(path, tokenizer)
        refuse_quantised(facts)
        kind = facts.model_type
        if kind not in MODELS:
            raise CheckpointError(f"{path}: a drafter of type {kind!r} is not supported; these are: {sorted(MODELS)}")
        checkpoint = read_checkpoint(facts)
        return MODELS[kind](checkpoint, dtype, device), checkpoint
    except CheckpointError as error:
        raise BadRequest("checkpoint", str(error)) from error
