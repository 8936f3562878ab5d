"""Mamba-1 and Mamba-2 language models, reduced to what drafting needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from tree_layers.checkpoint import whole
from tree_layers.errors import CheckpointError
from tree_layers.mixers import Mamba1Mixer, Mamba2Mixer, turned
from tree_layers.weights import Checkpoint

from drafter_service.models.backbone import Backbone, draft_ids_of
from drafter_service.models.inputs import InputMemory
from drafter_service.models.states import StateMemory

NO_END = 2**31 - 1
"""`max_length` of recurrent models, which have no limit of their own: the largest token count."""

MAMBA1_DEFAULTS = {"state_size": 16, "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "time_step_rank": "auto"}
MAMBA2_DEFAULTS = {"state_size": 128, "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 8}


class Mamba1Model(Backbone[Mamba1Mixer]):
    """A Mamba-1 drafter; its node slots hold states."""

    max_length = NO_END

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Mamba1Model:
        """Make the model. Raises CheckpointError for a tensor that is missing or does not fit the configuration."""
        return cls(**_parts(checkpoint, dtype, device, _mamba1))

    def memory(self, texts: int, nodes: int) -> StateMemory:
        return StateMemory(self, texts, nodes)


class Mamba2Model(Backbone[Mamba2Mixer]):
    """A Mamba-2 drafter; its node slots hold inputs."""

    max_length = NO_END

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Mamba2Model:
        """Make the model. Raises CheckpointError for a tensor that is missing or does not fit the configuration."""
        return cls(**_parts(checkpoint, dtype, device, _mamba2))

    def memory(self, texts: int, nodes: int) -> InputMemory:
        return InputMemory(self, texts, nodes)


def _parts(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, make: Callable[[Checkpoint, int], Any]
) -> dict[str, Any]:
    """Read the fields of a `Backbone` from a checkpoint. make: shapes and maker of a mixer"""
    config, keys = checkpoint.config, ("hidden_size", "num_hidden_layers", "vocab_size")
    width, count, vocabulary = (whole(checkpoint.path, config, key) for key in keys)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{checkpoint.path}: hidden_act {config['hidden_act']!r} is not supported")
    if config.get("rescale_prenorm_residual"):  # initialisation, which transformers applies to loaded weights, too
        raise CheckpointError(f"{checkpoint.path}: rescale_prenorm_residual True is not supported in a drafter")

    def take(name: str, *shape: int) -> Tensor:
        return checkpoint.tensor(name, *shape).to(device)

    tied = bool(config.get("tie_word_embeddings", config["model_type"] == "mamba"))
    embedding, head = checkpoint.embedding_and_head(
        "backbone.embeddings.weight", "lm_head.weight", tied, vocabulary, width
    )
    layers = []
    for layer in range(count):
        prefix = f"backbone.layers.{layer}"
        shapes, build = make(checkpoint, width)
        tensors = {name: take(f"{prefix}.mixer.{name}", *shape) for name, shape in shapes.items()}
        layers.append((take(f"{prefix}.norm.weight", width).to(dtype), build(tensors, dtype)))
    return {
        "embedding": checkpoint.read_embedding(embedding).to(device, dtype),
        "layers": tuple(layers),
        "norm": take("backbone.norm_f.weight", width).to(dtype),
        "head": turned(head[: checkpoint.facts.vocabulary].to(device, dtype), dtype),
        "eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "draft_ids": draft_ids_of(checkpoint),
        "residual": torch.float32 if config.get("residual_in_fp32", True) else dtype,
    }


def _mamba1(checkpoint: Checkpoint, width: int) -> tuple[dict[str, tuple[int, ...]], Any]:
    """The shapes of a layer's tensors, and the function that makes a mixer of them."""
    get = {**MAMBA1_DEFAULTS, **checkpoint.config}
    if get["time_step_rank"] == "auto":
        get["time_step_rank"] = math.ceil(width / 16)
    keys = ("intermediate_size", "state_size", "conv_kernel", "time_step_rank")
    channels, size, taps, rank = (whole(checkpoint.path, get, key) for key in keys)
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (2 * channels, width),
        "conv1d.weight": (channels, 1, taps),
        "x_proj.weight": (rank + 2 * size, channels),
        "dt_proj.weight": (channels, rank),
        "dt_proj.bias": (channels,),
        "A_log": (channels, size),
        "D": (channels,),
        "out_proj.weight": (width, channels),
    }
    shapes |= _biases(get, conv=channels, inner=2 * channels, outer=width)
    return shapes, Mamba1Mixer.of


def _mamba2(checkpoint: Checkpoint, width: int) -> tuple[dict[str, tuple[int, ...]], Any]:
    """The shapes of a layer's tensors, and the function that makes a mixer of them."""
    get = {**MAMBA2_DEFAULTS, **checkpoint.config}
    keys = ("intermediate_size", "state_size", "conv_kernel", "num_heads", "head_dim", "n_groups")
    channels, size, taps, heads, head, groups = (whole(checkpoint.path, get, key) for key in keys)
    if heads * head != channels or heads % groups:
        raise CheckpointError(
            f"{checkpoint.path}: num_heads {heads} must be a multiple of n_groups {groups}, and times head_dim {head} "
            f"be intermediate_size {channels}"
        )
    mixed = channels + 2 * groups * size
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (channels + mixed + heads, width),
        "conv1d.weight": (mixed, 1, taps),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "norm.weight": (channels,),
        "out_proj.weight": (width, channels),
    }
    shapes |= _biases(get, conv=mixed, inner=channels + mixed + heads, outer=width)
    low, high = time_step_limit(get)
    eps = float(get["layer_norm_epsilon"])

    def build(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mamba2Mixer:
        return Mamba2Mixer.of(tensors, dtype, groups, size, eps, (low, high))

    return shapes, build


def _biases(config: Mapping[str, Any], conv: int, inner: int, outer: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if config.get("use_conv_bias", True):
        shapes["conv1d.bias"] = (conv,)
    if config.get("use_bias", False):
        shapes |= {"in_proj.bias": (inner,), "out_proj.bias": (outer,)}
    return shapes


def time_step_limit(config: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the greatest dt of a Mamba-2's configuration, in which transformers writes infinity as an
    object."""
    low, high = config.get("time_step_limit") or (0.0, math.inf)
    return _number(low), _number(high)


def _number(value: Any) -> float:
    return float(value["__float__"]) if isinstance(value, dict) else float(value)
