"""The library's model of a checkpoint, and tensors of its weight files, read when they are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from tree_layers.checkpoint import weight_files
from tree_layers.weights import library_names, read_torch_file

from verifier_service.models.mamba_in_llama import PURE_MAMBAS, library_config


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


def load_library_model(folder: Path, config: PreTrainedConfig | None = None, **settings: Any) -> Any:
    """Load a checkpoint of any layout, in any form of weight files; returns what `from_pretrained` does.

    config: by default the checkpoint's own. settings: of `from_pretrained`. Raises what that does, and CheckpointError.
    """
    config = library_config(folder) if config is None else config
    if config.model_type in PURE_MAMBAS:
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with open_tensors(folder) as tensors:
            return kind.from_pretrained(None, config=config, state_dict=tensors, **settings)
    safe = weight_files(folder)[0].suffix == ".safetensors"
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, use_safetensors=safe, local_files_only=True, trust_remote_code=False, **settings
    )
