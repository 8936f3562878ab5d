"""Kinds and sizes of drafters that can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

StudentKind = Literal["mamba", "mamba2", "llama"]
STUDENT_KINDS: tuple[StudentKind, ...] = get_args(StudentKind)

WIDE = 384
"""Width from which on heads have 64 channels and a Mamba-2's states 128 entries, as in published models. Below it they
have 32 and 64."""


@dataclass(frozen=True, slots=True)
class StudentSize:
    """Width and layers of a drafter. Raises ValueError for a width that heads do not divide."""

    width: int
    layers: int
    inner: int | None = None  # width of a Llama's MLP; None: 8/3 of the width, rounded up to a multiple of 32

    def __post_init__(self) -> None:
        if self.layers < 1 or self.width < 1 or self.width % self.head:
            raise ValueError(f"layers must be at least 1, and the width a multiple of {self.head}; got {self}")

    def __str__(self) -> str:
        return f"width {self.width}, layers {self.layers}"

    @property
    def head(self) -> int:
        """Channels of a head."""
        return 64 if self.width >= WIDE else 32 if self.width % 32 == 0 else 16

    @property
    def states(self) -> int:
        """Entries of a Mamba-2's state for each channel."""
        return 128 if self.width >= WIDE else 64


SIZES: Mapping[StudentKind, Mapping[str, StudentSize]] = {
    "mamba": {
        "tiny": StudentSize(176, 2),
        "30m": StudentSize(384, 12),
        "130m": StudentSize(768, 24),  # state-spaces/mamba-130m
        "370m": StudentSize(1024, 48),  # state-spaces/mamba-370m
    },
    "mamba2": {
        "tiny": StudentSize(176, 2),
        "30m": StudentSize(384, 12),
        "130m": StudentSize(768, 24),  # state-spaces/mamba2-130m
        "370m": StudentSize(1024, 48),  # state-spaces/mamba2-370m
    },
    "llama": {
        "tiny": StudentSize(160, 2, 352),
        "30m": StudentSize(384, 8),
        "130m": StudentSize(768, 12),
        "370m": StudentSize(1024, 24),
    },
}
"""Sizes by kind and name. Names count parameters with a vocabulary of 50,000; a larger one adds its embedding."""


def student_config(kind: StudentKind, size: StudentSize, tokens: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of a new drafter.

    tokens: `vocab_size` and the ids of special tokens, under the configuration's names
    """
    shared: dict[str, Any] = {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "tie_word_embeddings": True,
        **tokens,
    }
    if kind == "mamba":
        return MambaConfig(state_size=16, **shared)
    if kind == "mamba2":
        head = 64 if size.width >= WIDE else 32  # channels of a head; the heads have twice the width
        heads = 2 * size.width // head
        return Mamba2Config(head_dim=head, num_heads=heads, state_size=size.states, n_groups=1, chunk_size=64, **shared)
    heads = size.width // size.head
    return LlamaConfig(
        intermediate_size=size.inner or -(-8 * size.width // 96) * 32,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=size.head,
        max_position_embeddings=2048,
        **shared,
    )


def new_model(config: PreTrainedConfig, seed: int, device: torch.device) -> PreTrainedModel:
    """Make a model with random weights, which the seed determines."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if isinstance(config, MambaConfig):
        model = MambaForCausalLM(config)
    elif isinstance(config, Mamba2Config):
        model = Mamba2ForCausalLM(config)
    else:
        assert isinstance(config, LlamaConfig)
        model = LlamaForCausalLM(config)
    return nn.Module.to(model, device)
