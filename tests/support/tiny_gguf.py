"""GGUF files for tests: tiny models, and headers with any counts and lengths."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from cluster.measure.gguf_file import write_gguf
from tests.support import tiny_models

TEMPLATE = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
END = tiny_models.END


def add_tokenizer(writer: Any) -> None:
    """Add the tokenizer of `tiny_models`, and a chat template, to a `GGUFWriter`."""
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "<|end|>"])
    writer.add_token_types([1] * END + [3])  # 3: a special token
    writer.add_token_scores([0.0] * (END + 1))  # without merges transformers looks for them here
    writer.add_eos_token_id(END)
    writer.add_chat_template(TEMPLATE)


def write_llama(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: int) -> Path:
    """Write `folder/models/tiny.gguf`, a tiny Llama with its tokenizer, made of the checkpoint `folder/source`."""
    import gguf

    source, file = folder / "source", folder / "models" / "tiny.gguf"
    source.mkdir()
    file.parent.mkdir()
    tiny_models.make_checkpoint(source, vocab_size=tiny_models.VOCABULARY, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tokenizer_model", lambda self, _: add_tokenizer(self))
        write_gguf(source, file, "float32")
    return file


FACTORS = {"Q4_K": {0: 2e-4, 2: 1e-3}, "Q6_K": {208: 2e-4}}
"""Of types that the package gguf cannot write: where a block has float16 numbers, and how large they are."""


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> Any:
    """Bytes [outputs, bytes] of a weight of one of these types."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (outputs, inputs // numbers, size), np.uint8)
    for at, scale in FACTORS[kind].items():
        factors = (scale * generator.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
        blocks[..., at : at + 2] = factors[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def text(value: str) -> bytes:
    """A string of a header."""
    return struct.pack("<Q", len(value)) + value.encode()


def whole(key: str, value: int) -> bytes:
    """A key with a number of 32 bits."""
    return text(key) + struct.pack("<II", 4, value)


def scalar(key: str, kind: int, form: str, value: float) -> bytes:
    """A key with a value of a type. form: the value's, of the module struct"""
    return text(key) + struct.pack(f"<I{form}", kind, value)


def array(key: str, kind: int, count: int, content: bytes = b"") -> bytes:
    """A key with an array that claims so many elements of a type."""
    return text(key) + struct.pack("<IIQ", 9, kind, count) + content


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry; kind 0 is float32."""
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def header(*parts: bytes, keys: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    """A file that claims so many keys and tensors, with `parts` after the counts."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


FAMILIES = {
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}


def write_family(file: Path, architecture: str, folder: Path) -> None:
    """Write a tiny model with its tokenizer to `file`, and the same to `folder` as a checkpoint. Settings that have no
    key in GGUF files are the family's defaults."""
    import gguf
    import transformers

    kinds = [getattr(transformers, name) for name in FAMILIES[architecture]]
    heads, layers = 4, 2
    width = 128 if architecture == "qwen3" else 16  # for a Qwen3 the library takes its default, whatever the file says
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers, "head_dim": width}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 2, "max_position_embeddings": 512}
    ends = {"eos_token_id": END, "bos_token_id": None, "pad_token_id": None}
    model = kinds[1](kinds[0](vocab_size=tiny_models.VOCABULARY, **sizes, **ends)).eval()
    tiny_models.randomise(model, 0)
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    writer = gguf.GGUFWriter(file, architecture)
    add_tokenizer(writer)
    writer.add_vocab_size(tiny_models.VOCABULARY)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(96)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_freq_base(_rope_base(model.config))
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    if getattr(model.config, "sliding_window", None):
        writer.add_sliding_window(model.config.sliding_window)
    kind = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, layers)
    tied = model.config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        shifted = 1.0 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0.0
        named = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(named, (weight.detach() + shifted).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_base(config: Any) -> float:
    settings = config.rope_parameters
    return float((settings if "rope_theta" in settings else settings["full_attention"])["rope_theta"])
