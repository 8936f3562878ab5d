"""The loss of a training step, on text or against a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafter_service.training.loop import autocast, compiled
from drafter_service.training.losses import projected_loss
from drafter_service.training.rows import TokenRows
from drafter_service.training.students import StudentForward
from drafter_service.training.teacher import LabelledRows

# Share of the text's next token in a drafter's loss: it teaches the tail that the kept log-probabilities omit.
HARD_SHARE = 0.1
DRAFTER_ROWS = 8  # of a drafter's training step


def text_loss(
    model: PreTrainedModel, rows: TokenRows, device: torch.device, compile_forward: bool = True
) -> Callable[[int], Tensor]:
    """The loss of step s on the text's next tokens."""
    forward = _forward(model, compile_forward)

    def batch_loss(step: int) -> Tensor:
        inputs, labels = (tensor.to(device) for tensor in rows.batch(step))
        with autocast(device):
            return projected_loss(forward(inputs), model.lm_head.weight, labels)

    return batch_loss


def distillation_loss(
    model: PreTrainedModel, rows: LabelledRows, seed: int, device: torch.device, compile_forward: bool = True
) -> Callable[[int], Tensor]:
    """The loss of step s against the teacher, on DRAFTER_ROWS rows in an order of `seed`."""
    forward = _forward(model, compile_forward)

    def batch_loss(step: int) -> Tensor:
        inputs, labels, teacher = rows.batch(step, DRAFTER_ROWS, seed)
        with autocast(device):
            hidden = forward(inputs.to(device))
            return projected_loss(hidden, model.lm_head.weight, labels.to(device), teacher.to(device), HARD_SHARE)

    return batch_loss


def _forward(model: PreTrainedModel, compile_forward: bool) -> Callable[..., Any]:
    forward = StudentForward(model)
    return compiled(forward) if compile_forward else forward
