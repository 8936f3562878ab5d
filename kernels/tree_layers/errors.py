"""What goes wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message says why, for the one who named it."""
