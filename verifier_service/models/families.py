"""Decides which models can be targets: the properties for which a model is refused, and how they are found.

The configuration is checked before weights are loaded. Everything else is found by running the loaded model: once with
a probe in place of its attention, which records what each layer passes to it, and then on a short text, whose logits
must be those of the library's own modules (`comparing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from inspect import signature
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from tree_kernels.tree_attention import Layout
from tree_layers.checkpoint import CONFIG, rope_types
from tree_layers.errors import CheckpointError

from verifier_service.models.mixers import MIXER_FAMILIES
from verifier_service.models.seats import ATTENTION, ForwardContext, ProbedLayer, Seat, seat_attention


class Property(StrEnum):
    """Reason why a family is refused. Every refusal of a family gives one of these."""

    ENCODER_DECODER = "is an encoder-decoder; a target is decoder-only"
    NO_CAUSAL_CLASS = "has no causal language model in the installed transformers"
    NOT_BUILT = "has a configuration of which the installed transformers builds no causal language model"
    PACKAGE = "needs a package that is not installed"
    NO_HEAD = "has no single linear head that makes its logits"
    OUTSIDE_INTERFACE = "attends outside transformers' attention interface"
    STATES = "has linear attention, a recurrence or a state-space mixer of a kind that is not supported"
    CONVOLUTION = "has convolutions over neighbouring tokens"
    CHOSEN_KEYS = "attends to keys that it chooses or compresses by their content"
    CHUNKED = "attends within chunks of the text"
    CALLED_TWICE = "calls one attention module several times for a token"
    OTHER_LAYERS = "has layers of a kind that is not supported"
    ROPE_BY_LENGTH = "has rotary embeddings that depend on the longest text of a batch"
    BIDIRECTIONAL = "attends to later tokens too"
    WINDOW_NOT_HANDED = "has a sliding window that it does not pass to the attention"
    OWN_MASK = "passes its attention its own mask or bias (ALiBi, relative positions)"
    UNKNOWN_ARGUMENT = "passes its attention an argument that is not supported"
    POSITIONS = "does not take its positions from position_ids that begin at 0"
    ROWS_MIX = "mixes the rows of a step outside its attention"
    UNCALLABLE = "cannot be called with only tokens and positions"
    OTHER_LOGITS = "gives logits that differ from those of the library's own modules"


class FamilyError(CheckpointError):
    """A target's family is not supported, for the reason in `property`."""

    def __init__(self, folder: Path, kind: str, why: Property, detail: str = "") -> None:
        """kind: the configuration's model_type   detail: what was found in this checkpoint"""
        super().__init__(f"{folder}: {kind} {why}" + (f" ({detail})" if detail else ""))
        self.property = why
        self._arguments = folder, kind, why, detail

    def __reduce__(self) -> tuple[type[Self], tuple[Path, str, Property, str]]:
        """Lets the error be unpickled with its arguments: Ray sends a replica's errors as pickles."""
        return type(self), self._arguments


PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types whose attention a causal window describes."""
NOT_ATTENDING = {"mamba", "linear_attention", "moe", "mlp"}
"""Layer types, of the families with mixers, that call no attention."""
# Layer types that no mask and no window can describe, and why a model with one of them is refused.
LAYER_PROPERTIES = {
    "linear_attention": Property.STATES,
    "mamba": Property.STATES,
    "conv": Property.CONVOLUTION,
    "chunked_attention": Property.CHUNKED,
    "indexed_attention": Property.CHOSEN_KEYS,
    "compressed_sparse_attention": Property.CHOSEN_KEYS,
    "heavily_compressed_attention": Property.CHOSEN_KEYS,
}
UNPACKABLE_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings whose factor depends on the longest text of the batch."""


