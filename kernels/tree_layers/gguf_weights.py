"""Arguments of transformers' `from_pretrained` for a folder whose weights are in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tree_layers.checkpoint import GGUF


def gguf_settings(folder: str | Path) -> dict[str, Any]:
    """Settings of `from_pretrained` that unpack the weights into its `dtype`; none for weights in other files."""
    if not (Path(folder) / GGUF).is_file():
        return {}
    from transformers import GgufConfig

    return {"gguf_file": GGUF, "quantization_config": GgufConfig(dequantize=True), "local_files_only": True}
