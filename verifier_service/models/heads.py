"""Sharding of mixers by heads, of Mamba-1's by channels.

transformers has no tensor-parallel plan for mixers: rows of in_proj are pieces of several kinds, which none of its
styles can deal out. So we add a style of ours to its plan, which shrinks the mixers before their weights are read, and
read the checkpoint ourselves: of each mixer's tensors only this worker's part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
from tree_layers.errors import CheckpointError
from tree_layers.library_mixers import is_mixer
from tree_layers.tree_mixers import silu

from verifier_service.collectives import Collectives, shard_of
from verifier_service.models.reading import open_tensors
from verifier_service.models.sharded import BY_HEADS, VOCABULARY, as_rule

Range = tuple[int, int]


def repeats_of(mixer: Any) -> int:
    """Number of consecutive heads that share one x, and of groups of C that share one B (`MixerLayout.repeats`)."""
    return int(getattr(mixer, "repeats", 1))


@dataclass(frozen=True, slots=True)
class TensorRanges:
    """Ranges of a tensor along one dimension, side by side."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def of(self, whole: Any) -> Tensor:
        """These ranges of a tensor, or of a file's tensor, of which nothing else is read."""
        before = (slice(None),) * self.dim
        return torch.cat([whole[(*before, slice(start, stop))] for start, stop in self.ranges], self.dim)


@dataclass(frozen=True, slots=True)
class _PartOfFile:
    """A file's tensor of which only a part is read, when transformers indexes all of it."""

    whole: Any
    part: TensorRanges

    def __getitem__(self, all_of_it: object) -> Tensor:
        return self.part.of(self.whole)


class SpreadNorm(nn.Module):
    """The gated norm of a group of channels that spans workers: the squares of the group are summed over the
    workers."""

    group: Collectives

    def __init__(self, norm: Any, channels: int, places: int, place: int) -> None:
        """norm: the whole model's norm   channels: channels of one group   places: number of groups
        place: this worker's group"""
        super().__init__()
        self.weight = norm.weight
        self.eps = norm.variance_epsilon
        self.gate_first = not getattr(norm, "norm_before_gate", False)
        self.channels = channels
        self.places = places
        self.place = place

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Norm this worker's channels y [..., channels] float32, gated."""
        gate = silu(gate.float())
        if self.gate_first:
            y = y * gate
        squares = y.new_zeros(*y.shape[:-1], self.places)
        squares[..., self.place] = y.square().sum(-1)  # every worker adds only to its own group
        mean = self.group.sum(squares)[..., self.place, None] / self.channels
        y = self.weight * (y * torch.rsqrt(mean + self.eps))
        return y if self.gate_first else y * gate