def check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise FamilyError for a configuration of a model that cannot be a target; nothing is loaded."""
    kind = config["model_type"]
    if config.get("is_encoder_decoder"):
        raise FamilyError(folder, kind, Property.ENCODER_DECODER)
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        layers = set(part.get("layer_types") or ())
        recurrent = "mamba" in kind or any(key.startswith(("mamba_", "ssm_")) for key in part)
        if kind not in MIXER_FAMILIES:
            if recurrent:
                raise FamilyError(folder, kind, Property.STATES)
            for layer in sorted(layers & LAYER_PROPERTIES.keys()):
                raise FamilyError(folder, kind, LAYER_PROPERTIES[layer], f"layers of type {layer}")
        for rope in rope_types(part):
            if rope in UNPACKABLE_ROPE:
                raise FamilyError(folder, kind, Property.ROPE_BY_LENGTH, f"type {rope}")


def why_not_read(folder: Path, kind: str, error: Exception) -> CheckpointError:
    """The error for a configuration that transformers did not read."""
    if isinstance(error, ImportError):
        return FamilyError(folder, kind, Property.PACKAGE, str(error).strip())
    if kind not in CONFIG_MAPPING:
        return FamilyError(folder, kind, Property.NO_CAUSAL_CLASS)
    return CheckpointError(f"{folder}: {CONFIG} cannot be read as one of {kind}: {error}")


def why_not_loaded(folder: Path, file: str, config: PretrainedConfig, error: Exception) -> CheckpointError:
    """The error for a checkpoint that transformers did not load; a FamilyError if a property of its family is why.

    file: the name of the first weight file
    """
    kind = config.model_type
    if isinstance(error, ImportError):
        return FamilyError(folder, kind, Property.PACKAGE, str(error).strip())
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return FamilyError(folder, kind, Property.NO_CAUSAL_CLASS)
    if (built := _cannot_be_built(config, ATTENTION)) is None:
        return CheckpointError(f"{folder}: {file} cannot be loaded as a decoder-only Transformer: {error}")
    if _cannot_be_built(config, "eager") is None:
        return FamilyError(folder, kind, Property.OUTSIDE_INTERFACE)
    return FamilyError(folder, kind, Property.NOT_BUILT, f"{type(built).__name__}: {built}")


def _cannot_be_built(config: PretrainedConfig, attention: str) -> Exception | None:
    """The error of building the model without weights; None where it can be built."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except Exception as error:  # a family's constructor may raise anything
        return error
    return None


PROBE = "dendro_probe"
"""The attention that records its arguments and returns zeros. A mask function is registered for it, so that models pass
a mask."""

FAR = 1 << 20
"""A distance between two tokens that no window reaches."""

KNOWN_ARGUMENTS = {
    *signature(seat_attention).parameters,
    *("dropout", "position_ids", "use_cache", "is_causal", "output_attentions", "output_router_logits", "layer_idx"),
    *("cache_position", "return_dict", "output_hidden_states", "past_key_values", "logits_to_keep"),
}
"""Arguments that our attention takes, and others that models pass and that have no effect in a forward without
cache."""


class _Probing:
    """Records of the probe about a model's layers."""

    def __init__(self, run: ForwardContext) -> None:
        self.run = run
        self.masks: dict[int, Callable[..., Any]] = {}  # mask functions, by the address of the mask made of each
        self.kept: list[Tensor] = []  # the masks, so that their addresses are not used again
        self.faults: list[tuple[Property, str]] = []
        self.seen: set[int] = set()

    def mask(self, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any) -> Tensor:
        made = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
        self.masks[made.data_ptr()] = mask_function
        self.kept.append(made)
        return made

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        window: int | None,
        others: Any,
    ) -> None:
        name = type(module).__name__
        if id(module) in self.seen:
            self.faults.append((Property.CALLED_TWICE, name))
            return
        self.seen.add(id(module))
        layout = Layout(key.shape[1], key.shape[3], value.shape[3])
        seat: Seat = module.dendro_seat  # type: ignore[assignment]  # `_take_seats` sets it
        seat.index = len(self.run.probed)
        dtypes = query.dtype, key.dtype, value.dtype
        self.run.probed.append(ProbedLayer(layout, window, query.shape[1] // key.shape[1], dtypes))
        if unknown := sorted(each for each, what in others.items() if what is not None and each not in KNOWN_ARGUMENTS):
            self.faults.append((Property.UNKNOWN_ARGUMENT, f"{name}: {', '.join(unknown)}"))
        if mask is None:
            self.faults.append((Property.BIDIRECTIONAL, f"{name} gets no mask"))
        elif mask.data_ptr() not in self.masks:
            self.faults.append((Property.OWN_MASK, name))
        elif fault := _unlike_a_window(self.masks[mask.data_ptr()], window, mask.device):
            self.faults.append((fault, f"{name}, window {window}"))


def _unlike_a_window(sees: Callable[..., Any], window: int | None, device: torch.device) -> Property | None:
    """Difference of a mask from a causal window of `window` tokens; None if there is none."""
    first = torch.zeros((), dtype=torch.int64, device=device)

    def seen(query: Tensor, key: Tensor) -> Tensor:
        return torch.as_tensor(sees(first, first, query, key), device=device).expand(query.shape)

    def of(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=device)

    try:
        if bool(seen(of(0, 5, 5, FAR), of(1, 6, 7, FAR + 1)).any()):
            return Property.BIDIRECTIONAL
        queries = torch.arange(1, FAR, device=device)
        if not bool(seen(queries, queries - 1).all()) and window != 1:
            return Property.CHUNKED
        if window is None:
            near_enough, too_far = of(FAR), of(0)
            return None if bool(seen(near_enough, too_far).all()) else Property.WINDOW_NOT_HANDED
        ends = of(window, FAR)
        inside, outside = seen(ends, ends - window + 1), seen(ends, ends - window)
        return None if bool(inside.all()) and not bool(outside.any()) else Property.WINDOW_NOT_HANDED
    except IndexError:  # the mask looks its rows up in a tensor of this step's
        return Property.OWN_MASK


_probing: list[_Probing] = []  # at most one entry: the probing that runs now


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    _probing[-1].attention(module, query, key, value, attention_mask, sliding_window, others)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _probe_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], device: Any = "cpu", **_: Any
) -> Tensor:
    return _probing[-1].mask(q_length, kv_length, mask_function, device)


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)


