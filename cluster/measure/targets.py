"""The targets that benches measure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tree_layers.checkpoint import weight_files
from tree_layers.headers import tensor_shapes

from cluster.config import Config, demo_config
from cluster.measure.costly import costly_checkpoint

DEMO = "demo"
COSTLY = "costly"
MAMBA2 = "mamba2"
"""The costly form of the demo's Mamba-2 target."""
MAMBA2_TARGET = "target_mamba2"  # folder among the demo's models
THREADS = 2


MEASURED = {DEMO: (DEMO,), COSTLY: (COSTLY,), "both": (COSTLY, DEMO), MAMBA2: (MAMBA2,)}
"""Value of --target -> the targets to measure."""


def target_config(models: Path, name: str) -> Config:
    """The demo's configuration with THREADS threads; a name other than `demo` replaces its target by a costly one.

    The prefix cache is off: prompts repeat, and the library has none. The demo's proposers do not use earlier answers:
    these contain the next ones, as all rows give the same answers.
    """
    config = demo_config(models)
    (target,) = config.targets.values()
    checkpoint = target.checkpoint
    if name != DEMO:
        checkpoint = costly_checkpoint(checkpoint if name == COSTLY else models / MAMBA2_TARGET)
    swapped = target.model_copy(update={"checkpoint": checkpoint, "threads": THREADS, "share_prefixes": False})
    return config.model_copy(update={"targets": {name: swapped}})


def parameter_count(checkpoint: Path) -> int:
    """Parameters of a checkpoint, by the headers of its weight files; tied ones are stored and counted once."""
    return sum(map(math.prod, tensor_shapes(weight_files(checkpoint)).values()))


def target_facts(config: Config) -> dict[str, Any]:
    """Facts of the one target of a configuration, for a report."""
    (target,) = config.targets.values()
    drafters = ", ".join(config.drafters) or "none"
    return {"parameters": parameter_count(target.checkpoint), "dtype": target.dtype, "drafter": drafters}
