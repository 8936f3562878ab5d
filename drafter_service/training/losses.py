"""Next-token losses fused with the output projection.

The scores of a whole batch over the vocabulary are the largest tensor of a small model's training step, and reading it
a dozen times costs more than all layers together. Here only the scores of `CHUNK` positions exist at a time, few enough
for a core's cache, and their gradient is computed immediately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 256  # positions whose scores exist at a time
DEVICE_CHUNK = 4096  # positions on an accelerator, where each operation has a price of its own


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """The teacher's K largest log-probabilities at every position; the remaining mass is one more outcome."""

    ids: Tensor  # [..., positions, K] integer
    log_probs: Tensor  # [..., positions, K] floating; minus infinity at a position without labels

    def to(self, device: torch.device) -> TeacherRows:
        return TeacherRows(self.ids.to(device), self.log_probs.to(device))

    def with_ids(self, places: Tensor) -> TeacherRows:
        """A copy with other ids. places [ids]: new id by old id"""
        return TeacherRows(places[self.ids.long()], self.log_probs)

    def labelled(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, TeacherRows]:
        """Select the positions that the teacher labelled from hidden [..., width], labels [...] and these rows."""
        known = self.log_probs[..., 0].isfinite()
        return hidden[known], labels[known], TeacherRows(self.ids[known], self.log_probs[known])


class _ProjectedLoss(torch.autograd.Function):
    """Mean over positions of `hard_share * CE(labels) + (1 - hard_share) * CE(teacher)`; gradients computed in forward.

    CE(teacher) = - sum_k t_k log p_k - r log(1 - sum_k p_k), with t the teacher's K kept probabilities, r = 1 - sum t,
    p the student's. Its gradient in score j is p_j - t_j for a kept j and p_j (1 - r / (1 - sum_k p_k)) for another.

    Ids past the projection belong to tokens that the student cannot guess and are left out of both sums: the student
    learns the law of the other tokens, weighted by their probability.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [positions, width]
        projection: Tensor,  # [vocabulary, width]
        labels: Tensor,  # [positions]
        teacher_ids: Tensor | None,  # [positions, K] int64
        teacher_log_probs: Tensor | None,  # [positions, K]
        hard_share: float,
    ) -> Tensor:
        compute = torch.bfloat16 if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            weight, last = projection.to(compute), len(projection) - 1
            hidden_grad = torch.empty(hidden.shape, dtype=compute, device=hidden.device)
            weight_grad = torch.zeros(projection.shape, dtype=torch.float32, device=hidden.device)
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            size = CHUNK if hidden.device.type == "cpu" else DEVICE_CHUNK
            for start in range(0, len(labels), size):
                part = slice(start, start + size)
                inputs, label = hidden[part].to(compute), labels[part, None]
                hard, label = hard_share * (label <= last), label.clamp(max=last)  # [positions, 1] both
                log_probs = (inputs @ weight.T).float()
                log_probs -= log_probs.logsumexp(-1, keepdim=True)
                total -= (hard * log_probs.gather(1, label)).sum()
                probs = log_probs.exp()
                if teacher_ids is None or teacher_log_probs is None:
                    scores_grad = probs.mul_(hard)
                else:
                    ids, teacher = teacher_ids[part], teacher_log_probs[part].float().exp()
                    rest = (1 - teacher.sum(-1, keepdim=True)).clamp(min=0) * (1 - hard_share)
                    known = (ids <= last).float()
                    ids, teacher = ids.clamp(max=last), teacher * known * (1 - hard_share)
                    kept = probs.gather(1, ids) * known
                    student_rest = (1 - kept.sum(-1, keepdim=True)).clamp(min=1e-6)
                    total -= (teacher * log_probs.gather(1, ids)).sum() + (rest * student_rest.log()).sum()
                    apart = rest / student_rest
                    scores_grad = probs.mul_(hard + teacher.sum(-1, keepdim=True) + rest - apart)
                    scores_grad.scatter_add_(1, ids, kept * apart - teacher)
                scores_grad.scatter_add_(1, label, -hard)
                scores_grad = scores_grad.to(compute)
                hidden_grad[part] = scores_grad @ weight
                weight_grad += scores_grad.T @ inputs
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.hidden_dtype, ctx.weight_dtype, ctx.positions = hidden.dtype, projection.dtype, len(labels)
        return total / len(labels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0] / ctx.positions
        return (
            (hidden_grad * scale).to(ctx.hidden_dtype),
            (weight_grad * scale).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
        )


def projected_loss(
    hidden: Tensor,
    projection: Tensor,
    labels: Tensor,
    teacher: TeacherRows | None = None,
    hard_share: float = 0.1,
) -> Tensor:
    """The training loss in nats per token.

    hidden [..., width]   projection [vocabulary, width]   labels [...]
    Without a teacher: cross-entropy of the labels. With one: `hard_share` of that, the rest against the teacher.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])  # torch gives `apply` below no types
    if teacher is None:
        loss = _ProjectedLoss.apply(flat, projection, labels.reshape(-1), None, None, 1.0)  # type: ignore[no-untyped-call]
    else:
        kept = teacher.ids.shape[-1]
        ids, log_probs = teacher.ids.reshape(-1, kept).long(), teacher.log_probs.reshape(-1, kept)
        loss = _ProjectedLoss.apply(flat, projection, labels.reshape(-1), ids, log_probs, hard_share)  # type: ignore[no-untyped-call]
    assert isinstance(loss, Tensor)
    return loss
