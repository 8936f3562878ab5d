"""Loads the library's model of a checkpoint, and reads tensors of its weight files on demand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from tree_layers.awq import unpacked_tensors
from tree_layers.awq_settings import AWQ
from tree_layers.checkpoint import weight_files
from tree_layers.errors import CheckpointError
from tree_layers.gguf_weights import gguf_settings, names_made_once
from tree_layers.weights import library_names, read_torch_file

from verifier_service.models.mamba_in_llama import PURE_MAMBAS, library_config


@contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Open a checkpoint's tensors, by the library's names. Indexing a tensor reads that part of its file. The files are
    open as long as the context. Raises CheckpointError for a file that cannot be read."""
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in weight_files(folder):
            if file.suffix == ".safetensors":
                opened = stack.enter_context(safe_open(file, framework="pt"))
                found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            else:
                found |= read_torch_file(file)
        yield library_names(found)


def check_scales(folder: Path) -> None:
    """Raise CheckpointError for weights in FP8 without the scales that transformers looks for: it would use their
    numbers unscaled."""
    with open_tensors(folder) as tensors:
        for name, tensor in tensors.items():
            dtype = str(tensor.get_dtype() if hasattr(tensor, "get_dtype") else tensor.dtype)
            if ("F8" in dtype or "float8" in dtype) and f"{name}_scale_inv" not in tensors:
                raise CheckpointError(
                    f"{folder}: {name} is quantised (fp8), and there is no {name}_scale_inv; name the bfloat16 "
                    "or float16 checkpoint that it was made from"
                )


def _cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Cast the weights that transformers leaves in the type of the file, or of its scales, when it dequantises."""
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)


def load_library_model(folder: Path, config: PreTrainedConfig | None = None, **settings: Any) -> Any:
    """Load a checkpoint of any layout, in any form of weight files; returns what `from_pretrained` does.

    config: by default the checkpoint's own. settings: of `from_pretrained`. Raises what that does, and CheckpointError.
    """
    config = library_config(folder) if config is None else config
    if unpacked := gguf_settings(folder):
        if config.model_type in PURE_MAMBAS or "distributed_config" in settings:
            raise CheckpointError(
                f"{folder}: a GGUF file of a Mamba, or with tensor_parallel above 1, is not supported"
            )
        with redirect_stderr(StringIO()), names_made_once():  # progress bars go to the former
            return AutoModelForCausalLM.from_pretrained(folder, config=config, **unpacked, **settings)
    quantised = getattr(config, "quantization_config", None) or {}
    in_awq = quantised.get("quant_method") == AWQ
    if in_awq or config.model_type in PURE_MAMBAS:
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with open_tensors(folder) as tensors:
            if in_awq:  # transformers' reader needs another package
                tensors, config = unpacked_tensors(folder, tensors, settings["dtype"]), deepcopy(config)
                del config.quantization_config
            return kind.from_pretrained(None, config=config, state_dict=tensors, **settings)
    safe = weight_files(folder)[0].suffix == ".safetensors"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, use_safetensors=safe, local_files_only=True, trust_remote_code=False, **settings
    )
    if quantised:
        _cast_weights(loaded[0] if isinstance(loaded, tuple) else loaded, settings["dtype"])
    return loaded
