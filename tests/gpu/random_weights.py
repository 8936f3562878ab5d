"""Checkpoints of any size with random weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.gpu.step import DEVICE
from tests.support.tiny_mamba import write_tokenizer


def random_weights(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Weights in bfloat16 by name. Norms are near 1, and a state decays as in a trained model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(DEVICE).manual_seed(0)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    found = {}
    for name, tensor in model.state_dict().items():
        if name in tied or "rotary" in name:
            continue
        noise = torch.randn(tensor.shape, generator=generator, device=DEVICE)
        if "norm" in name and name.endswith("weight") or name.endswith(".D"):
            made = 1 + 0.1 * noise
        elif name.endswith("A_log"):
            made = 0.5 + 0.7 * noise
        elif name.endswith("dt_bias"):
            made = -3 + noise
        elif name.endswith("bias"):
            made = 0.02 * noise
        elif "conv1d" in name:
            made = 0.5 * noise
        else:
            made = noise / math.sqrt(tensor.shape[-1])
        found[name] = made.bfloat16().cpu()
    return found


def write_random(folder: Path, config: PreTrainedConfig, words: int) -> int:
    """Write a checkpoint and a tokenizer of so many words. Returns the number of parameters."""
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    weights = random_weights(config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, words)
    return sum(each.numel() for each in weights.values())
