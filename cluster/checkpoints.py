"""Look at checkpoints before anything is started: a missing file is then one clear line, not a replica's log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dendro.errors import BadRequest

from cluster.config import Config

INDEX = "model.safetensors.index.json"
MIXERS = "mamba_config.json"
"""Of Mamba-in-Llama: without it, transformers takes such a checkpoint for a Llama without some of its attention."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def check_checkpoints(config: Config) -> None:
    """Raises BadRequest, naming the field, for a checkpoint that lacks a file or a pair that does not fit together.

    Whether a model's kind is supported, and whether its weights fit its configuration, its engine says when it loads.
    """
    vocabularies = {}
    for name, target in config.targets.items():
        where = f"targets.{name}.checkpoint"
        vocabularies[name] = _vocabulary(target.checkpoint, where)
        if not any((target.tokenizer_folder / file).exists() for file in TOKENIZER_FILES):
            hint = "" if target.tokenizer else "; `tokenizer:` names another folder that has one"
            raise BadRequest(
                f"targets.{name}.{target.tokenizer_field}", f"{target.tokenizer_folder} has no tokenizer.json{hint}"
            )
    for name, drafter in config.drafters.items():
        where = f"drafters.{name}.checkpoint"
        vocabulary = _vocabulary(drafter.checkpoint, where)
        for target_name in drafter.targets or config.targets:
            if vocabulary != vocabularies[target_name]:
                raise BadRequest(
                    where, f"has a vocabulary of {vocabulary}, target {target_name} one of {vocabularies[target_name]}"
                )


def check_library_has(checkpoint: Path, where: str = "target") -> None:
    """Raises BadRequest for a model that transformers would load as another, to compare with or to change."""
    if (checkpoint / MIXERS).exists():
        raise BadRequest(where, f"{checkpoint} is a Mamba-in-Llama, which transformers has no class for: name another")


def _vocabulary(folder: Path, where: str) -> int:
    """The vocabulary of a checkpoint whose files are all there."""
    said = read_json(folder / "config.json", where)
    if (folder / INDEX).exists():
        files = set(read_json(folder / INDEX, where).get("weight_map", {}).values())
    elif (folder / "pytorch_model.bin").exists():  # state-spaces' own layout
        files = {"pytorch_model.bin"}
    else:
        files = {"model.safetensors"}
    for file in sorted(files):
        if not (folder / file).exists():
            raise BadRequest(where, f"{folder} has no {file}")
    vocabulary = said.get("vocab_size")
    if not isinstance(vocabulary, int):
        raise BadRequest(where, f"{folder}/config.json names no vocab_size")
    # state-spaces' layout names the tokens in use and pads the matrix
    multiple = said.get("pad_vocab_size_multiple", 1)
    return -(-vocabulary // multiple) * multiple


def read_json(path: Path, where: str) -> dict[str, Any]:
    """A JSON object of a checkpoint; raises BadRequest naming the field `where`."""
    try:
        said = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadRequest(where, f"there is no {path}") from None
    except (OSError, ValueError) as error:
        raise BadRequest(where, f"{path} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise BadRequest(where, f"{path} is not a JSON object")
    return said
