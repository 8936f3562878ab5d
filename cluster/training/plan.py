"""A training run of a drafter, as requested."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from dendro.errors import BadRequest
from tree_layers.checkpoint import Facts

from cluster.config import TargetConfig
from cluster.training.data import DataSource
from cluster.training.models import Start
from drafter_service.training.batches import DRAFTER_ROWS
from drafter_service.training.loop import Budget
from drafter_service.training.sizes import StudentKind, StudentSize

TEACHER_SHARE, STUDENT_SHARE = 0.35, 0.6  # shares of the time; the rest is for measurements
LABELLINGS = 2  # times that each label is seen, if the training is counted in steps
Labels = Literal["disk", "fly"]
"""Where the target's labels are: on disk, computed before the training and used several times, or nowhere, computed
when a step needs them."""
LABELS: tuple[Labels, ...] = get_args(Labels)


def check_minutes(minutes: float | None) -> None:
    """Raises BadRequest, naming the option, for minutes that are not positive and finite."""
    if minutes is not None and not 0 < minutes < math.inf:
        raise BadRequest("--minutes", f"must be finite and more than 0, got {minutes:g}")


@dataclass(frozen=True, slots=True)
class Length:
    """Length of a run: minutes in all, or steps of the distillation. `pretrain` is the share of the drafter's
    training that is on text alone, before the target's labels."""

    minutes: float | None = None
    steps: int | None = None
    pretrain: float = 0.0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise BadRequest("--minutes", "or --steps: give one of them")
        check_minutes(self.minutes)
        if not 0 <= self.pretrain < 1:
            raise BadRequest("--pretrain", f"must be at least 0 and less than 1, got {self.pretrain}")

    def teacher(self, chunk_rows: int, step_rows: int) -> Budget:
        """Budget of the labels on disk."""
        if self.steps is not None:
            return Budget(steps=max(2, math.ceil(self.steps * step_rows / (LABELLINGS * chunk_rows))))
        assert self.minutes is not None
        return Budget(seconds=60 * self.minutes * TEACHER_SHARE)

    def student(self, stage: str, labels: Labels) -> Budget:
        """Budget of the stage `pretrain` or `distil`."""
        most = STUDENT_SHARE + (TEACHER_SHARE if labels == "fly" else 0.0)
        share = self.pretrain if stage == "pretrain" else 1 - self.pretrain
        if self.steps is not None:
            return Budget(steps=max(1, round(self.steps * share / (1 - self.pretrain))))
        assert self.minutes is not None
        return Budget(seconds=60 * self.minutes * most * share)


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """One training run, as requested."""

    target_name: str
    target: TargetConfig  # the target's entry, with folders of this machine
    facts: Facts  # facts of the target's checkpoint
    source: DataSource
    kind: StudentKind
    size: StudentSize | None  # size of a new drafter; None: it continues from `start`
    start: Start | None
    length: Length
    row_tokens: int
    seed: int
    out: Path
    device: torch.device
    compile_forward: bool
    command: str  # the command, for the card
    vocabulary: int | None = None  # tokens that a new drafter guesses; None: all
    labels: Labels = "disk"
    rows: int = DRAFTER_ROWS  # rows of a step, of all processes together
    openings: tuple[tuple[int, ...], ...] = ()  # tokens that questions of the target's own begin with

    @property
    def work(self) -> Path:
        """Folder of everything but the finished checkpoint; may be deleted afterwards."""
        return self.out.with_name(f"{self.out.name}.training")

    def settings(self) -> dict[str, Any]:
        """Settings on which the outcome depends, by the names of options."""
        return {
            "target": [self.target_name, self.facts.digest],
            "data": [[str(file.resolve()), file.stat().st_size] for file in self.source.files()],
            "field": self.source.field,
            "kind": self.kind,
            "size": None if self.size is None else str(self.size),
            "from": None if self.start is None else [str(self.start.folder.resolve()), self.start.facts.digest],
            "minutes": self.length.minutes,
            "steps": self.length.steps,
            "pretrain": self.length.pretrain,
            "rows": self.rows,
            "row-tokens": self.row_tokens,
            "labels": self.labels,
            "vocabulary": self.vocabulary,
            **({"openings": [list(each) for each in self.openings]} if self.openings else {}),
            "seed": self.seed,
        }
