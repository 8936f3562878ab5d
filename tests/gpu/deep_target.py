"""A Llama and a Mamba-2 of published sizes that compute the functions of small ones: what speculation gains then is
what it gains on the small ones' texts, at the large ones' price.

The small model's numbers are the first of each row's; the rest are zero, since every product that would write them has
zero rows. Its heads and hidden units are the first of the large model's, whose others have zero columns in the output
projections. The mean of squares of a row is smaller by the share of the zeros, so norms have smaller weights.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from cluster.measure.costly import add_head_groups
from tests.gpu.step import DEVICE

LAYER = "model.layers.{}."


def deep_config(small: LlamaConfig, hidden: int, intermediate: int, layers: int, key_heads: int) -> LlamaConfig:
    """The large model's configuration; its heads are as wide as the small one's."""
    settings = small.to_dict() | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // small.head_dim,
        "num_key_value_heads": key_heads,
        "rms_norm_eps": small.rms_norm_eps * small.hidden_size / hidden,
        "dtype": "bfloat16",
    }
    return LlamaConfig(**settings)


def head_places(small: LlamaConfig, large: LlamaConfig) -> list[int]:
    """The large model's query head for each of the small one's: heads that share keys share them there, too."""
    group, wide = (each.num_attention_heads // each.num_key_value_heads for each in (small, large))
    if wide < group or large.num_key_value_heads < small.num_key_value_heads:
        raise ValueError(f"{large.num_attention_heads} heads in groups of {wide} have no room for groups of {group}")
    return [head // group * wide + head % group for head in range(small.num_attention_heads)]


def write_deep(source: Path, folder: Path, hidden: int, intermediate: int, layers: int, key_heads: int) -> int:
    """Write the large checkpoint of the small one at `source`, with its tokenizer. Returns the number of parameters."""
    small = LlamaConfig.from_pretrained(source)
    large = deep_config(small, hidden, intermediate, layers, key_heads)
    old = {name: weight.bfloat16() for name, weight in load_file(source / "model.safetensors").items()}
    generator = torch.Generator(DEVICE).manual_seed(0)
    rows = small.hidden_size
    heads = torch.tensor(head_places(small, large))
    lines = (heads[:, None] * small.head_dim + torch.arange(small.head_dim)).flatten()  # of the small model's queries

    def read(outputs: int, inputs: int, weight: Tensor | None, at: Tensor | None = None) -> Tensor:
        """A product that reads rows: random, but for the small model's outputs, which are at `at`."""
        made = torch.randn(outputs, inputs, generator=generator, device=DEVICE).mul_(1 / math.sqrt(rows)).bfloat16()
        if weight is not None:
            places = torch.arange(len(weight)) if at is None else at
            made[places.to(DEVICE), : weight.shape[1]] = weight.to(DEVICE)
        return made.cpu()

    def written(inputs: int, weight: Tensor | None, at: Tensor | None = None) -> Tensor:
        """A product that is added to rows: zero, but for the small model's outputs and inputs."""
        made = torch.zeros(hidden, inputs, dtype=torch.bfloat16)
        if weight is not None:
            places = torch.arange(weight.shape[1]) if at is None else at
            made[: len(weight), places] = weight
        return made

    def norm(weight: Tensor | None) -> Tensor:
        made = torch.zeros(hidden)
        if weight is not None:
            made[:rows] = weight.float() * math.sqrt(rows / hidden)
        return made.bfloat16()

    words = torch.zeros(small.vocab_size, hidden, dtype=torch.bfloat16)
    words[:, :rows] = old["model.embed_tokens.weight"]
    weights = {"model.embed_tokens.weight": words, "model.norm.weight": norm(old["model.norm.weight"])}
    keys = key_heads * small.head_dim
    for layer in range(layers):
        name = LAYER.format(layer)

        def its(part: str, name: str = name) -> Tensor | None:
            return old.get(f"{name}{part}.weight")

        weights |= {
            f"{name}{part}.weight": made
            for part, made in {
                "input_layernorm": norm(its("input_layernorm")),
                "post_attention_layernorm": norm(its("post_attention_layernorm")),
                "self_attn.q_proj": read(hidden, hidden, its("self_attn.q_proj"), lines),
                "self_attn.k_proj": read(keys, hidden, its("self_attn.k_proj")),
                "self_attn.v_proj": read(keys, hidden, its("self_attn.v_proj")),
                "self_attn.o_proj": written(hidden, its("self_attn.o_proj"), lines),
                "mlp.gate_proj": read(intermediate, hidden, its("mlp.gate_proj")),
                "mlp.up_proj": read(intermediate, hidden, its("mlp.up_proj")),
                "mlp.down_proj": written(intermediate, its("mlp.down_proj")),
            }.items()
        }
    folder.mkdir(parents=True, exist_ok=True)
    large.architectures = ["LlamaForCausalLM"]
    large.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*token*"):
        shutil.copy(file, folder)
    return sum(each.numel() for each in weights.values())


def write_deep_drafter(source: Path, folder: Path, times: int, layers: int) -> int:
    """Write a Mamba-2 of the function of the one at `source`: `times` as wide, with as many groups of heads as that,
    and with more layers, which add zero. Returns the number of parameters."""
    wide = add_head_groups(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), times)
    config: Any = wide.config
    narrow, hidden, first = config.hidden_size, config.hidden_size * times, config.num_hidden_layers
    config.expand, config.hidden_size, config.num_hidden_layers = config.expand // times, hidden, layers
    config.dtype, config.architectures = "bfloat16", ["Mamba2ForCausalLM"]
    generator = torch.Generator().manual_seed(0)

    def grown(name: str, weight: Tensor, adds: bool) -> Tensor:
        match name.rpartition("mixer.")[2] if "mixer." in name else name.split(".")[-2]:
            case "in_proj.weight":
                more = torch.randn(len(weight), hidden - narrow, generator=generator) / math.sqrt(hidden)
                return torch.cat([weight, more], 1)
            case "out_proj.weight":
                return torch.cat([weight if adds else 0 * weight, weight.new_zeros(hidden - narrow, weight.shape[1])])
            case "norm" | "norm_f":  # of rows, most of whose numbers are zero
                return torch.cat([weight / math.sqrt(times), weight.new_zeros(hidden - narrow)])
            case "embeddings":
                return torch.cat([weight, weight.new_zeros(len(weight), hidden - narrow)], 1)
        return weight

    old = {name: weight for name, weight in wide.state_dict().items() if not name.startswith("lm_head")}
    weights = {}
    for name, weight in old.items():
        weights[name] = grown(name, weight, True)
        if name.startswith("backbone.layers.0."):
            for layer in range(first, layers):
                weights[name.replace(".0.", f".{layer}.", 1)] = grown(name, weight, False)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    kept = {name: weight.bfloat16().contiguous() for name, weight in weights.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for file in source.glob("*token*"):
        shutil.copy(file, folder)
    return sum(each.numel() for each in kept.values())
