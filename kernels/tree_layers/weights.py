"""Checkpoints on disk: Hugging Face's layout and, for Mamba-1 and Mamba-2, that of state-spaces' own releases.

Both come out as one: a configuration with the library's keys, and tensors under the library's names.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
MAMBA_CONFIG = "mamba_config.json"
"""Of Mamba-in-Llama, beside a Llama's configuration: which layers have mixers, and what these are like."""
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_HASH_CHUNK = 1 << 20
_RENAMED = {"backbone.embedding.weight": "backbone.embeddings.weight"}

Named = TypeVar("Named")


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message says why, for the one who named it."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint read into memory."""

    path: Path
    tokenizer_folder: Path  # where the tokenizer's files are
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]  # under the library's names, as stored
    fingerprint: str  # SHA-256 over the configuration and the weights
    tokenizer: str  # SHA-256 of the tokenizer

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of exactly this shape."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        found = self.tensors[name]
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{self.path}: {name} has shape {list(found.shape)}, not {list(shape)}")
        return found


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration with the library's keys. Raises CheckpointError."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    config = _read_json(folder, CONFIG)
    if "model_type" in config:
        return config
    if "d_model" in config and "n_layer" in config:
        return _from_state_spaces(folder, config)
    raise CheckpointError(f"{folder}: {CONFIG} names no model_type")


def read_checkpoint(path: str | Path, tokenizer: Path | None = None) -> Checkpoint:
    """Read all of it. Raises CheckpointError for what is missing or unreadable.

    tokenizer: the folder with the tokenizer, where that is not the checkpoint.
    """
    folder = Path(path)
    tokenizer = tokenizer or folder
    config = read_config(folder)
    files = weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_safetensors(file) if file.suffix == ".safetensors" else read_torch_file(file)
    tensors = library_names(tensors)
    return Checkpoint(folder, tokenizer, config, tensors, weights_fingerprint(folder), tokenizer_fingerprint(tokenizer))


def read_torch_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch's own format, mapped into memory where the format allows it. Code in the file is
    refused and not run. Raises CheckpointError."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except Exception as error:  # torch.load raises pickle's own errors, and whatever a broken archive leads to
        raise CheckpointError(f"{file} is not a file of plain weights: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise CheckpointError(f"{file} is not a file of plain weights: it holds no mapping from names to tensors")
    return tensors


def library_names(tensors: dict[str, Named]) -> dict[str, Named]:
    """Tensors by the library's names: state-spaces has another for the embedding."""
    return {_RENAMED.get(name, name): tensor for name, tensor in tensors.items()}


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 over the configuration and the weights of a checkpoint."""
    mixers = [folder / MAMBA_CONFIG] if (folder / MAMBA_CONFIG).is_file() else []
    return _sha256([folder / CONFIG, *mixers, *weight_files(folder)])


def tokenizer_fingerprint(folder: Path) -> str:
    """SHA-256 of a checkpoint's tokenizer."""
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise CheckpointError(f"{folder}: {TOKENIZER} is missing; drafter and target must have the same one")
    return _sha256([tokenizer])


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: {name} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {name} is unreadable: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{folder}: {name} holds no object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights. Raises CheckpointError where some are missing."""
    for single, index in ((SAFE, SAFE_INDEX), (TORCH, TORCH_INDEX)):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            names = sorted(set(_read_json(folder, index).get("weight_map", {}).values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing or not names:
                raise CheckpointError(f"{folder}: {index} names files that are missing: {missing}")
            return [folder / name for name in names]
    raise CheckpointError(f"{folder}: there are no weights, neither {SAFE} nor {TORCH}")


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while part := stream.read(_HASH_CHUNK):
                digest.update(part)
    return digest.hexdigest()


# What `ssm_cfg` may say, and the library's word for it. Anything else changes the model's function and is refused.
_SSM_KEYS = {
    "mamba": {
        "d_state": "state_size",
        "d_conv": "conv_kernel",
        "expand": "expand",
        "dt_rank": "time_step_rank",
        "conv_bias": "use_conv_bias",
        "bias": "use_bias",
    },
    "mamba2": {
        "d_state": "state_size",
        "d_conv": "conv_kernel",
        "expand": "expand",
        "headdim": "head_dim",
        "ngroups": "n_groups",
        "conv_bias": "use_conv_bias",
        "bias": "use_bias",
        "dt_limit": "time_step_limit",
        "chunk_size": "chunk_size",
    },
}
_ONLY_FOR_TRAINING = {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "use_fast_path"}
_STATE_SPACES_KEYS = {"d_model", "n_layer", "vocab_size", "ssm_cfg", "rms_norm", "residual_in_fp32", "fused_add_norm"}
_STATE_SPACES_KEYS |= {"pad_vocab_size_multiple", "tie_embeddings", "d_intermediate", "attn_layer_idx", "attn_cfg"}


def _from_state_spaces(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The library's form of a configuration of state-spaces' `MambaConfig`."""

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{folder}: {CONFIG}: {reason}")

    if unknown := sorted(set(config) - _STATE_SPACES_KEYS):
        raise refuse(f"unknown keys {unknown}")
    if config.get("attn_layer_idx") or config.get("d_intermediate"):
        raise refuse("a hybrid with attention or MLP layers is not supported")
    if not config.get("rms_norm", True):
        raise refuse("rms_norm: false is not supported")
    ssm = dict(config.get("ssm_cfg") or {})
    layer = ssm.pop("layer", "Mamba1")
    kind = {"Mamba1": "mamba", "Mamba2": "mamba2"}.get(layer)
    if kind is None:
        raise refuse(f"ssm_cfg.layer {layer!r} is not supported")
    keys = _SSM_KEYS[kind]
    if unknown := sorted(set(ssm) - set(keys) - _ONLY_FOR_TRAINING):
        raise refuse(f"ssm_cfg {unknown} is not supported")
    width, vocabulary = int(config["d_model"]), int(config["vocab_size"])
    multiple = int(config.get("pad_vocab_size_multiple", 8))
    made: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": width,
        "num_hidden_layers": int(config["n_layer"]),
        "vocab_size": math.ceil(vocabulary / multiple) * multiple,
        "tie_word_embeddings": bool(config.get("tie_embeddings", True)),
        "residual_in_fp32": bool(config.get("residual_in_fp32", True)),
        "layer_norm_epsilon": 1e-5,
        "state_size": 16,
        "expand": 2,
    }
    if kind == "mamba2":
        made |= {"state_size": 128, "head_dim": 64, "n_groups": 1}
    made |= {keys[key]: value for key, value in ssm.items() if key in keys}
    if kind == "mamba2":
        made["num_heads"] = int(made["expand"] * width) // int(made["head_dim"])
    return made
