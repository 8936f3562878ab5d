"""One training run of an acceptance head, as requested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from dendro.errors import BadRequest
from tree_layers.checkpoint import Facts

from cluster.config import DrafterConfig, TargetConfig
from cluster.training.data import DataSource
from cluster.training.plan import check_minutes
from drafter_service.acceptance_head import HEAD_FILE
from drafter_service.training.examples import ExampleLaw


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Models, data, law of examples, size and budget of a run."""

    target_name: str
    target: TargetConfig  # the target's entry, with folders of this machine
    facts: Facts  # facts of the target's checkpoint
    drafter_name: str
    drafter: DrafterConfig  # the drafter's entry, with folders of this machine
    kinds: Mapping[str, DataSource]  # kind of prompt -> its data
    law: ExampleLaw
    blocks: int
    tied: bool
    rejection_weight: float
    minutes: float | None
    chunks: int | None  # chunks of examples, in place of minutes
    seed: int
    out: Path
    device: torch.device
    command: str  # the command, for the card

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.chunks is None):
            raise BadRequest("--minutes", "or --chunks: give one of them")
        check_minutes(self.minutes)

    @property
    def work(self) -> Path:
        """Everything that is not the finished head; may be deleted afterwards."""
        return self.out.with_name(f"{self.out.name}.training")

    @property
    def file(self) -> Path:
        return self.out / HEAD_FILE

    def settings(self, fingerprint: str) -> dict[str, Any]:
        """Settings on which the outcome depends, by the names of options. fingerprint: of the drafter's weights"""
        return {
            "target": [self.target_name, self.facts.digest],
            "drafter": [self.drafter_name, fingerprint, self.drafter.dtype],
            "data": {
                name: [[str(file.resolve()), file.stat().st_size] for file in source.files()]
                for name, source in self.kinds.items()
            },
            "field": sorted({source.field for source in self.kinds.values()}),
            "temperature": [asdict(warp) for warp in self.law.warps],
            "draws": self.law.draws,
            "feed": [self.law.feed, self.law.from_target],
            "depth": self.blocks,
            "tied": self.tied,
            "w-rej": self.rejection_weight,
            "minutes": self.minutes,
            "chunks": self.chunks,
            "seed": self.seed,
        }
