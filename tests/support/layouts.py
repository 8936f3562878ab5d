"""Writes the files of checkpoints in their published forms."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FORMS = {"bin": ("pytorch_model", "bin", 1), "bin-shards": ("pytorch_model", "bin", 2)}
FORMS |= {"safetensors-shards": ("model", "safetensors", 3)}


def copy_as(folder: Path, to: Path, form: str) -> Path:
    """A copy of a checkpoint with one `model.safetensors`, whose weights are in files of another form."""
    stem, suffix, count = FORMS[form]
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for shard in range(count):
        file = f"{stem}.{suffix}" if count == 1 else f"{stem}-{shard + 1:05}-of-{count:05}.{suffix}"
        part = {name: tensors[name] for name in names[shard::count]}
        if suffix == "bin":
            torch.save(part, to / file)
        else:
            save_file(part, to / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if count > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (to / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return to


def sentencepiece(pieces: Iterable[tuple[str, int]]) -> bytes:
    """A SentencePiece model, BPE with byte fallback, of pieces: texts and types.

    Types are 1 normal, 2 unknown, 3 control and 6 byte. The first three pieces are <unk>, <s> and </s>.
    """

    def varint(value: int) -> bytes:
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    def part(field: int, content: bytes) -> bytes:
        return varint(field << 3 | 2) + varint(len(content)) + content

    def number(field: int, value: int) -> bytes:
        return varint(field << 3) + varint(value)

    model = b"".join(
        part(1, part(1, text.encode()) + b"\x15" + struct.pack("<f", -token) + number(3, kind))
        for token, (text, kind) in enumerate(pieces)
    )
    bpe = 2
    trainer = number(3, bpe) + number(35, 1) + number(40, 0) + number(41, 1) + number(42, 2)
    return model + part(2, trainer)