class ByHeads(TensorParallelLayer):
    """A style of transformers' plans: a mixer is shrunk to this worker's heads before weights are read."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        if is_mixer(module):  # a family may have other layers of the same name
            shrink(module, mesh.get_local_rank(), mesh.size())
        return module


ALL_PARALLEL_STYLES.register(BY_HEADS, ByHeads())


def parts_of(mixer: Any, rank: int, size: int) -> dict[str, TensorRanges]:
    """A worker's ranges of a mixer's parameters, by name; parameters that are not named are held whole by every worker.
    Raises ValueError, with the numbers, where the mixer cannot be dealt out evenly."""
    inner = mixer.intermediate_size
    if hasattr(mixer, "x_proj"):
        mine = _share(inner, "channels of a mixer", rank, size)
        channels = TensorRanges(0, (mine,))
        dealt = {
            "in_proj.weight": TensorRanges(0, (mine, _after(inner, mine))),
            "x_proj.weight": TensorRanges(1, (mine,)),
            "out_proj.weight": TensorRanges(1, (mine,)),
        }
        whole = ("conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias", "A_log", "D")
        dealt |= dict.fromkeys(whole, channels)
    else:
        heads, width = mixer.num_heads, inner // mixer.num_heads
        mine = _share(heads, "heads of a mixer", rank, size)
        repeats = repeats_of(mixer)
        x, B, C = (
            _scaled(_groups_of(count, rank, size), each)
            for count, each in (
                (heads // repeats, width),
                (mixer.n_groups, mixer.ssm_state_size),
                (mixer.n_groups * repeats, mixer.ssm_state_size),
            )
        )
        after_x = inner // repeats
        after_B = after_x + mixer.n_groups * mixer.ssm_state_size
        gate = _scaled(mine, width)
        seen = (x, _after(after_x, B), _after(after_B, C))
        rows = (gate, *(_after(inner, each) for each in seen), _after(inner + mixer.conv_dim, mine))
        dealt = {
            "in_proj.weight": TensorRanges(0, rows),
            "out_proj.weight": TensorRanges(1, (gate,)),
            "norm.weight": TensorRanges(0, (gate,)),
        }
        dealt |= dict.fromkeys(("conv1d.weight", "conv1d.bias"), TensorRanges(0, seen))
        dealt |= dict.fromkeys(("A_log", "D", "dt_bias"), TensorRanges(0, (mine,)))
    dealt["in_proj.bias"] = dealt["in_proj.weight"]
    there = {name for name, _ in mixer.named_parameters()}
    return {name: part for name, part in dealt.items() if name in there}


def shrink(mixer: Any, rank: int, size: int) -> None:
    """Shrink a whole mixer without weights (on torch's `meta`) to this worker's heads."""
    dealt = parts_of(mixer, rank, size)
    for name, part in dealt.items():
        owner, _, key = name.rpartition(".")
        module = mixer.get_submodule(owner)
        whole = module._parameters[key]
        shape = list(whole.shape)
        shape[part.dim] = part.size
        module._parameters[key] = nn.Parameter(whole.new_empty(shape), requires_grad=False)
    for module in mixer.children():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    mixer.dealt_rows = dealt["in_proj.weight"]  # read by vectors with one number for each row of in_proj (`mup_vector`)
    if not hasattr(mixer, "x_proj"):
        repeats = repeats_of(mixer)
        whole_groups = mixer.n_groups * repeats  # groups of the norm, and of C
        first, last = _groups_of(whole_groups, rank, size)
        if whole_groups < size and not isinstance(mixer.norm, nn.Identity):
            mixer.norm = SpreadNorm(mixer.norm, mixer.intermediate_size // whole_groups, whole_groups, first)
        elif hasattr(mixer.norm, "n_groups"):
            mixer.norm.n_groups = last - first
        own, others = _groups_of(mixer.num_heads // repeats, rank, size)
        mixer.num_heads //= size
        if repeats > 1:
            mixer.repeats = mixer.num_heads // (others - own)
        mixer.n_groups = (last - first) // repeats_of(mixer)
        mixer.conv_dim = mixer.conv1d.weight.shape[0]
    mixer.intermediate_size //= size
    mixer.conv1d.in_channels = mixer.conv1d.out_channels = mixer.conv1d.groups = mixer.conv1d.weight.shape[0]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Plan of a worker's shard of a model with mixers."""

    kind: type[PreTrainedModel]
    plan: dict[str, str]  # styles that transformers uses beside the family's own
    parts: dict[str, TensorRanges]  # ranges of the mixers' parameters, by name from `layers.` on

    @contextmanager
    def tensors(self, folder: Path) -> Iterator[dict[str, Any]]:
        """A checkpoint's tensors, or this worker's parts of them, read on demand."""
        with open_tensors(folder) as found:
            yield {
                name: whole if (part := self.parts.get(_in_layers(name))) is None else _PartOfFile(whole, part)
                for name, whole in found.items()
            }


def plan_shards(folder: Path, config: Any, rank: int, size: int) -> ShardPlan:
    """Plan a model's shards. Raises CheckpointError, with the numbers, where its mixers cannot be dealt out evenly."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        whole: PreTrainedModel = kind(copy.deepcopy(config))
    names = {id(module): name for name, module in whole.named_modules()}
    plan = {
        names[id(whole.get_input_embeddings())]: VOCABULARY,
        names[id(whole.get_output_embeddings())]: "colwise_gather_output",
    }
    parts: dict[str, TensorRanges] = {}
    for name, module in whole.named_modules():
        if is_mixer(module):
            plan[as_rule(name)] = BY_HEADS
            try:
                dealt = parts_of(module, rank, size)
            except ValueError as error:
                raise CheckpointError(f"{folder}: {error}") from error
            parts |= {_in_layers(f"{name}.{parameter}"): part for parameter, part in dealt.items()}
        elif style := _style_of(module, size):
            plan |= {f"{as_rule(name)}.{layer}": each for layer, each in style.items()}
    return ShardPlan(kind, plan, parts)


def _style_of(module: Any, size: int) -> dict[str, str]:
    """Styles of the linear layers of an attention or an MLP: the families with mixers have no plan for them. Empty
    where they have another form or cannot be dealt out evenly: then every worker has all of it."""
    children = dict(module.named_children())
    layers = {name: layer for name, layer in children.items() if isinstance(layer, nn.Linear)}
    kind = layers.keys()
    if kind == {"q_proj", "k_proj", "v_proj", "o_proj"} and len(children) == len(layers):
        counts = [layers[name].out_features // module.head_dim for name in ("q_proj", "k_proj")]
        found = dict.fromkeys(layers, "colwise") | {"o_proj": "rowwise"}
    elif kind == {"gate_proj", "up_proj", "down_proj"} or kind == {"up_proj", "down_proj"}:
        counts = [layers["down_proj"].in_features]
        found = dict.fromkeys(layers, "colwise") | {"down_proj": "rowwise"}
    elif kind == {"input_linear", "output_linear"}:
        counts = [layers["output_linear"].in_features]
        found = {"input_linear": "packed_colwise", "output_linear": "rowwise"}
    else:
        return {}
    return {} if any(count % size for count in counts) else found


def _in_layers(name: str) -> str:
    """A parameter's name from `layers.` on: the part before it differs between a file and the model."""
    return name[max(name.rfind("layers."), 0) :]


def _share(count: int, what: str, rank: int, size: int) -> Range:
    if count % size:
        raise ValueError(f"its {count} {what} cannot be dealt out to {size} workers evenly")
    return shard_of(count, rank, size)


def _groups_of(groups: int, rank: int, size: int) -> Range:
    """The groups that a worker's heads use; several workers may use one."""
    if size % groups == 0:
        first = rank * groups // size
        return first, first + 1
    return _share(groups, "groups of heads of a mixer", rank, size)


def _after(offset: int, part: Range) -> Range:
    return offset + part[0], offset + part[1]


def _scaled(part: Range, each: int) -> Range:
    return part[0] * each, part[1] * each
