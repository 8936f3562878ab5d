"""The error of a checkpoint that cannot be used."""

from __future__ import annotations


class CheckpointError(ValueError):
    """The checkpoint cannot be used. The message names the folder or file and its fault."""
