"""A costly target: computes the function of a small checkpoint at the cost of a large one.

A Transformer's MLPs get more hidden units, with random gate and up rows and zero columns in the output projection: they
are read and computed, and add zero. A Mamba-2's mixers get more groups of heads in the same way. The gated norm is per
group, so the old groups are normed as before.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from dendro.errors import BadRequest
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.checkpoints import check_library_has

PARAMETERS = 100_000_000
WIDTH_STEP = 1280
"""Widths are multiples of this, hence of 256 and 320, the block sizes of matrix libraries."""
SEED = 20
FORMAT = 1  # increase when the same source must give another costly target


def _mlps(model: PreTrainedModel) -> list[Any]:
    """The gated MLPs of a Llama-like model; raises BadRequest for any other."""
    mlps = [
        module
        for module in model.modules()
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))
    ]
    if not mlps or not hasattr(model.config, "intermediate_size"):
        raise BadRequest(
            "target", f"{model.config.model_type} has no gated MLPs of gate, up and down projections to widen"
        )
    return mlps


def costly_width(model: PreTrainedModel, parameters: int) -> int:
    """The smallest multiple of WIDTH_STEP, not below the model's width, that gives it at least `parameters`."""
    width: int = model.config.intermediate_size
    total: int = sum(parameter.numel() for parameter in model.parameters())  # tied weights are counted once
    per_unit: int = sum(3 * mlp.gate_proj.in_features for mlp in _mlps(model))
    needed = width + max(math.ceil((parameters - total) / per_unit), 0)
    return math.ceil(needed / WIDTH_STEP) * WIDTH_STEP


def _grown(linear: nn.Linear, rows: int, columns: int, generator: torch.Generator | None) -> nn.Linear:
    """The layer with `rows` outputs and `columns` inputs; new weights are random at the old ones' scale, or zero."""
    old = linear.weight.data
    grown = nn.Linear(columns, rows, bias=linear.bias is not None, device="meta", dtype=old.dtype)
    grown = grown.to_empty(device="cpu").requires_grad_(False)
    if generator is not None:
        grown.weight.copy_((torch.randn(rows, columns, generator=generator) * old.float().std()).to(old.dtype))
    else:
        grown.weight.zero_()
    grown.weight[: old.shape[0], : old.shape[1]] = old
    if linear.bias is not None:
        grown.bias.zero_()
        grown.bias[: old.shape[0]] = linear.bias.data
    return grown


def widen(model: PreTrainedModel, width: int) -> None:
    """Widen every MLP of a Llama-like model to `width` hidden units, in place; its function stays the same."""
    generator = torch.Generator().manual_seed(SEED)
    for mlp in _mlps(model):
        hidden = mlp.gate_proj.in_features
        mlp.gate_proj = _grown(mlp.gate_proj, width, hidden, generator)
        mlp.up_proj = _grown(mlp.up_proj, width, hidden, generator)
        mlp.down_proj = _grown(mlp.down_proj, hidden, width, None)
    model.config.intermediate_size = width


def add_head_groups(model: PreTrainedModel, times: int) -> PreTrainedModel:
    """A Mamba-2 model of the same function with `times` as many groups of heads, and `times` as large states."""
    generator = torch.Generator().manual_seed(SEED)
    old, config = model.config, copy.deepcopy(model.config)
    config.num_heads, config.n_groups, config.expand = old.num_heads * times, old.n_groups * times, old.expand * times
    wide: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    inner, shared = int(old.expand * old.hidden_size), old.n_groups * old.state_size
    convolved = (inner, shared, shared)  # inputs of the convolution: x, B, C

    def spread(weight: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """The rows of each part, each part followed by random rows at the scale of the old."""
        more = []
        for part in weight.split(parts):
            extra = torch.randn((times - 1) * len(part), *part.shape[1:], generator=generator)
            more += [part, (extra * weight.float().std()).to(weight.dtype)]
        return torch.cat(more)

    def grown(name: str, weight: torch.Tensor) -> torch.Tensor:
        match name.rpartition("mixer.")[2] if "mixer." in name else "":
            case "in_proj.weight" | "in_proj.bias":
                return spread(weight, (inner, *convolved, old.num_heads))
            case "conv1d.weight" | "conv1d.bias":
                return spread(weight, convolved)
            case "A_log" | "D" | "dt_bias" | "norm.weight":
                return weight.repeat(times)
            case "out_proj.weight":
                return torch.cat([weight, weight.new_zeros(len(weight), (times - 1) * inner)], 1)
        return weight

    wide.load_state_dict({name: grown(name, weight) for name, weight in model.state_dict().items()})
    return wide


def _made_costly(model: PreTrainedModel, parameters: int) -> PreTrainedModel:
    if model.config.model_type != "mamba2":
        widen(model, costly_width(model, parameters))
        return model
    total: int = sum(parameter.numel() for parameter in model.parameters())
    mixers: int = sum(parameter.numel() for name, parameter in model.named_parameters() if "mixer." in name)
    return add_head_groups(model, 1 + max(math.ceil((parameters - total) / mixers), 0))


def _digest(source: Path, parameters: int) -> str:
    """Hash of a checkpoint's weights and configuration, and of the constants of its costly target."""
    digest = hashlib.sha256(f"{FORMAT} {SEED} {WIDTH_STEP} {parameters}".encode())
    for file in sorted(source.glob("*")):
        if file.name == "config.json" or file.suffix == ".safetensors":
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def costly_checkpoint(source: Path, folder: Path | None = None, parameters: int | None = None) -> Path:
    """The folder of the costly target of the checkpoint at `source`; made once, then reused.

    An ordinary Hugging Face checkpoint of at least `parameters` parameters (None: PARAMETERS) in the dtype of its
    source, with the source's tokenizer. Raises BadRequest if the source is neither Llama-like nor a Mamba-2.
    """
    parameters = PARAMETERS if parameters is None else parameters
    if not (source / "config.json").exists():
        raise BadRequest("target", f"{source} holds no config.json")
    check_library_has(source)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dendroaspis"
    made = (folder or cache) / f"costly-{_digest(source, parameters)}"
    if made.exists():
        return made
    model = _made_costly(AutoModelForCausalLM.from_pretrained(source), parameters)
    made.parent.mkdir(parents=True, exist_ok=True)
    # Written elsewhere, then renamed: an interrupted run leaves no checkpoint that looks complete.
    with tempfile.TemporaryDirectory(dir=made.parent) as temporary:
        unfinished = Path(temporary) / "checkpoint"
        model.save_pretrained(unfinished)
        for file in source.glob("*token*"):
            shutil.copy(file, unfinished)
        unfinished.rename(made)
    return made
