"""Loads the engines of one process, and makes their Ray options."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dendro.engine import LocalDrafter, LocalVerifier
from dendro.errors import BadRequest
from dendro.grammars import INSTALL
from dendro.guidance import LIMITS, StructureLimits
from dendro.state import StateStore
from tree_layers.checkpoint import Facts, read_facts
from tree_layers.errors import CheckpointError

from cluster.checkpoint_tokenizer import backend_of, load_tokenizer, token_bytes_of
from cluster.config import DrafterConfig, ModelConfig, TargetConfig
from cluster.hub import fetched_model
from cluster.pairing import pairing_of
from cluster.sections import Resources

if TYPE_CHECKING:
    from drafter_service.bridge.kinds import Bridge
    from drafter_service.options import DrafterOptions
    from verifier_service.options import VerifierOptions
    from verifier_service.shards import Invitation

log = logging.getLogger("dendro.engines")

ROUTER_THREADS = 1


def engine_environment(threads: int) -> dict[str, str]:
    """Environment variables that must be set before an engine imports torch: its threads, and arithmetic in which a row
    does not depend on the other rows of its step."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "MKL_CBWR": "AUTO,STRICT",
        "TOKENIZERS_PARALLELISM": "false",
    }


def load_drafter(
    name: str,
    drafter: DrafterConfig,
    states: StateStore,
    targets: Mapping[str, TargetConfig],
    limits: StructureLimits = LIMITS,
) -> LocalDrafter:
    """A drafter's engine, not started yet, with bridges to those of the targets that need one. Raises BadRequest for a
    checkpoint that cannot be used.

    targets: of the cluster, by name; those that the drafter is not configured for do not count
    """
    from drafter_service.bridge.drafter import BridgedDrafter
    from drafter_service.engine import DrafterEngine

    drafter = fetched_model(f"drafters.{name}", drafter)
    folder = drafter.tokenizer_folder
    token_bytes = (lambda: token_bytes_of(load_tokenizer(folder))) if _follows_structures(name, drafter) else None
    ahead = drafts_ahead(drafter, targets.values(), usable_cores())
    options = replace(drafter_options(name, drafter), draft_ahead=ahead)
    engine = DrafterEngine.load(drafter.checkpoint, options, states=states, token_bytes=token_bytes, limits=limits)
    bridges = {}
    for of in drafter.targets or targets:
        if (bridge := load_bridge(name, drafter, of, targets[of])) is not None:
            log.info("drafter %s for target %s: bridge %s", name, of, bridge)
            bridges[bridge.tokenizer] = bridge
    return BridgedDrafter(engine, bridges) if bridges else engine


def _follows_structures(name: str, drafter: DrafterConfig) -> bool:
    """True if a drafter masks its guesses by the structures of answers. The log has the reason where it cannot."""
    available = find_spec("llguidance") is not None
    if drafter.structures and not available:
        log.info("drafter %s: guesses without the structures of answers: following them %s", name, INSTALL)
    return drafter.structures and available


def load_bridge(name: str, drafter: DrafterConfig, of: str, target: TargetConfig) -> Bridge | None:
    """The bridge between a drafter and a target; None where they need none. Raises BadRequest, naming the field, for
    files that cannot be read."""
    from drafter_service.bridge.byte_codec import ByteCodec
    from drafter_service.bridge.kinds import KINDS

    sides = [_tokens_of(f"targets.{of}", target), _tokens_of(f"drafters.{name}", drafter)]
    (_, _, target_facts), (_, _, drafter_facts) = sides
    pairing = pairing_of(target_facts, drafter_facts, drafter.bridge)
    if pairing.bridge is None:
        return None
    codecs = []
    for field, folder, facts in sides:
        try:
            codecs.append(ByteCodec(backend_of(load_tokenizer(folder)), facts.vocabulary))
        except (BadRequest, CheckpointError) as error:
            raise BadRequest(field, error.reason if isinstance(error, BadRequest) else str(error)) from error
    try:
        return KINDS[pairing.bridge](codecs[0], codecs[1], target_facts.tokenizer)
    except CheckpointError as error:
        raise BadRequest(f"drafters.{name}.bridge", str(error)) from error


def _tokens_of(where: str, model: ModelConfig) -> tuple[str, Path, Facts]:
    """The field that names a model's tokenizer, the tokenizer's folder on this machine, and the model's facts."""
    field, here = f"{where}.{model.tokenizer_field}", fetched_model(where, model, weights=False)
    try:
        return field, here.tokenizer_folder, read_facts(here.checkpoint, here.tokenizer)
    except CheckpointError as error:
        raise BadRequest(field, str(error)) from error


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def drafts_ahead(drafter: DrafterConfig, targets: Iterable[TargetConfig], cores: int) -> bool:
    """Whether a drafter prepares trees (`DrafterConfig.draft_ahead`). cores: of its machine, on which all targets of
    the cluster are taken to run"""
    if drafter.draft_ahead != "auto":
        return drafter.draft_ahead == "on"
    if drafter.resources.gpu:
        return False  # no prepared tree was ever grown on an accelerator
    threads = drafter.threads * drafter.most_replicas + ROUTER_THREADS
    threads += sum(target.threads * target.tensor_parallel * target.most_replicas for target in targets)
    return cores > threads


