"""Reads the facts of a checkpoint's folder without loading its weights. Supports the layouts of Hugging Face and of
state-spaces.

Routers, commands and engines all read these files with this module, so their facts agree. It imports only the standard
library, since routers have no torch. `weights.py` loads tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tree_layers import awq_settings
from tree_layers.awq_settings import AWQ
from tree_layers.draft_vocabulary import DRAFT_VOCABULARY, DraftVocabularySizes, draft_vocabulary_sizes
from tree_layers.errors import CheckpointError
from tree_layers.gguf_header import read_gguf_header
from tree_layers.headers import Shapes, tensor_shapes
from tree_layers.tokens import MAX_ID, TOKENIZER_CONFIG, TokenTable, read_object, read_tokens

CONFIG, GENERATION = "config.json", "generation_config.json"
SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_FILES = ((SAFE, SAFE_INDEX), (TORCH, TORCH_INDEX))
"""Pairs of a single file and an index of shards. As in transformers, the first file that exists is read."""
GGUF = "model.gguf"
"""The weights of a folder that was made from a GGUF file."""
MAMBA_CONFIG = "mamba_config.json"
"""Mamba-in-Llama's second configuration file, beside a Llama's: which layers have mixers, and the mixers' sizes."""

Layout = Literal["transformers", "state-spaces"]

DEQUANTISED = ("fp8", AWQ)
"""Quantisation methods whose weights are dequantised while loading: by transformers, with no package besides our
dependencies, and in AWQ's format by us (`tree_layers.awq`)."""

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions")
"""Configuration keys of the longest text, in tokens, in the various model families."""
_EMBEDDINGS = {"embed_tokens", "embeddings", "embedding", "embed_in", "wte", "word_embeddings", "tok_embeddings"}
_HEADS = {"lm_head", "embed_out"}
"""Names of the modules with the token embedding and with the head, in the various model families."""
_MAMBAS = ("mamba", "mamba2")
_HASH_CHUNK = 1 << 20
_FILE_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a checkpoint that are known before its weights are loaded."""

    folder: Path
    layout: Layout
    config: Mapping[str, Any]  # the configuration, with transformers' keys
    rows: int  # rows of the embedding or the head, the fewer, padding included; V with a draft vocabulary
    positions: int | None  # the longest text, in tokens; None: the checkpoint sets no limit
    named_end_ids: frozenset[int]  # end-of-text tokens by its files
    tokens: TokenTable | None  # None: the folder has no tokenizer
    unpadded: int | None  # the vocabulary before padding in state-spaces' layout; None in transformers'
    digest: str  # SHA-256 of the parsed configuration, end ids and token table; formatting does not change it
    numbers: int | None = None  # number of parameters; None: there are no weight files, as on a router
    quantised: str = ""  # the quantisation method, one of DEQUANTISED; empty: the weights are not quantised
    stored: Mapping[str, int] = field(default_factory=dict)  # number of tensors of each type in a GGUF file
    draft: DraftVocabularySizes | None = None  # sizes of a drafter's draft vocabulary; None: it guesses all tokens

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def tokenizer(self) -> str:
        """The token table's fingerprint; empty if there is no table."""
        return "" if self.tokens is None else self.tokens.fingerprint

    @property
    def known(self) -> int:
        """The tokenizer's greatest id plus one; without a tokenizer, the vocabulary before padding."""
        if self.tokens is not None:
            return self.tokens.size
        if self.unpadded is not None:
            return self.unpadded
        raise CheckpointError(f"{self.folder}: {NO_TOKENIZER}")

    @property
    def end_ids(self) -> frozenset[int]:
        """End-of-text tokens that can be drawn: a file may name one past the vocabulary, such as GPT-2's 50256."""
        known = self.tokens.size if self.tokens is not None else self.unpadded or self.rows
        return frozenset(token for token in self.named_end_ids if token < min(known, self.rows))

    @property
    def vocabulary(self) -> int:
        """The number of token ids, from 0 on, that are in the tokenizer and have a row in the model."""
        return min(self.known, self.rows)


NO_TOKENIZER = (
    "there is no tokenizer that can be read: neither tokenizer.json nor tokenizer.model nor vocab.json and merges.txt; "
    "`tokenizer:` names another folder that has one"
)


