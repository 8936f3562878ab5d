"""Losses of training steps, on text or against a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafter_service.training.loop import autocast, compiled
from drafter_service.training.losses import TeacherRows, projected_loss
from drafter_service.training.rows import TokenRows
from drafter_service.training.students import StudentForward
from drafter_service.training.vocabulary import draft_embedding

# Share of the text's next token in a drafter's loss: it teaches the tail that the kept log-probabilities omit.
HARD_SHARE = 0.1
DRAFTER_ROWS = 8  # rows of a drafter's training step, over all processes


class Labelled(Protocol):
    """Rows with a teacher's outputs."""

    def batch(self, step: int, rows: int, seed: int) -> tuple[Tensor, Tensor, TeacherRows]:
        """Called once per step, with the rows of all processes. Returns this process's share of the batch: inputs,
        labels, teacher outputs."""
        ...


class StudentLoss(nn.Module):
    """The loss of rows as one module, because accelerate averages the gradients of a module's forward over
    processes."""

    def __init__(self, model: PreTrainedModel, device: torch.device, compile_forward: bool) -> None:
        super().__init__()
        self.model = model
        self._device = device
        forward = StudentForward(model)
        self._forward = (compiled(forward) if compile_forward else forward,)  # a tuple hides `model`'s parameters

    def forward(self, inputs: Tensor, labels: Tensor, teacher: TeacherRows | None, hard_share: float) -> Tensor:
        """Loss in nats per token of inputs and labels [rows, length]; with a teacher, over the tokens that it
        labelled."""
        labels = labels.to(self._device)
        if teacher is not None:
            teacher = teacher.to(self._device)
        with autocast(self._device):
            hidden = self._forward[0](inputs.to(self._device))
            if teacher is not None:
                hidden, labels, teacher = teacher.labelled(hidden, labels)
            if (embedding := draft_embedding(self.model)) is not None:
                labels = embedding.places[labels]
                teacher = None if teacher is None else teacher.with_ids(embedding.places)
            return projected_loss(hidden, self.model.lm_head.weight, labels, teacher, hard_share)


def text_loss(
    model: PreTrainedModel,
    rows: TokenRows,
    device: torch.device,
    compile_forward: bool = True,
    processes: Accelerator | None = None,
) -> Callable[[int], Tensor]:
    """Make the loss of a step on the text's next tokens; with `processes`, on this process's share of `rows`."""
    loss = _prepared(StudentLoss(model, device, compile_forward), processes)

    def batch_loss(step: int) -> Tensor:
        return loss(*rows.batch(step), None, 1.0)

    return batch_loss


def distillation_loss(
    model: PreTrainedModel,
    rows: Labelled,
    seed: int,
    device: torch.device,
    compile_forward: bool = True,
    step_rows: int = DRAFTER_ROWS,
    processes: Accelerator | None = None,
) -> Callable[[int], Tensor]:
    """Make the loss of a step against the teacher, on `step_rows` rows in the order of `seed`; with `processes`, on
    this process's share of them."""
    loss = _prepared(StudentLoss(model, device, compile_forward), processes)

    def batch_loss(step: int) -> Tensor:
        return loss(*rows.batch(step, step_rows, seed), HARD_SHARE)

    return batch_loss


def _prepared(loss: StudentLoss, processes: Accelerator | None) -> Callable[..., Tensor]:
    prepared: Callable[..., Tensor] = loss if processes is None else processes.prepare_model(loss)
    return prepared
