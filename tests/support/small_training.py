"""Tiny targets with a tokenizer of words of their own, text that can be learnt, and short training runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel

from cluster.config import Config
from cluster.training.data import DataSource
from cluster.training.models import checked_target
from cluster.training.plan import DrafterPlan, Length
from drafter_service.training.sizes import StudentSize
from tests.support import tiny_mamba, tiny_models

CPU = torch.device("cpu")
WORDS = 90
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}</s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def write_words(folder: Path, template: str = "") -> None:
    """A tokenizer of words, 1 the end of text. The bundled demo's has none of these tokens."""
    words = {"w0": 0, "</s>": 1, "<user>": 2, "<assistant>": 3} | {f"w{token}": token for token in range(4, WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": template or None}))


def words(seed: int, count: int) -> str:
    """Text in which a word mostly follows another by a rule, so that it can be learnt."""
    rng = np.random.default_rng(seed)
    found = [4]
    for _ in range(count):
        found.append(int(rng.integers(4, WORDS)) if rng.random() < 0.1 else 4 + (7 * found[-1] + 3) % (WORDS - 4))
    return " ".join(f"w{word}" for word in found)


def make_target(folder: Path, kind: str, template: str = "") -> PreTrainedModel:
    """A target with more rows than tokens."""
    if kind == "llama":
        model = tiny_models.make_model("llama", vocab_size=96, bos_token_id=1, eos_token_id=1, pad_token_id=1)
    else:
        model = tiny_mamba.make_checkpoint(folder, "mamba2", config=tiny_mamba.tiny_config("mamba2", 96))
        model.generation_config.eos_token_id = model.config.eos_token_id = 1
    model.save_pretrained(folder)
    write_words(folder, template)
    return model


def write_cluster(folder: Path) -> Path:
    """A configuration of two tiny targets, without drafters."""
    for kind in ("llama", "mamba2"):
        (folder / kind).mkdir()
        make_target(folder / kind, kind)
    shared = {"dtype": "float32", "max_length": 256, "resources": {"cpu": 0.5}}
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"targets": {kind: {"checkpoint": kind, **shared} for kind in ("llama", "mamba2")}}))
    return file


def write_text(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_text(words(0, 4000))
    return file


def plan_of(cluster_file: Path, text_file: Path, name: str = "llama", **changes: Any) -> DrafterPlan:
    """A short run for the target of that name, or for a `target` among the changes."""
    target = changes.get("target") or Config.load(cluster_file).targets[name]
    settings: dict[str, Any] = {
        "target_name": name,
        "target": target,
        "facts": checked_target(name, target),
        "source": DataSource((text_file,)),
        "kind": "mamba2",
        "size": StudentSize(32, 1),
        "start": None,
        "length": Length(steps=6),
        "row_tokens": 32,
        "seed": 0,
        "out": cluster_file.parent / "drafter",
        "device": CPU,
        "compile_forward": False,
        "command": "dendro train drafter",
    }
    return DrafterPlan(**settings | changes)