def read_facts(path: str | Path, tokenizer: str | Path | None = None) -> Facts:
    """Read a folder's facts. Reads only the headers of weight files, if there are any.

    tokenizer: the tokenizer's folder, if it is not the checkpoint's. Raises CheckpointError.
    """
    folder = Path(path)
    raw = _read_raw(folder)
    quantised = _quantisation(folder, raw)
    shapes = awq_settings.unpacked_shapes(_shapes(folder)) if quantised == AWQ else _shapes(folder)
    layout, config = _normalised(folder, raw, shapes)
    tokens = read_tokens(folder if tokenizer is None else Path(tokenizer))
    if tokens is None and tokenizer is not None:
        raise CheckpointError(f"{tokenizer}: {NO_TOKENIZER}")
    named = _end_ids(folder, config, tokens, folder if tokenizer is None else Path(tokenizer))
    unpadded = raw["vocab_size"] if layout == "state-spaces" else None
    mixers = read_object(folder, MAMBA_CONFIG) if (folder / MAMBA_CONFIG).is_file() else {}
    draft = _draft_vocabulary(folder, layout, config, tokens)
    meaning = [raw, mixers, sorted(named), tokens.fingerprint if tokens is not None else ""]
    meaning += [] if draft is None else [asdict(draft)]
    numbers = sum(map(math.prod, shapes.values())) if shapes else None
    if numbers is not None and draft is not None:
        numbers += draft.others * draft.width  # embeddings of tokens that are not guessed are unpacked
    return Facts(
        folder=folder,
        layout=layout,
        config=config,
        rows=_rows(folder, _of_text(config), shapes) if draft is None else draft.all,
        positions=_positions(folder, _of_text(config)),
        named_end_ids=named,
        tokens=tokens,
        unpadded=unpadded,
        quantised=quantised,
        digest=hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest(),
        numbers=numbers,
        stored=read_gguf_header(folder / GGUF).stored if (folder / GGUF).is_file() else {},
        draft=draft,
    )


def _draft_vocabulary(
    folder: Path, layout: Layout, config: Mapping[str, Any], tokens: TokenTable | None
) -> DraftVocabularySizes | None:
    draft = draft_vocabulary_sizes(folder, config)
    if draft is None:
        return None
    if layout != "transformers":
        raise CheckpointError(f"{folder / DRAFT_VOCABULARY}: is not supported in the layout of {layout}")
    if tokens is not None and draft.all > tokens.size:
        raise CheckpointError(
            f"{folder / DRAFT_VOCABULARY}: ids and others_rows have {draft.all} tokens; the tokenizer has {tokens.size}"
        )
    return draft


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration with transformers' keys. Raises CheckpointError."""
    folder = Path(path)
    return _normalised(folder, _read_raw(folder), _shapes(folder))[1]


def decoded(value: Any) -> Any:
    """A value of a configuration file; transformers writes infinity as an object, as JSON has none."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if isinstance(value, Mapping):
        return (
            float(value["__float__"]) if "__float__" in value else {key: decoded(each) for key, each in value.items()}
        )
    return value


def rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    """The types of rotary embeddings that a configuration names, under any of its keys for them."""
    for key in ("rope_parameters", "rope_scaling"):
        settings = config.get(key)
        for each in (settings, *(settings.values() if isinstance(settings, dict) else ())):
            if isinstance(each, dict):
                yield str(each.get("rope_type", each.get("type", "default")))


def whole(folder: Path, config: Mapping[str, Any], key: str) -> int:
    """The configuration's integer under `key`, from 1 to MAX_ID. Raises CheckpointError for any other value."""
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= MAX_ID:
        raise CheckpointError(
            f"{folder}: {CONFIG}: {key} must be a whole number from 1 to {MAX_ID}; got {value!r:.100}"
        )
    return value


def weight_files(folder: Path) -> list[Path]:
    """The files with a checkpoint's weights. Raises CheckpointError if any are missing."""
    for single, index in WEIGHT_FILES:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            names = shards_of(folder, index)
            if missing := [name for name in names if not (folder / name).is_file()]:
                raise CheckpointError(f"{folder}: {index} names files that are missing: {missing}")
            return [folder / name for name in names]
    if (folder / GGUF).is_file():
        return [folder / GGUF]
    raise CheckpointError(f"{folder}: there are no weights, neither {SAFE} nor {TORCH}")


