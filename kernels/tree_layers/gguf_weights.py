"""Arguments of transformers' `from_pretrained` for a folder whose weights are in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tree_layers.checkpoint import GGUF


def gguf_settings(folder: str | Path) -> dict[str, Any]:
    """Settings of `from_pretrained` that unpack the weights into its `dtype`; none for weights in other files."""
    if not (Path(folder) / GGUF).is_file():
        return {}
    from transformers import GgufConfig

    return {"gguf_file": GGUF, "quantization_config": GgufConfig(dequantize=True), "local_files_only": True}


@contextmanager
def names_made_once() -> Iterator[None]:
    """Context for transformers' reading of a file. It asks for the table of a model's names once for each module, and
    the package gguf makes the table anew each time: half of the time in which a small model is read."""
    import gguf

    made: Any = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = cache(made)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = made
