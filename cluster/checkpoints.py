"""Checks checkpoints before anything is started, so that a missing file is one clear error, not a replica's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dendro.errors import BadRequest
from dendro.modes import VerificationMode
from tree_layers.checkpoint import (
    MAMBA_CONFIG,
    NO_TOKENIZER,
    Facts,
    read_facts,
    refuse_draft_vocabulary,
    refuse_quantised,
    weight_files,
)
from tree_layers.errors import CheckpointError

from cluster.config import Config, DrafterConfig, ModelConfig, TargetConfig
from cluster.hub import fetched_model
from cluster.model_paths import is_gguf
from cluster.pairing import Pairing, pairing_of

log = logging.getLogger("dendro.checkpoints")


def check_checkpoints(config: Config) -> None:
    """Raises BadRequest, naming the field, for a checkpoint that lacks a file or a pair that does not fit together.

    Whether a model's kind is supported, and whether its weights fit its configuration, is checked by its engine when it
    loads.
    """
    facts = read_cluster(config)
    for section, models in (("targets", config.targets), ("drafters", config.drafters)):
        for name, model in models.items():
            check_weights(model, f"{section}.{name}.checkpoint")
    for name, drafter in config.drafters.items():
        check_head(name, drafter)
    check_pairs(config, facts)


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts of all models of a configuration, by their names."""

    targets: Mapping[str, Facts]
    drafters: Mapping[str, Facts]


def read_cluster(config: Config) -> ClusterFacts:
    """Raises BadRequest, naming the field, for missing files other than weights."""
    return ClusterFacts(
        {name: target_facts(name, target) for name, target in config.targets.items()},
        {name: drafter_facts(name, drafter) for name, drafter in config.drafters.items()},
    )


def pairs_of(config: Config, facts: ClusterFacts) -> Iterator[tuple[str, str, Pairing]]:
    """Every drafter, each target that it is configured for, and how it serves that target."""
    for name, drafter in config.drafters.items():
        for target in drafter.targets or config.targets:
            yield name, target, pairing_of(facts.targets[target], facts.drafters[name], drafter.bridge)


def check_pairs(config: Config, facts: ClusterFacts) -> None:
    """Raises BadRequest, naming the field, for a drafter that does not fit one of its targets."""
    for drafter, target, pairing in pairs_of(config, facts):
        fit = pairing.fit
        if pairing.refusal:
            raise misfit(drafter, target, pairing)
        if pairing.bridge:
            if drawn := [mode for mode in config.verification_modes if mode is not VerificationMode.NAIVE]:
                reason = f"{drawn[0]} needs drafters of the target's tokens; {drafter} has a bridge to {target}"
                raise BadRequest("verification_modes", reason)
            log.info("drafter %s for target %s: bridge %s, as %s", drafter, target, pairing.bridge, pairing.why)
            continue
        if fit.warning:
            log.warning("drafter %s for target %s: %s", drafter, target, fit.warning)
        if fit.note:
            log.info("drafter %s for target %s: %s", drafter, target, fit.note)


def misfit(drafter: str, target: str, pairing: Pairing) -> BadRequest:
    """The error for a pair that does not fit."""
    return BadRequest(f"drafters.{drafter}.checkpoint", f"does not fit target {target}: {pairing.refusal}")


def target_facts(name: str, target: TargetConfig) -> Facts:
    """Facts of a target and its tokenizer. Raises BadRequest, naming the field, for missing files except weights."""
    facts = _facts(target, f"targets.{name}")
    try:
        refuse_draft_vocabulary(facts)
    except CheckpointError as error:
        raise BadRequest(f"targets.{name}.checkpoint", str(error)) from error
    if facts.tokens is None:
        raise BadRequest(f"targets.{name}.checkpoint", f"{facts.folder}: {NO_TOKENIZER}")
    return facts


def drafter_facts(name: str, drafter: DrafterConfig) -> Facts:
    """Facts of a drafter, which may have no tokenizer, as those of state-spaces. Raises BadRequest, naming the field,
    for missing files other than weights, and for quantised weights."""
    if is_gguf(drafter.checkpoint):
        raise BadRequest(f"drafters.{name}.checkpoint", "a drafter's weights cannot be in a GGUF file")
    facts = _facts(drafter, f"drafters.{name}")
    try:
        refuse_quantised(facts)
    except CheckpointError as error:
        raise BadRequest(f"drafters.{name}.checkpoint", str(error)) from error
    if facts.tokens is None and facts.unpadded is None:
        raise BadRequest(f"drafters.{name}.checkpoint", f"{facts.folder}: {NO_TOKENIZER}")
    return facts


def _facts(model: ModelConfig, where: str) -> Facts:
    model = fetched_model(where, model, weights=False)
    try:
        return read_facts(model.checkpoint, model.tokenizer)
    except CheckpointError as error:
        at_tokenizer = model.tokenizer is not None and str(error).startswith(f"{model.tokenizer}:")
        raise BadRequest(f"{where}.{'tokenizer' if at_tokenizer else 'checkpoint'}", str(error)) from error


def check_weights(model: ModelConfig, where: str) -> None:
    """Raises BadRequest, naming the field `where`, for a folder whose weights are missing or incomplete."""
    if model.checkpoint_name or is_gguf(model.checkpoint):  # each node finds them, and raises for what is missing
        return
    try:
        weight_files(model.checkpoint)
    except CheckpointError as error:
        raise BadRequest(where, str(error)) from error


def check_head(name: str, drafter: DrafterConfig) -> None:
    """Raises BadRequest, naming the field, for an acceptance head whose file is missing."""
    if drafter.head is not None and not drafter.head.is_file():
        raise BadRequest(f"drafters.{name}.head", f"there is no file {drafter.head}; `dendro train head` makes one")


def check_library_has(checkpoint: Path, where: str = "target") -> None:
    """Raises BadRequest for a model that transformers would load as another kind. For commands that load one with
    transformers, to compare with it or to modify it."""
    if (checkpoint / MAMBA_CONFIG).exists():
        raise BadRequest(where, f"{checkpoint} is a Mamba-in-Llama, which transformers has no class for: name another")
