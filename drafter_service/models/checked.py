"""What a checkpoint's configuration and tokenizer must say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer
from tree_layers.weights import TOKENIZER, Checkpoint, CheckpointError


def whole(config: Mapping[str, Any], key: str) -> int:
    """A whole number of at least 1. Raises CheckpointError for anything else."""
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a whole number of at least 1, got {value!r}")
    return value


def known_tokens(checkpoint: Checkpoint, vocabulary: int) -> int:
    """How many tokens the tokenizer knows; the model's logits of others are never seen. Raises CheckpointError."""
    try:
        known: int = Tokenizer.from_file(str(checkpoint.tokenizer_folder / TOKENIZER)).get_vocab_size(
            with_added_tokens=True
        )
    except Exception as error:  # tokenizers raises bare exceptions
        raise CheckpointError(f"{checkpoint.tokenizer_folder}: {TOKENIZER} is unreadable: {error}") from error
    if known > vocabulary:
        raise CheckpointError(f"{checkpoint.path}: {known} tokens in {TOKENIZER}, {vocabulary} in the model")
    return known
