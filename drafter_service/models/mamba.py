"""A Mamba-1 or Mamba-2 language model, as lean as drafting needs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tree_kernels.state_step.reference import Slots
from tree_layers.mixers import Mamba1Mixer, Mamba2Mixer, Mixer, unit_rms
from tree_layers.states import States, StateShape
from tree_layers.weights import TOKENIZER, Checkpoint, CheckpointError

MAMBA1_DEFAULTS = {"state_size": 16, "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4}
MAMBA2_DEFAULTS = {"state_size": 128, "layer_norm_epsilon": 1e-5, "expand": 2, "conv_kernel": 4, "n_groups": 8}


@dataclass(frozen=True, slots=True, eq=False)
class MambaModel:
    """Embedding, layers of norm and mixer, norm and head. d model width, V tokens that the tokenizer knows."""

    embedding: Tensor  # [configured vocabulary, d]
    layers: tuple[tuple[Tensor, Mixer], ...]  # the norm's weight [d], the mixer
    norm: Tensor  # [d]
    head: Tensor  # [d, V]
    eps: float
    residual: torch.dtype  # of the sum that runs through the layers

    @classmethod
    def of(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> MambaModel:
        """Raises CheckpointError where a tensor is missing or of another shape than the configuration says."""
        config = checkpoint.config
        width, count, vocabulary = (_whole(config, k) for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise CheckpointError(f"{checkpoint.path}: hidden_act {config['hidden_act']!r} is not supported")
        try:
            known = Tokenizer.from_file(str(checkpoint.path / TOKENIZER)).get_vocab_size(with_added_tokens=True)
        except Exception as error:  # tokenizers raises bare exceptions
            raise CheckpointError(f"{checkpoint.path}: {TOKENIZER} is unreadable: {error}") from error
        if known > vocabulary:
            raise CheckpointError(f"{checkpoint.path}: {known} tokens in {TOKENIZER}, {vocabulary} in the model")

        def take(name: str, *shape: int) -> Tensor:
            return checkpoint.tensor(name, *shape).to(device)

        embedding = take("backbone.embeddings.weight", vocabulary, width).to(dtype)
        tied = config.get("tie_word_embeddings", config["model_type"] == "mamba")
        head = embedding if tied else take("lm_head.weight", vocabulary, width).to(dtype)
        make = _mamba1 if config["model_type"] == "mamba" else _mamba2
        layers = []
        for layer in range(count):
            prefix = f"backbone.layers.{layer}"
            shapes, build = make(config, width)
            tensors = {name: take(f"{prefix}.mixer.{name}", *shape) for name, shape in shapes.items()}
            layers.append((take(f"{prefix}.norm.weight", width).to(dtype), build(tensors, dtype)))
        return cls(
            embedding=embedding,
            layers=tuple(layers),
            norm=take("backbone.norm_f.weight", width).to(dtype),
            head=head[:known].t().contiguous(),
            eps=float(config.get("layer_norm_epsilon", 1e-5)),
            residual=torch.float32 if config.get("residual_in_fp32", True) else dtype,
        )

    @property
    def vocabulary(self) -> int:
        return self.head.shape[1]

    @property
    def shapes(self) -> list[StateShape]:
        return [mixer.shape for _, mixer in self.layers]

    def step(self, tokens: Tensor, states: States, source: Tensor, target: Slots) -> Tensor:
        """One token per row. tokens, source [rows]; writes the slots `target`; returns hidden [rows, d]."""
        hidden = self.embedding.index_select(0, tokens)
        for (norm, mixer), recurrent, conv in zip(self.layers, states.recurrent, states.conv, strict=True):
            hidden = hidden.to(self.residual) + mixer.step(self._norm(hidden, norm), recurrent, conv, source, target)
        return hidden

    def chain(self, tokens: Tensor, lengths: Tensor, states: States, source: Tensor, target: Slots) -> Tensor:
        """Several tokens per row, of which `lengths` [rows] count. tokens [rows, T]; returns hidden [rows, T, d]."""
        hidden = F.embedding(tokens, self.embedding)
        for (norm, mixer), recurrent, conv in zip(self.layers, states.recurrent, states.conv, strict=True):
            mixed = mixer.chain(self._norm(hidden, norm), lengths, recurrent, conv, source, target)
            hidden = hidden.to(self.residual) + mixed
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [rows, d] -> [rows, V] float32."""
        return torch.mm(self._norm(hidden, self.norm), self.head).float()

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return unit_rms(hidden.float(), self.eps).to(weight.dtype) * weight


def _mamba1(config: Mapping[str, Any], width: int) -> tuple[dict[str, tuple[int, ...]], Any]:
    """What a layer's tensors must be, and what makes a mixer of them."""
    get = {**MAMBA1_DEFAULTS, **config}
    channels, size, taps = int(get["expand"] * width), _whole(get, "state_size"), _whole(get, "conv_kernel")
    rank = get.get("time_step_rank", "auto")
    rank = math.ceil(width / 16) if rank == "auto" else int(rank)
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


def _mamba2(config: Mapping[str, Any], width: int) -> tuple[dict[str, tuple[int, ...]], Any]:
    """What a layer's tensors must be, and what makes a mixer of them."""
    get = {**MAMBA2_DEFAULTS, **config}
    channels, size, taps = int(get["expand"] * width), _whole(get, "state_size"), _whole(get, "conv_kernel")
    heads, groups = _whole(get, "num_heads"), _whole(get, "n_groups")
    if heads * _whole(get, "head_dim") != channels or heads % groups:
        raise CheckpointError(f"{heads} heads of {get['head_dim']} in {groups} groups do not make {channels} channels")
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
    low, high = (_number(value) for value in get.get("time_step_limit") or (0.0, math.inf))
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


def _whole(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a whole number of at least 1, got {value!r}")
    return value


def _number(value: Any) -> float:
    """A number of the configuration; the library writes infinity as an object."""
    return float(value["__float__"]) if isinstance(value, dict) else float(value)
