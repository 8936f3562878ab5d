"""GGUF files for tests: tiny models, and headers with any counts and lengths."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from tokenizers.pre_tokenizers import ByteLevel

from cluster.bench.gguf_file import write_gguf

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


def write_llama(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write `folder/models/tiny.gguf`, a tiny Llama with its tokenizer, made of the checkpoint `folder/source`."""
    import gguf

    source, file = folder / "source", folder / "models" / "tiny.gguf"
    source.mkdir()
    file.parent.mkdir()
    tiny_models.make_checkpoint(source, vocab_size=tiny_models.VOCABULARY)
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tokenizer_model", lambda self, _: add_tokenizer(self))
        write_gguf(source, file, "float32")
    return file


def text(value: str) -> bytes:
    """A string of a header."""
    return struct.pack("<Q", len(value)) + value.encode()


def whole(key: str, value: int) -> bytes:
    """A key with a number of 32 bits."""
    return text(key) + struct.pack("<II", 4, value)


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
