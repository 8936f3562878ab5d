"""The models a drafter can be. A model is registered under the `model_type` of its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from dendro.errors import BadRequest
from tree_layers.weights import Checkpoint, CheckpointError, read_checkpoint, read_config

from drafter_service.models.mamba import MambaModel

MODELS: dict[str, Callable[[Checkpoint, torch.dtype, torch.device], MambaModel]] = {
    "mamba": MambaModel.of,
    "mamba2": MambaModel.of,
}


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device) -> tuple[MambaModel, Checkpoint]:
    """Load a drafter. Raises BadRequest, saying what is wrong with the checkpoint."""
    try:
        kind = read_config(path)["model_type"]
        if kind not in MODELS:
            raise CheckpointError(f"{path}: a drafter of type {kind!r} is not supported; these are: {sorted(MODELS)}")
        checkpoint = read_checkpoint(path)
        return MODELS[kind](checkpoint, dtype, device), checkpoint
    except CheckpointError as error:
        raise BadRequest("checkpoint", str(error)) from error
