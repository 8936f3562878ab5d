"""Which AWQ checkpoints are read, and the shapes of their weights. Imports no torch: routers read facts without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tree_layers.headers import Shapes

AWQ = "awq"
"""The method, in configurations."""
BITS = 4
IN_WORD = 32 // BITS
"""Outputs of an int32."""
FIELDS, ZEROS, SCALES = "qweight", "qzeros", "scales"
"""Names of a quantised weight's tensors, in place of `weight`."""
READ = {"bits": BITS, "format": "gemm", "zero_point": True}
"""What the settings must have, which are also transformers' defaults. `version` is an older name of `format`."""


def why_not_read(settings: Mapping[str, Any]) -> str:
    """Which of the settings of `quantization_config` is not supported; empty if all are. The size of the groups is
    that of the tensors."""
    given = {**READ, **settings}
    if named := settings.get("version"):
        given["format"] = str(named).lower()
    for key, value in READ.items():
        if given[key] != value:
            return f"{key} {given[key]!r}; only {value!r} is read"
    return ""


def unpacked_shapes(shapes: Shapes) -> Shapes:
    """The shapes of a checkpoint's tensors once its weights are unpacked."""
    found: Shapes = {}
    for name, shape in shapes.items():
        module, _, part = name.rpartition(".")
        if part == FIELDS and len(shape) == 2:
            found[f"{module}.weight"] = (shape[1] * IN_WORD, shape[0])
        elif part not in (ZEROS, SCALES):
            found[name] = shape
    return found
