"""Tiny Mamba-1 and Mamba-2 checkpoints with random weights, in Hugging Face's layout and in state-spaces' own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

Family = Literal["mamba", "mamba2"]
FAMILIES: tuple[Family, ...] = ("mamba", "mamba2")
VOCABULARY = 96
PADDED = 104  # the model's tokens; the logits of those that the tokenizer lacks must never be used


def tiny_config(family: Family, vocabulary: int = PADDED, **changes: Any) -> MambaConfig | Mamba2Config:
    common: dict[str, Any] = {"vocab_size": vocabulary, "num_hidden_layers": 2, "hidden_size": 32, "state_size": 8}
    if family == "mamba":
        return MambaConfig(**{**common, "tie_word_embeddings": True, **changes})
    # Two groups of two heads, and a limit on dt that some tokens reach.
    heads = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16}
    return Mamba2Config(**{**common, **heads, "time_step_limit": (0.02, 2.0), "use_bias": True, **changes})


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Set every parameter at random, also norms, A_log, D and biases: a neutral one could be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or name.endswith(".D"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(0.5 + 0.7 * noise)
            elif name.endswith("dt_bias") or name.endswith("dt_proj.bias"):
                parameter.copy_(-2 + noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "conv1d" in name:
                parameter.copy_(0.5 * noise)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.6 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))


def write_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    words = {f"w{token}": token for token in range(vocabulary)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def make_checkpoint(
    folder: Path, family: Family, seed: int = 0, config: MambaConfig | Mamba2Config | None = None
) -> PreTrainedModel:
    """Write a Hugging Face checkpoint into `folder` and return the library's model of it, in float32."""
    config = config or tiny_config(family)
    model = MambaForCausalLM(config) if isinstance(config, MambaConfig) else Mamba2ForCausalLM(config)
    randomise(model, seed)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.eval()


def make_state_spaces(folder: Path, model: PreTrainedModel) -> None:
    """Write a model in the layout of state-spaces' releases: other tensor names and configuration keys, pickled."""
    config = model.config
    if isinstance(config, MambaConfig):
        ssm = {"d_state": config.state_size}
    else:
        ssm = {
            "layer": "Mamba2",
            "d_state": config.state_size,
            "headdim": config.head_dim,
            "ngroups": config.n_groups,
            "bias": config.use_bias,
            "dt_limit": list(config.time_step_limit),
        }
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "d_model": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "vocab_size": PADDED - 3,  # padded to a multiple of eight when read
        "ssm_cfg": ssm,
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "tie_embeddings": config.tie_word_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {name.replace("embeddings", "embedding"): tensor for name, tensor in model.state_dict().items()}
    torch.save(tensors, folder / "pytorch_model.bin")
    write_tokenizer(folder)
