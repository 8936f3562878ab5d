"""This worker's shard of a model: the library's tensor-parallel plan, without the library's wrappers.

transformers loads each worker's slices by the model's own plan and wraps every layer in DTensors, which cost more here
than the layers do. The wrappers are replaced by plain layers and our own sums and gathers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from tree_layers.errors import CheckpointError

from verifier_service.collectives import Collectives, shard_of

LOCAL = {"colwise", "packed_colwise", "packed_rowwise", "replicated_with_grad_allreduce", "replicate"}
"""Styles that only place weights and need no exchange in a forward."""
GATHERED = {"colwise_gather_output", "colwise_rep"}
SPLIT = {"rowwise_split_input", "rowwise_rep"}
SUMMED = {"rowwise", "moe_tp_experts", "all_reduce"}
VOCABULARY = "embedding_rowwise"
BY_HEADS = "dendro_by_heads"
"""Our own style, for mixers (`heads.py`): they make their sums themselves."""

Forward = Callable[..., Any]


def check_divisible(folder: Path, config: Any, size: int) -> None:
    """Raise CheckpointError for a model whose heads cannot be dealt out evenly to the workers."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    for count, what in ((heads, "attention heads"), (groups, "key-value heads")):
        if count % size:
            raise CheckpointError(f"{folder}: its {count} {what} cannot be dealt out to {size} workers evenly")


def take_off_wrappers(folder: Path, model: PreTrainedModel) -> Callable[[Collectives], None]:
    """Replace the DTensor layers of a model that the library has sharded by plain layers with this worker's slices.

    Returns a function that adds the sums and gathers over workers, to be called once the layers have their forms. The
    head is left to the caller. Raises CheckpointError for a plan with a style that is not supported.
    """
    plan = {name: style for name, style in model.tp_plan.items() if style != BY_HEADS}
    modules = dict(model.named_modules())
    styles = {name: style for name in modules if (style := plan.get(as_rule(name))) is not None}
    if unknown := set(styles.values()) - LOCAL - GATHERED - SPLIT - SUMMED - {VOCABULARY}:
        raise CheckpointError(f"{folder}: its plan for several workers has styles {sorted(unknown)}: not supported")
    widths = {name: module.out_features for name, module in modules.items() if isinstance(module, nn.Linear)}
    inputs = {name: module.in_features for name, module in modules.items() if isinstance(module, nn.Linear)}
    locals_: dict[int, nn.Parameter] = {}  # weights that two layers share stay shared
    for name, module in modules.items():
        for key, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                if id(parameter) not in locals_:
                    locals_[id(parameter)] = nn.Parameter(parameter.to_local(), requires_grad=False)
                module._parameters[key] = locals_[id(parameter)]
        if name in styles:
            module.__dict__.pop("forward", None)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    biases: dict[str, Tensor] = {}
    for name, style in styles.items():
        if style in SUMMED | SPLIT and getattr(modules[name], "bias", None) is not None:
            biases[name] = modules[name].bias
            modules[name].register_parameter("bias", None)  # added once, after the sum
    head = model.get_output_embeddings()

    def join(group: Collectives) -> None:
        for name, style in styles.items():
            module = modules[name]
            if module is head:
                continue
            if isinstance(module, nn.Embedding):
                module.forward = _looked_up(module, group)  # type: ignore[method-assign]
            elif style in GATHERED:
                module.forward = _gathered(module.forward, widths[name], group)
            elif style in SPLIT:
                split = _split(module.forward, inputs[name], group)
                module.forward = _summed(split, biases.get(name), group)
            elif style in SUMMED:
                module.forward = _summed(module.forward, biases.get(name), group)

    return join


def as_rule(name: str) -> str:
    """A module's name as plans have it: `model.layers.3.mlp` is `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _summed(forward: Forward, bias: Tensor | None, group: Collectives) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        total = group.sum(forward(*args, **kwargs))
        return total if bias is None else total + bias

    return run


def _split(forward: Forward, inputs: int, group: Collectives) -> Forward:
    start, stop = shard_of(inputs, group.rank, group.size)
    return lambda x: forward(x[..., start:stop].contiguous())


def _gathered(forward: Forward, width: int, group: Collectives) -> Forward:
    return lambda x: group.gather(forward(x), width)


def _looked_up(module: nn.Embedding, group: Collectives) -> Forward:
    """The forward of an embedding whose rows are divided among the workers: one worker has the token's row, the others
    add zeros."""
    rows = module.weight.shape[0]
    first, _ = shard_of(module.num_embeddings, group.rank, group.size)
    module.padding_idx = None  # only for training, and may be outside this shard
    forward = module.forward

    def run(tokens: Tensor) -> Tensor:
        local = tokens - first
        mine = (local >= 0) & (local < rows)
        found = forward(local.clamp(0, rows - 1))
        return group.sum(torch.where(mine[..., None], found, torch.zeros((), dtype=found.dtype, device=found.device)))

    return run