def drafter_options(name: str, drafter: DrafterConfig) -> DrafterOptions:
    """The options of a drafter's engine. Raises BadRequest, naming the field."""
    import torch

    from drafter_service.options import DrafterOptions

    return DrafterOptions(
        name=name,
        tokenizer=drafter.tokenizer,
        dtype=getattr(torch, drafter.dtype),
        device=device_of(drafter),
        threads=drafter.threads,
        max_sessions=drafter.max_sessions,
        longest_step_s=drafter.longest_step_s,
        form=drafter.form,
        head=drafter.head,
    )


def load_verifier(
    name: str, target: TargetConfig, states: StateStore, limits: StructureLimits = LIMITS, **workers: Any
) -> LocalVerifier:
    """A verifier's engine, not started yet. Raises BadRequest for a checkpoint that cannot be used.

    workers: how to start the workers of a sharded target; by default they are processes below this one.
    """
    from verifier_service.engine import VerifierEngine

    target = fetched_model(f"targets.{name}", target)
    options, folder = verifier_options(name, target), target.tokenizer_folder
    return VerifierEngine.load(
        target.checkpoint,
        options,
        states=states,
        token_bytes=lambda: token_bytes_of(load_tokenizer(folder)),
        limits=limits,
        **workers,
    )


def verifier_options(name: str, target: TargetConfig) -> VerifierOptions:
    """The options of a target's engine. Raises BadRequest, naming the field."""
    import torch

    from verifier_service.options import VerifierOptions

    return VerifierOptions(
        name=name,
        tokenizer=target.tokenizer,
        dtype=getattr(torch, target.dtype),
        device=device_of(target),
        threads=target.threads,
        max_length=target.max_length,
        max_sessions=target.max_sessions,
        max_waiting=target.max_waiting,
        max_rows=target.max_rows,
        max_depth=target.max_depth,
        memory_fraction=target.memory_fraction,
        share_prefixes=target.share_prefixes,
        tensor_parallel=target.tensor_parallel,
        longest_step_s=target.longest_step_s,
    )


def load_replica(
    name: str, target: TargetConfig, states: StateStore, limits: StructureLimits = LIMITS
) -> LocalVerifier:
    """`load_verifier` in a Serve replica: workers of a sharded target are actors in the replica's placement group."""
    if target.tensor_parallel == 1:
        return load_verifier(name, target, states, limits)
    start_workers = partial(_start_actors, name, target)
    return load_verifier(name, target, states, limits, start_workers=start_workers, host=node_address())


class Worker:
    """The actor of a shard."""

    def fetch(self, name: str, target: TargetConfig) -> tuple[Path, Path]:
        """The folders of the target and of its tokenizer on this node; names on a hub are fetched."""
        here = fetched_model(f"targets.{name}", target)
        return here.checkpoint, here.tokenizer_folder

    def work(self, invitation: Invitation) -> None:
        from verifier_service.worker import work

        work(invitation)


_workers: list[Any] = []  # handles of this replica's actors: an actor ends when its handle is dropped


def _start_actors(name: str, target: TargetConfig, invitations: Sequence[Invitation]) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()
    assert group is not None
    workers: list[Any] = []
    for each in invitations:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=each.rank)
        options = actor_options(target.resources, engine_environment(target.threads))
        workers.append(ray.remote(Worker).options(scheduling_strategy=place, max_restarts=0, **options).remote())
    _workers.extend(workers)
    if target.on_hub:  # fetched before workers join: a download may exceed the time limit of joining
        here = Worker().fetch(name, target)
        for there in ray.get([worker.fetch.remote(name, target) for worker in workers]):
            if there != here:
                raise BadRequest(
                    f"targets.{name}.tensor_parallel",
                    f"checkpoint and tokenizer are at {', '.join(map(str, here))} on one node and at "
                    f"{', '.join(map(str, there))} on another: HF_HOME must be the same on all of them",
                )
    for worker, each in zip(workers, invitations, strict=True):
        worker.work.remote(each)


def device_of(model: ModelConfig) -> str:
    """Kind of device of a model's replica, by its request: Ray shows a replica only accelerators that it requested."""
    return "cuda" if model.resources.gpu else "cpu"


def actor_options(resources: Resources, environment: dict[str, str]) -> dict[str, Any]:
    return {
        "num_cpus": resources.cpu,
        "num_gpus": resources.gpu,
        "resources": resources.custom,
        "runtime_env": {"env_vars": environment},
    }


def node_address() -> str:
    """This machine's address in the Ray cluster."""
    import ray

    return str(ray.util.get_node_ip_address())
