"""Look at checkpoints before anything is started: a missing file is then one clear line, not a replica's log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dendro.errors import BadRequest
from tree_layers.checkpoint import MAMBA_CONFIG, NO_TOKENIZER, Facts, read_facts, weight_files
from tree_layers.errors import CheckpointError

from cluster.config import Config, Drafter, Model, Target
from cluster.hub import fetched_model
from cluster.pairing import fit_of

log = logging.getLogger("dendro.checkpoints")


def check_checkpoints(config: Config) -> None:
    """Raises BadRequest, naming the field, for a checkpoint that lacks a file or a pair that does not fit together.

    Whether a model's kind is supported, and whether its weights fit its configuration, its engine says when it loads.
    """
    facts = read_cluster(config)
    for name, target in config.targets.items():
        _check_weights(target, f"targets.{name}.checkpoint")
    for name, drafter in config.drafters.items():
        _check_weights(drafter, f"drafters.{name}.checkpoint")
        for target_name in drafter.targets or config.targets:
            fit = fit_of(facts.targets[target_name], facts.drafters[name])
            if not fit.fits:
                raise BadRequest(f"drafters.{name}.checkpoint", f"does not fit target {target_name}: {fit.refusal}")
            if fit.warning:
                log.warning("drafter %s for target %s: %s", name, target_name, fit.warning)
            if fit.note:
                log.info("drafter %s for target %s: %s", name, target_name, fit.note)


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts of all models of a configuration, by their names."""

    targets: Mapping[str, Facts]
    drafters: Mapping[str, Facts]


def read_cluster(config: Config) -> ClusterFacts:
    """Raises BadRequest, naming the field, for what is missing but weights."""
    return ClusterFacts(
        {name: target_facts(name, target) for name, target in config.targets.items()},
        {name: drafter_facts(name, drafter) for name, drafter in config.drafters.items()},
    )


def target_facts(name: str, target: Target) -> Facts:
    """Facts of a target and its tokenizer. Raises BadRequest, naming the field, for what is missing but weights."""
    facts = _facts(target, f"targets.{name}")
    if facts.tokens is None:
        raise BadRequest(f"targets.{name}.checkpoint", f"{facts.folder}: {NO_TOKENIZER}")
    return facts


def drafter_facts(name: str, drafter: Drafter) -> Facts:
    """Facts of a drafter, which state-spaces publishes without a tokenizer. Raises BadRequest, naming the field, for
    what is missing but weights."""
    facts = _facts(drafter, f"drafters.{name}")
    if facts.tokens is None and facts.unpadded is None:
        raise BadRequest(f"drafters.{name}.checkpoint", f"{facts.folder}: {NO_TOKENIZER}")
    return facts


def _facts(model: Model, where: str) -> Facts:
    model = fetched_model(where, model, weights=False)
    try:
        return read_facts(model.checkpoint, model.tokenizer)
    except CheckpointError as error:
        at_tokenizer = model.tokenizer is not None and str(error).startswith(f"{model.tokenizer}:")
        raise BadRequest(f"{where}.{'tokenizer' if at_tokenizer else 'checkpoint'}", str(error)) from error


def _check_weights(model: Model, where: str) -> None:
    if model.checkpoint_name:  # each node fetches them for itself, and says what is missing
        return
    try:
        weight_files(model.checkpoint)
    except CheckpointError as error:
        raise BadRequest(where, str(error)) from error


def check_library_has(checkpoint: Path, where: str = "target") -> None:
    """Raises BadRequest for a model that transformers would load as another, to compare with or to change."""
    if (checkpoint / MAMBA_CONFIG).exists():
        raise BadRequest(where, f"{checkpoint} is a Mamba-in-Llama, which transformers has no class for: name another")
