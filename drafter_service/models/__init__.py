"""The models a drafter can be. A model is registered under the `model_type` of its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from dendro.errors import BadRequest
from torch import Tensor
from tree_kernels.state_step.reference import Slots
from tree_layers.states import States, StateShape
from tree_layers.weights import Checkpoint, CheckpointError, read_checkpoint, read_config

from drafter_service.models.mamba import MambaModel


class Model(Protocol):
    """What the engine asks of a model: tokens in, memory in slots, and logits of what it read."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def shapes(self) -> Sequence[StateShape]:
        """The memory of a text, layer by layer."""
        ...

    def step(self, tokens: Tensor, states: States, source: Tensor, target: Slots) -> Tensor:
        """One token per row, from slot `source` to slot `target`; returns hidden [rows, d]."""
        ...

    def chain(self, tokens: Tensor, lengths: Tensor, states: States, source: Tensor, target: Slots) -> Tensor:
        """Several tokens per row, of which `lengths` count; returns hidden [rows, T, d]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, d] -> [rows, V] float32."""
        ...


MODELS: dict[str, Callable[[Checkpoint, torch.dtype, torch.device], Model]] = {
    "mamba": MambaModel.of,
    "mamba2": MambaModel.of,
}


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device) -> tuple[Model, Checkpoint]:
    """Load a drafter. Raises BadRequest, saying what is wrong with the checkpoint."""
    try:
        kind = read_config(path)["model_type"]
        if kind not in MODELS:
            raise CheckpointError(f"{path}: a drafter of type {kind!r} is not supported; these are: {sorted(MODELS)}")
        checkpoint = read_checkpoint(path)
        return MODELS[kind](checkpoint, dtype, device), checkpoint
    except CheckpointError as error:
        raise BadRequest("checkpoint", str(error)) from error
