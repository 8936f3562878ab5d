"""Options of a drafter's engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from dendro.engine import LONGEST_STEP_S
from dendro.errors import BadRequest
from dendro.shapes import DEFAULT_DEPTH, MAX_ROWS
from dendro.tree import LONGEST_TRACE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FORMS = ("auto", "eager", "fused")
"""Forms of a model. eager: torch's operations one by one; fused: one compiled call per forward; auto: fused if
available, else eager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """Settings of an engine that are not read from its checkpoint. Raises BadRequest, naming the field."""

    name: str  # name under which the drafter is served
    tokenizer: Path | None = None  # the tokenizer's folder, if not the checkpoint's
    dtype: torch.dtype = torch.float32  # type of weights and activations
    device: torch.device | str = "cpu"
    form: str = "auto"  # one of FORMS
    head: Path | None = None  # file of an acceptance head; None: chances are calibrated scores
    threads: int = 1  # threads of the model's forwards on a CPU
    max_sessions: int = 64  # most open texts
    max_rows: int = MAX_ROWS  # most rows of a tree, the root included
    max_depth: int = DEFAULT_DEPTH  # most levels of a tree below the root
    prefill_chunk: int = LONGEST_TRACE  # tokens of a prompt per forward
    draft_ahead: bool = False  # prepare trees that texts may ask for next, while nothing waits
    longest_step_s: float = LONGEST_STEP_S  # a longer step counts as hung

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES.values():
            raise BadRequest("dtype", f"must be one of {sorted(DTYPES)}, got {self.dtype}")
        if self.form not in FORMS:
            raise BadRequest("form", f"must be one of {', '.join(FORMS)}, got {self.form!r}")
        for field in ("threads", "max_sessions", "max_depth", "prefill_chunk"):
            if getattr(self, field) < 1:
                raise BadRequest(field, f"must be at least 1, got {getattr(self, field)}")
        if not 1 <= self.max_rows <= MAX_ROWS:
            raise BadRequest("max_rows", f"must be 1 to {MAX_ROWS}, got {self.max_rows}")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise BadRequest("device", str(error)) from error
