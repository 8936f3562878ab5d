"""Facts of a checkpoint's folder, of Hugging Face's layout or state-spaces' own: the one reader of them.

Routers, commands and engines all read through this module, so that they cannot differ. Standard library alone, and no
weights are loaded: it is imported where torch is not. `weights.py` loads tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tree_layers.errors import CheckpointError
from tree_layers.headers import Shapes, tensor_shapes
from tree_layers.tokens import MAX_ID, TOKENIZER_CONFIG, TokenTable, read_object, read_tokens

CONFIG, GENERATION = "config.json", "generation_config.json"
SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_FILES = ((SAFE, SAFE_INDEX), (TORCH, TORCH_INDEX))
"""A single file, or an index of shards; the first that is there, as transformers prefers them."""
MAMBA_CONFIG = "mamba_config.json"
"""Of Mamba-in-Llama, beside a Llama's configuration: which layers have mixers, and what these are like."""

Layout = Literal["transformers", "state-spaces"]

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
"""What families call the most positions of a text."""
_EMBEDDINGS = {"embed_tokens", "embeddings", "embedding", "embed_in", "wte", "word_embeddings", "tok_embeddings"}
_HEADS = {"lm_head", "embed_out"}
"""What families call the modules at their ends."""
_MAMBAS = ("mamba", "mamba2")
_HASH_CHUNK = 1 << 20
_FILE_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a checkpoint before its weights are loaded."""

    folder: Path
    layout: Layout
    config: Mapping[str, Any]  # with the library's keys
    rows: int  # token ids that the embedding and the head have: the configured vocabulary, or its padded size
    positions: int | None  # the most of a text; None where the checkpoint names no bound
    end_ids: frozenset[int]  # end-of-text tokens
    tokens: TokenTable | None  # None where the folder has no tokenizer
    unpadded: int | None  # tokens in use by state-spaces' configuration; None in the other layout
    digest: str  # SHA-256 of configuration, end ids and token table, by meaning

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def tokenizer(self) -> str:
        """The token table's fingerprint; empty where there is none."""
        return "" if self.tokens is None else self.tokens.fingerprint

    @property
    def ordinary_tokens(self) -> str:
        """The fingerprint of the token table without its added tokens; empty where there is none."""
        return "" if self.tokens is None else self.tokens.ordinary_fingerprint

    @property
    def known(self) -> int:
        """Token ids that the tokenizer knows, or that state-spaces' configuration says are in use."""
        if self.tokens is not None:
            return self.tokens.size
        if self.unpadded is not None:
            return self.unpadded
        raise CheckpointError(f"{self.folder}: {NO_TOKENIZER}")

    @property
    def numbers(self) -> int | None:
        """Numbers in the weights; None where there are no weight files, as at a router."""
        shapes = _shapes(self.folder)
        return sum(math.prod(shape) for shape in shapes.values()) if shapes else None

    @property
    def vocabulary(self) -> int:
        """Token ids that mean something and that the model has: all below."""
        return min(self.known, self.rows)


NO_TOKENIZER = (
    "there is no tokenizer that can be read: neither tokenizer.json nor tokenizer.model nor vocab.json and merges.txt; "
    "`tokenizer:` names another folder that has one"
)