def shards_of(folder: Path, index: str) -> list[str]:
    """The files that an index names. Raises CheckpointError if it names none, or one outside its folder."""
    shards = read_object(folder, index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{folder}: {index} has no weight_map from tensors to files")
    names = sorted(set(shards.values()))
    if elsewhere := [name for name in names if not _FILE_NAME.fullmatch(name)]:
        raise CheckpointError(f"{folder}: {index} names files that are not in its folder: {elsewhere[:3]}")
    return names


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 over the configuration and the weights of a checkpoint. Reads all of them."""
    more = [folder / name for name in (MAMBA_CONFIG, DRAFT_VOCABULARY) if (folder / name).is_file()]
    digest = hashlib.sha256()
    for file in [folder / CONFIG, *more, *weight_files(folder)]:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while part := stream.read(_HASH_CHUNK):
                digest.update(part)
    return digest.hexdigest()


def _read_raw(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    raw = read_object(folder, CONFIG)
    text = raw.get("text_config")
    for prefix, part in (("", raw), ("text_config.", text if isinstance(text, dict) else {})):
        if not isinstance(part.get("model_type", ""), str):
            raise CheckpointError(f"{folder}: {CONFIG}: {prefix}model_type must be a string")
        layers = part.get("layer_types") or []
        if not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers):
            raise CheckpointError(f"{folder}: {CONFIG}: {prefix}layer_types must be a list of strings")
    return raw


def refuse_quantised(facts: Facts) -> None:
    """Raise CheckpointError if the weights are quantised; for models that are not loaded by transformers."""
    if facts.quantised:
        raise _quantised_error(facts.folder, facts.quantised, "for a drafter")


def refuse_draft_vocabulary(facts: Facts) -> None:
    """Raise CheckpointError for a target with a draft vocabulary: its head has a part of its tokens alone."""
    if facts.draft is not None:
        raise CheckpointError(f"{facts.folder}: cannot be a target: by its {DRAFT_VOCABULARY} it {facts.draft}")


def _quantisation(folder: Path, raw: Mapping[str, Any]) -> str:
    """The quantisation method of the weights; empty if they are not quantised.

    Raises CheckpointError for methods not in DEQUANTISED: their tensors are useless without their scales, though they
    may have the names of plain ones.
    """
    text = _of_text(raw)
    for key in ("quantization_config", "compression_config"):
        if settings := text.get(key) or raw.get(key):
            named = settings.get("quant_method") if isinstance(settings, dict) else settings
            method = str(named or "of a method without a name")
            if method not in DEQUANTISED or raw.get("quantization_config") is not settings:
                raise _quantised_error(folder, method)
            given = settings if isinstance(settings, dict) else {}
            if method == AWQ and (why := awq_settings.why_not_read(given)):
                raise _quantised_error(folder, method, f"with {why}")
            return method
    return ""


def _quantised_error(folder: Path, method: str, where: str = "") -> CheckpointError:
    unsupported = f"not supported {where}".rstrip()
    return CheckpointError(
        f"{folder}: its weights are quantised ({method}), which is {unsupported}; name the bfloat16 or float16 "
        "checkpoint that it was made from"
    )


def _shapes(folder: Path) -> Shapes:
    """Shapes of all tensors; empty if weight files are missing, as on a router or during a download."""
    try:
        files = weight_files(folder)
    except CheckpointError:  # loading the weights raises it again
        return {}
    return tensor_shapes(files)


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model, which multimodal families have under `text_config`."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _normalised(folder: Path, raw: dict[str, Any], shapes: Shapes) -> tuple[Layout, dict[str, Any]]:
    """The layout, and the configuration with transformers' keys.

    Fine-tuned checkpoints may have keys of both layouts, some left over from another model. If keys contradict each
    other, the tensors' names and shapes decide.
    """
    ours, theirs = ({"hidden_size", "num_hidden_layers"} <= raw.keys(), {"d_model", "n_layer"} <= raw.keys())
    if not ours and not theirs and "model_type" not in raw:
        raise CheckpointError(f"{folder}: {CONFIG} names no model_type")
    mamba = raw.get("model_type", "mamba") in _MAMBAS
    if theirs and mamba and not (ours and _last_size(shapes, ".norm_f.weight") in (None, raw["hidden_size"])):
        return "state-spaces", _from_state_spaces(folder, raw, _kind(shapes))
    if "model_type" not in raw:
        raise CheckpointError(f"{folder}: {CONFIG} names no model_type")
    config = dict(raw)
    if mamba:
        config["model_type"] = _kind(shapes) or raw["model_type"]
        channels = _last_size(shapes, ".mixer.out_proj.weight")
        if channels is not None:
            config["intermediate_size"] = channels
    return "transformers", config


def _kind(shapes: Shapes) -> str | None:
    """`mamba` or `mamba2`, from the tensors' names; None if they match neither."""
    if any(name.endswith(".mixer.x_proj.weight") for name in shapes):
        return "mamba"
    return "mamba2" if any(name.endswith(".mixer.dt_bias") for name in shapes) else None


def _last_size(shapes: Shapes, suffix: str) -> int | None:
    """The last dimension of the first tensor whose name ends with `suffix`."""
    return next((shape[-1] for name, shape in shapes.items() if name.endswith(suffix) and shape), None)


def _rows(folder: Path, config: Mapping[str, Any], shapes: Shapes) -> int:
    """Rows of the embedding or of the head, whichever has fewer: larger ids are not tokens of the model. Of several
    matrices with such a name, the largest is the text's: gemma3n's image embedding has 128 rows."""

    def most(modules: set[str]) -> int:
        matrices = ((f".{name}".split(".")[-2:], shape[0]) for name, shape in shapes.items() if len(shape) == 2)
        return max((rows for (module, name), rows in matrices if name == "weight" and module in modules), default=0)

    found = [rows for rows in (most(_EMBEDDINGS), most(_HEADS)) if rows]
    return min(found) if found else whole(folder, config, "vocab_size")


def _positions(folder: Path, config: Mapping[str, Any]) -> int | None:
    key = next((key for key in _POSITIONS if config.get(key) is not None), None)
    return None if key is None else whole(folder, config, key)


def _end_ids(folder: Path, config: Mapping[str, Any], tokens: TokenTable | None, tokenizer: Path) -> frozenset[int]:
    """End ids from the first of these files that has any: the generation configuration, the configuration, the
    tokenizer's configuration. Empty if none has: answers then end only by length."""
    generation = read_object(folder, GENERATION) if (folder / GENERATION).is_file() else {}
    for name, settings in ((GENERATION, generation), (CONFIG, _of_text(config))):
        if (end := settings.get("eos_token_id")) is not None:
            ids = end if isinstance(end, list) else [end]
            if not all(type(token) is int and 0 <= token <= MAX_ID for token in ids):
                raise CheckpointError(
                    f"{folder}: {name}: eos_token_id must be a token's id or a list of ids; got {end!r:.100}"
                )
            return frozenset(ids)
    if tokens is None or not (tokenizer / TOKENIZER_CONFIG).is_file():
        return frozenset()
    text = read_object(tokenizer, TOKENIZER_CONFIG).get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    found = tokens.id_of(text) if isinstance(text, str) else None
    return frozenset() if found is None else frozenset({found})


# Keys of `ssm_cfg` and transformers' names for them. Other keys, except _ONLY_FOR_TRAINING, are refused.
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
_WHOLE = {"d_state", "d_conv", "headdim", "ngroups", "chunk_size"}
_ONLY_FOR_TRAINING = {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "use_fast_path"}
_STATE_SPACES_KEYS = {"d_model", "n_layer", "vocab_size", "ssm_cfg", "rms_norm", "residual_in_fp32", "fused_add_norm"}
_STATE_SPACES_KEYS |= {"pad_vocab_size_multiple", "tie_embeddings", "d_intermediate", "attn_layer_idx", "attn_cfg"}


def _from_state_spaces(folder: Path, config: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """A configuration of state-spaces' `MambaConfig` with transformers' keys.

    kind: from the tensors; None if there are none."""

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{folder}: {CONFIG}: {reason}")

    if "model_type" not in config and (unknown := sorted(set(config) - _STATE_SPACES_KEYS)):
        raise refuse(f"unknown keys {unknown}")  # configurations with a model_type have transformers' keys
    if config.get("attn_layer_idx") or config.get("d_intermediate"):
        raise refuse("a hybrid with attention or MLP layers is not supported")
    if not config.get("rms_norm", True):
        raise refuse("rms_norm: false is not supported")
    ssm = config.get("ssm_cfg") or {}
    if not isinstance(ssm, dict):
        raise refuse(f"ssm_cfg must be an object; got {ssm!r:.100}")
    ssm = dict(ssm)
    layer = ssm.pop("layer", "Mamba1")
    if layer not in list(_LAYERS):
        raise refuse(f"ssm_cfg.layer {layer!r} is not supported")
    kind = kind or _LAYERS[layer]
    keys = _SSM_KEYS[kind]
    if unknown := sorted(set(ssm) - set(keys) - _ONLY_FOR_TRAINING):
        raise refuse(f"ssm_cfg {unknown} is not supported")
    padded = {"pad_vocab_size_multiple": 8, **config}
    width, layers, vocabulary, multiple = (
        whole(folder, padded, key) for key in ("d_model", "n_layer", "vocab_size", "pad_vocab_size_multiple")
    )
    for key in sorted(_WHOLE & ssm.keys()):
        whole(folder, ssm, key)
    expand = ssm.get("expand", 2)
    if type(expand) not in (int, float) or not 1 <= expand * width <= MAX_ID:
        raise refuse(f"ssm_cfg.expand must be a number that d_model is multiplied by; got {expand!r:.100}")
    made: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "vocab_size": math.ceil(vocabulary / multiple) * multiple,
        "tie_word_embeddings": bool(config.get("tie_embeddings", True)),
        "residual_in_fp32": bool(config.get("residual_in_fp32", True)),
        "layer_norm_epsilon": 1e-5,
        "state_size": 16,
        "expand": expand,
        "intermediate_size": int(expand * width),
    }
    if kind == "mamba2":
        made |= {"state_size": 128, "head_dim": 64, "n_groups": 1}
    made |= {keys[key]: value for key, value in ssm.items() if key in keys}
    made |= {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    if kind == "mamba2":
        made["num_heads"] = made["intermediate_size"] // made["head_dim"]
    return made
