"""Tensors of a checkpoint's weight files, read when they are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from tree_layers.checkpoint import weight_files
from tree_layers.weights import library_names, read_torch_file


@contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Every tensor by the library's name for it. Indexing one reads that part of the file; the files are open as long
    as the context. Raises CheckpointError for a file that cannot be read."""
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in weight_files(folder):
            if file.suffix == ".safetensors":
                opened = stack.enter_context(safe_open(file, framework="pt"))
                found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            else:
                found |= read_torch_file(file)
        yield library_names(found)
