"""The same checkpoint in the other layouts that are published."""

from __future__ import annotations

import json
import shutil
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