def read_facts(path: str | Path, tokenizer: str | Path | None = None) -> Facts:
    """Read a folder's facts; of the weights the heads of their files alone, where these are there.

    tokenizer: the folder of the tokenizer, where the checkpoint has none of its own. Raises CheckpointError.
    """
    folder = Path(path)
    raw = _read_raw(folder)
    _refuse_quantised(folder, raw)
    shapes = _shapes(folder)
    layout, config = _normalised(folder, raw, shapes)
    tokens = read_tokens(folder if tokenizer is None else Path(tokenizer))
    if tokens is None and tokenizer is not None:
        raise CheckpointError(f"{tokenizer}: {NO_TOKENIZER}")
    end_ids = _end_ids(folder, config, tokens, folder if tokenizer is None else Path(tokenizer))
    unpadded = raw["vocab_size"] if layout == "state-spaces" else None
    mixers = read_object(folder, MAMBA_CONFIG) if (folder / MAMBA_CONFIG).is_file() else {}
    meaning = [raw, mixers, sorted(end_ids), tokens.fingerprint if tokens is not None else ""]
    return Facts(
        folder=folder,
        layout=layout,
        config=config,
        rows=_rows(folder, _of_text(config), shapes),
        positions=_positions(folder, _of_text(config)),
        end_ids=end_ids,
        tokens=tokens,
        unpadded=unpadded,
        digest=hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest(),
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration with the library's keys. Raises CheckpointError."""
    folder = Path(path)
    return _normalised(folder, _read_raw(folder), _shapes(folder))[1]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights. Raises CheckpointError where some are missing."""
    for single, index in WEIGHT_FILES:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            names = shards_of(folder, index)
            if missing := [name for name in names if not (folder / name).is_file()]:
                raise CheckpointError(f"{folder}: {index} names files that are missing: {missing}")
            return [folder / name for name in names]
    raise CheckpointError(f"{folder}: there are no weights, neither {SAFE} nor {TORCH}")


def shards_of(folder: Path, index: str) -> list[str]:
    """The files that an index names. Raises CheckpointError for an index that names none, or a file elsewhere."""
    shards = read_object(folder, index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{folder}: {index} has no weight_map from tensors to files")
    names = sorted(set(shards.values()))
    if elsewhere := [name for name in names if not _FILE_NAME.fullmatch(name)]:
        raise CheckpointError(f"{folder}: {index} names files that are not in its folder: {elsewhere[:3]}")
    return names


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 over the configuration and the weights of a checkpoint. Reads all of them."""
    mixers = [folder / MAMBA_CONFIG] if (folder / MAMBA_CONFIG).is_file() else []
    digest = hashlib.sha256()
    for file in [folder / CONFIG, *mixers, *weight_files(folder)]:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while part := stream.read(_HASH_CHUNK):
                digest.update(part)
    return digest.hexdigest()


def _read_raw(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    return read_object(folder, CONFIG)


def _refuse_quantised(folder: Path, raw: Mapping[str, Any]) -> None:
    """Quantised tensors have the names of plain ones, or others, and mean nothing without their scales."""
    text = _of_text(raw)
    for key in ("quantization_config", "compression_config"):
        settings = text.get(key) or raw.get(key)
        if settings:
            method = (
                settings.get("quant_method", "of a method without a name") if isinstance(settings, dict) else settings
            )
            raise CheckpointError(
                f"{folder}: its weights are quantised ({method}), which is not supported; name the checkpoint in "
                "bfloat16 or float16 that it was made of"
            )


def _shapes(folder: Path) -> Shapes:
    """Of all tensors; none where the weight files are not all there, as at a router, or while they are downloaded."""
    try:
        files = weight_files(folder)
    except CheckpointError:  # raised again by whoever loads the weights
        return {}
    return tensor_shapes(files)


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is about the language model."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _normalised(folder: Path, raw: dict[str, Any], shapes: Shapes) -> tuple[Layout, dict[str, Any]]:
    """The layout, and the configuration with the library's keys.

    Fine-tunes carry keys of both layouts, some of them of another model: where two keys differ, the tensors decide.
    """
    ours, theirs = ({"hidden_size", "num_hidden_layers"} <= raw.keys(), {"d_model", "n_layer"} <= raw.keys())
    if not ours and not theirs and "model_type" not in raw:
        raise CheckpointError(f"{folder}: {CONFIG} names no model_type")
    mamba = raw.get("model_type", "mamba") in _MAMBAS
    if theirs and mamba and not (ours and _width(shapes) in (None, raw["hidden_size"])):
        config = _from_state_spaces(folder, raw, _kind(shapes))
        return "state-spaces", config
    if "model_type" not in raw:
        raise CheckpointError(f"{folder}: {CONFIG} names no model_type")
    config = dict(raw)
    if mamba:
        config["model_type"] = _kind(shapes) or raw["model_type"]
        expanded = _expanded(config)
        if expanded != config.get("intermediate_size", expanded) and expanded == _channels(shapes):
            config["intermediate_size"] = expanded
    return "transformers", config


def _kind(shapes: Shapes) -> str | None:
    """Which Mamba the tensors are of; None where they do not say."""
    if any(name.endswith(".mixer.x_proj.weight") for name in shapes):
        return "mamba"
    return "mamba2" if any(name.endswith(".mixer.dt_bias") for name in shapes) else None


def _width(shapes: Shapes) -> int | None:
    return next((shape[0] for name, shape in shapes.items() if name.endswith(".norm_f.weight")), None)


def _channels(shapes: Shapes) -> int | None:
    return next((shape[-1] for name, shape in shapes.items() if name.endswith(".mixer.out_proj.weight")), None)


def _expanded(config: Mapping[str, Any]) -> int | None:
    width, expand = config.get("hidden_size"), config.get("expand", 2)
    return int(expand * width) if isinstance(width, int) and isinstance(expand, (int, float)) else None


def _rows(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> int:
    ends = [
        shape[0]
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and name.split(".")[-2] in _EMBEDDINGS | _HEADS
    ]
    if ends:
        return min(ends)
    vocabulary = config.get("vocab_size")
    if type(vocabulary) is not int or not 1 <= vocabulary <= MAX_ID:
        raise CheckpointError(f"{folder}: {CONFIG} names no vocab_size")
    return vocabulary


def _positions(folder: Path, config: Mapping[str, Any]) -> int | None:
    found = next((config[key] for key in _POSITIONS if config.get(key) is not None), None)
    if found is not None and (type(found) is not int or found < 1):
        raise CheckpointError(f"{folder}: {CONFIG}: the most positions are {found!r}, not a number of 1 or more")
    return found


def _end_ids(folder: Path, config: Mapping[str, Any], tokens: TokenTable | None, tokenizer: Path) -> frozenset[int]:
    """The first that is named of: the generation configuration's, the configuration's, the tokenizer's end of text.
    None at all where none of them names one: such answers end by length alone."""
    generation = read_object(folder, GENERATION) if (folder / GENERATION).is_file() else {}
    for name, said in ((GENERATION, generation), (CONFIG, _of_text(config))):
        if (end := said.get("eos_token_id")) is not None:
            ids = end if isinstance(end, list) else [end]
            if not all(type(token) is int and 0 <= token <= MAX_ID for token in ids):
                raise CheckpointError(f"{folder}: {name}: eos_token_id is {end!r}, not a token's id or a list of them")
            return frozenset(ids)
    if tokens is None or not (tokenizer / TOKENIZER_CONFIG).is_file():
        return frozenset()
    text = read_object(tokenizer, TOKENIZER_CONFIG).get("eos_token")
    found = tokens.id_of(str(text.get("content") if isinstance(text, dict) else text))
    return frozenset() if found is None else frozenset({found})


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
_LAYERS = {"Mamba1": "mamba", "Mamba2": "mamba2"}
_ONLY_FOR_TRAINING = {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "use_fast_path"}
_STATE_SPACES_KEYS = {"d_model", "n_layer", "vocab_size", "ssm_cfg", "rms_norm", "residual_in_fp32", "fused_add_norm"}
_STATE_SPACES_KEYS |= {"pad_vocab_size_multiple", "tie_embeddings", "d_intermediate", "attn_layer_idx", "attn_cfg"}


def _from_state_spaces(folder: Path, config: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """The library's form of a configuration of state-spaces' `MambaConfig`. `kind` is what the tensors are of."""

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{folder}: {CONFIG}: {reason}")

    if "model_type" not in config and (unknown := sorted(set(config) - _STATE_SPACES_KEYS)):
        raise refuse(f"unknown keys {unknown}")  # beside a model_type they are the library's
    if config.get("attn_layer_idx") or config.get("d_intermediate"):
        raise refuse("a hybrid with attention or MLP layers is not supported")
    if not config.get("rms_norm", True):
        raise refuse("rms_norm: false is not supported")
    ssm = dict(config.get("ssm_cfg") or {})
    layer = ssm.pop("layer", "Mamba1")
    if layer not in _LAYERS:
        raise refuse(f"ssm_cfg.layer {layer!r} is not supported")
    kind = kind or _LAYERS[layer]
    keys = _SSM_KEYS[kind]
    if unknown := sorted(set(ssm) - set(keys) - _ONLY_FOR_TRAINING):
        raise refuse(f"ssm_cfg {unknown} is not supported")
    counted = {"pad_vocab_size_multiple": 8, **config}
    for key in ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple"):
        if type(counted.get(key)) is not int or not 1 <= counted[key] <= MAX_ID:
            raise refuse(f"{key} is {counted.get(key)!r}, not a number of 1 or more")
    width, vocabulary, multiple = counted["d_model"], counted["vocab_size"], counted["pad_vocab_size_multiple"]
    made: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": width,
        "num_hidden_layers": config["n_layer"],
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
    made |= {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    made["intermediate_size"] = int(made["expand"] * width)
    if kind == "mamba2":
        made["num_heads"] = made["intermediate_size"] // int(made["head_dim"])
    return made