@contextmanager
def attending_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Context in which all layers of the model use this attention implementation."""
    configs = {id(found): found for module in model.modules() if (found := getattr(module, "config", None)) is not None}
    before = {key: config._attn_implementation_internal for key, config in configs.items() if _has_one(config)}
    try:
        for key in before:
            configs[key]._attn_implementation_internal = name
        yield
    finally:
        for key, kept in before.items():
            configs[key]._attn_implementation_internal = kept


def _has_one(config: Any) -> bool:
    return isinstance(config, PretrainedConfig) and hasattr(config, "_attn_implementation_internal")


def probe_layers(folder: Path, model: PreTrainedModel, run: ForwardContext) -> None:
    """Run a forward with the probe as attention, which adds an entry to `run.probed` for each layer that attends.
    Raises FamilyError."""
    kind = model.config.model_type
    probing = _Probing(run)
    _probing.append(probing)
    rows = torch.arange(8, device=model.device)
    try:
        with attending_by(model, PROBE), torch.inference_mode():
            model(input_ids=torch.zeros_like(rows)[None], position_ids=rows[None], use_cache=False)
    except (CheckpointError, DistError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a family's forward may raise anything
        if probing.faults:
            raise FamilyError(folder, kind, *probing.faults[0]) from error
        raise FamilyError(folder, kind, Property.UNCALLABLE, f"{type(error).__name__}: {error}") from error
    finally:
        _probing.pop()
    if probing.faults:
        raise FamilyError(folder, kind, *probing.faults[0])
    attending = sum(layer not in NOT_ATTENDING for layer in _layer_types(model))
    if len(run.probed) != attending:
        why = beside_attention(model) or (Property.OTHER_LAYERS if run.probed else Property.OUTSIDE_INTERFACE)
        seen = f"{len(run.probed)} layers call the attention interface, not {attending}"
        raise FamilyError(folder, kind, why, seen)


def _layer_types(model: PreTrainedModel) -> list[str]:
    config = model.config.get_text_config()
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def check_layer_types(folder: Path, model: PreTrainedModel) -> None:
    """Raise FamilyError for a layer type that is not supported: a short text may not show how it differs."""
    if unknown := sorted(set(_layer_types(model)) - PACKABLE_LAYERS):
        raise FamilyError(folder, model.config.model_type, Property.OTHER_LAYERS, f"of types {unknown}")


def beside_attention(model: PreTrainedModel) -> Property | None:
    """Property of a model that mixes a text's tokens otherwise than by attention, found by its class and modules; else
    None."""
    if getattr(model, "_is_stateful", False):
        return Property.STATES
    if any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return Property.CONVOLUTION
    return None
