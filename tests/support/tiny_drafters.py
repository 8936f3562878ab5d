"""Tiny checkpoints of every kind of drafter, with one tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from tests.support import tiny_hybrids, tiny_mamba, tiny_models
from tests.support.tiny_mamba import PADDED, VOCABULARY, write_tokenizer

Family = Literal["mamba", "mamba2", "llama", "granitemoehybrid"]
FAMILIES: tuple[Family, ...] = ("mamba", "mamba2", "llama")
WITH_HYBRID: tuple[Family, ...] = (*FAMILIES, "granitemoehybrid")
POSITIONS = 2048
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEVICE_LAUNCHES: dict[Family, int] = {"mamba": 4, "mamba2": 3}
"""Kernels that a layer of a drafted level launches on an accelerator, by family."""

__all__ = ["DEVICE", "DEVICE_LAUNCHES", "FAMILIES", "PADDED", "VOCABULARY", "WITH_HYBRID", "Family", "make_drafter"]


def make_drafter(folder: Path, family: Family, **settings: Any) -> PreTrainedModel:
    """Write a checkpoint into `folder` and return the library's model of it, in float32.

    settings: of a Llama's or a hybrid's configuration
    """
    if family == "granitemoehybrid":
        # With the embedding as its head, or a large multiplier, the likeliest token is nearly always the last one.
        made = {"tie_word_embeddings": False, "embedding_multiplier": 1.5, "logits_scaling": 0.7}
        made |= {"max_position_embeddings": POSITIONS}
        return tiny_hybrids.make_published(folder, "granite-4.0-h-350m", **made | settings)
    if family != "llama":
        return tiny_mamba.make_checkpoint(folder, family)
    plain: dict[str, Any] = {
        "vocab_size": PADDED,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    model = tiny_models.make_model("llama", **plain | settings)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model
