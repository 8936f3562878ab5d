"""Tiny Llama, GPT-NeoX and Mistral checkpoints with random weights and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

Family = Literal["llama", "neox", "mistral"]
FAMILIES: tuple[Family, ...] = ("llama", "neox", "mistral")
WINDOW = 70  # of Mistral's layers
VOCABULARY = 257  # one token per byte, and the end of text
PADDED = 264  # the model's tokens; the logits of those that the tokenizer lacks must never be used
END = 256


def byte_tokenizer(count: int = 256) -> Tokenizer:
    """A byte-level BPE without merges: each of so many bytes is a token."""
    letters = sorted(ByteLevel.alphabet())[:count]
    tokenizer = Tokenizer(BPE({letter: token for token, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """One token per byte, and the end of text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Set every parameter at random, also norms and biases: a neutral one could be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "embed" in name and "out" not in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)


def make_model(family: Family, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A tiny model; `settings` are fields of its configuration."""
    common: dict[str, Any] = {
        "vocab_size": PADDED,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**common | {"num_key_value_heads": 2} | settings))
    elif family == "mistral":
        sliding = {"num_key_value_heads": 2, "sliding_window": WINDOW}
        model = MistralForCausalLM(MistralConfig(**common | sliding | settings))
    elif family == "neox":
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**common | settings))
    else:
        raise ValueError(f"{family} is none of {FAMILIES}")
    randomise(model, seed)
    return model.eval()


def make_checkpoint(folder: Path, family: Family = "llama", seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Write a checkpoint into `folder` and return the library's model of it, in float32."""
    model = make_model(family, seed, **settings)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model
