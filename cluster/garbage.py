"""Keeps what a process loaded out of its garbage collections."""

from __future__ import annotations

import gc


def freeze_loaded() -> None:
    """Leave all objects that exist now out of later garbage collections: modules and models stay until the process
    ends, and a full collection that walks them stops every round of the process meanwhile."""
    gc.collect()
    gc.freeze()
