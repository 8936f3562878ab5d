"""What a checkpoint's configuration must say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tree_layers.errors import CheckpointError


def whole(config: Mapping[str, Any], key: str) -> int:
    """A whole number of at least 1. Raises CheckpointError for anything else."""
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a whole number of at least 1, got {value!r}")
    return value
