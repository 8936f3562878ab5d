"""Training of an acceptance head: its parameters, its loss, and its calibration
(docs/design/stopping.md#the-acceptance-head).

R rows, K candidates, d the drafter's width. A row's candidates are compared with the target's token, both drawn with
one noise, so labels are exact under the serving law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tree_kernels.acceptance_head import HeadWeights, RowLaw, head_outputs, log_chances, row_numbers
from tree_kernels.acceptance_head.constants import LAW_NUMBERS, OUTPUTS

from drafter_service.confidence import CANDIDATES, Calibration

DEPTHS = 6
"""Depths with a calibration of their own; deeper rows share the last."""
PRIOR_ROWS = 20.0
"""Weight, in rows, of the calibration of all depths in the calibration of one."""
BATCH_ROWS = 512
"""Rows of a training step."""
BINS = 15
"""Bins of equal mass of the calibration error."""
LEAST = 1e-6
"""Least distance of chances from 0 and 1 in losses."""


@dataclass(frozen=True, slots=True)
class AcceptanceRows:
    """Rows of drafts whose next token is known."""

    hidden: Tensor  # [R, d] input of the drafter's own head
    first: Tensor  # [R] int64 first candidates
    scores: Tensor  # [R, K] float32 scores of the candidates
    entropy: Tensor  # [R] entropy of the drafter's law, in nats
    log_prob: Tensor  # [R] the first candidate's log-probability in that law
    temperature: Tensor  # [R]
    depth: Tensor  # [R] int64
    rank: Tensor  # [R] int64: place of the target's token among the candidates; K or more if it is none
    drafted: Tensor  # [R] bool: True if the next token was drafted; other rows have no loss

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, rows: Tensor | slice) -> AcceptanceRows:
        return AcceptanceRows(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[AcceptanceRows]) -> AcceptanceRows:
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    @property
    def labels(self) -> Tensor:
        """Labels [R, K]: 1 where the candidate is the target's token, else 0."""
        return (self.rank[:, None] == torch.arange(self.scores.shape[1])).float()


class HeadModel(nn.Module):
    """A head's parameters: D residual blocks, which share one set of parameters if `tied`."""

    def __init__(self, width: int, blocks: int, tied: bool, embed: Callable[[Tensor], Tensor]) -> None:
        """embed: the drafter's embedding, which is not trained: rows [R, d] of ids [R]"""
        super().__init__()
        self.blocks = blocks
        self.embed = embed
        self._linears = [nn.Linear(width, width) for _ in range(min(blocks, 1) if tied else blocks)]
        self.sets = nn.ModuleList(self._linears)
        self.hidden_scale, self.token_scale = (nn.Parameter(torch.full((width,), 0.3)) for _ in range(2))
        self.numbers = nn.Parameter(torch.randn(CANDIDATES - 1 + LAW_NUMBERS, width) / (4 * width**0.5))
        self.bias = nn.Parameter(torch.zeros(width))
        self.output = nn.Parameter(torch.zeros(OUTPUTS, width))
        start = Calibration()
        self.output_bias = nn.Parameter(torch.tensor([math.log(start.sharpness), start.unseen, -3.0]))

    def weights(self, calibration: Tensor | None = None) -> HeadWeights:
        """The head's weights as inference uses them. calibration [depths, OUTPUTS]; None: zero"""
        sets = [(linear.weight.T, linear.bias) for linear in self._linears]
        return HeadWeights(
            hidden_scale=self.hidden_scale,
            token_scale=self.token_scale,
            numbers=self.numbers,
            bias=self.bias,
            blocks=tuple(sets[number % len(sets)] for number in range(self.blocks)),
            output=self.output,
            output_bias=self.output_bias,
            calibration=torch.zeros(1, OUTPUTS) if calibration is None else calibration,
        )

    def outputs(self, rows: AcceptanceRows) -> Tensor:
        """Outputs [R, OUTPUTS] before calibration."""
        law = RowLaw(rows.entropy, rows.log_prob)
        numbers = row_numbers(rows.scores, law, rows.temperature, rows.depth, CANDIDATES)
        return head_outputs(self.weights(), rows.hidden.float(), self.embed(rows.first).float(), numbers)

    def tensors(self, calibration: Tensor) -> dict[str, Tensor]:
        """Tensors, by name, as `write_head` takes them."""
        names = ("hidden_scale", "token_scale", "numbers", "bias", "output", "output_bias")
        made = {name: getattr(self, name).detach() for name in names} | {"calibration": calibration}
        for number, linear in enumerate(self._linears):
            made |= {f"blocks.{number}.weight": linear.weight.detach().T, f"blocks.{number}.bias": linear.bias.detach()}
        return made

    def round_blocks(self) -> None:
        """Round the blocks' matrices to bfloat16, as they are stored."""
        with torch.no_grad():
            for linear in self._linears:
                linear.weight.copy_(linear.weight.bfloat16())


def acceptance_loss(chances: Tensor, labels: Tensor, drafted: Tensor, rejection_weight: float) -> Tensor:
    """Binary cross-entropy of acceptance, with weight w on rejections, over the candidates of drafted rows:

        L = - sum [P log s + w (1 - P) log(1 - s)] / (w sum (1 - P) + sum P)

    chances [R, k] log s   labels [R, k] P, 0 to 1   drafted [R] bool
    """
    log_s, P = chances[drafted], labels[drafted]
    log_not = torch.log1p(-log_s.exp().clamp(max=1 - LEAST))
    total = (P * log_s + rejection_weight * (1 - P) * log_not).sum()
    return -total / (rejection_weight * (1 - P).sum() + P.sum()).clamp(min=1)


def head_loss(model: HeadModel, rows: AcceptanceRows, rejection_weight: float, seed: int) -> Callable[[int], Tensor]:
    """Make the loss of a step, on BATCH_ROWS rows drawn by the seed and the step."""

    def batch_loss(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        batch = rows[torch.randint(len(rows), (min(BATCH_ROWS, len(rows)),), generator=generator)]
        chances = log_chances(model.outputs(batch), torch.zeros(1, OUTPUTS), batch.scores, batch.depth, CANDIDATES)
        return acceptance_loss(chances, batch.labels, batch.drafted, rejection_weight)

    return batch_loss


def outcome_losses(chances: Tensor, rank: Tensor) -> Tensor:
    """Negative log chance [R] of each row's outcome: that a candidate is the next token, or none of the first
    CANDIDATES. chances [R, k]: log chances   rank [R]: place of the next token among the candidates"""
    shown = chances[:, :CANDIDATES]
    none = torch.log1p(-shown.exp().sum(1, keepdim=True).clamp(max=1 - LEAST))
    every = torch.cat([shown, none], 1)
    return -every.gather(1, rank.clamp(max=shown.shape[1])[:, None])[:, 0]


def fit_calibration(outputs: Tensor, rows: AcceptanceRows) -> Tensor:
    """Fit the calibration [DEPTHS, OUTPUTS] that is added to the outputs of each depth, by the least sum of
    `outcome_losses`; where rows are few it stays near the calibration of all depths. It removes the bias that a weight
    of rejections other than 1 gives chances. outputs [R, OUTPUTS]"""

    def fitted(chosen: Tensor, start: Tensor, prior: float) -> Tensor:
        moved = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([moved], max_iter=50, line_search_fn="strong_wolfe")
        of, part = outputs[chosen].detach(), rows[chosen]
        zero = torch.zeros_like(part.depth)

        def closure() -> float:
            optimizer.zero_grad()
            chances = log_chances(of, moved[None], part.scores, zero, CANDIDATES)
            loss = outcome_losses(chances, part.rank).sum() + prior * ((moved - start) ** 2).sum() / 2
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        return moved.detach()

    everywhere = fitted(rows.drafted, torch.zeros(OUTPUTS), 1.0)
    made = []
    for depth in range(DEPTHS):
        at = rows.drafted & (rows.depth == depth if depth < DEPTHS - 1 else rows.depth >= depth)
        made.append(fitted(at, everywhere, PRIOR_ROWS) if bool(at.any()) else everywhere)
    return torch.stack(made)


def online_chances(warm: AcceptanceRows, rows: AcceptanceRows) -> Tensor:
    """Log chances [R, K] that a drafter without a head gives, by its online calibration, which has learned the rows
    `warm` before."""
    calibrations = {True: Calibration(), False: Calibration()}
    found: list[list[float]] = []
    for part, kept in ((warm, False), (rows, True)):
        columns = part.scores.tolist(), part.rank.tolist(), (part.temperature == 0).tolist()
        for scores, rank, greedy in zip(*columns, strict=True):
            if kept:
                found += calibrations[greedy].confidences([scores])
            calibrations[greedy] = calibrations[greedy].learn(scores, rank)
    return torch.tensor(found)


@dataclass(frozen=True, slots=True)
class Quality:
    """Losses and calibration errors of chances on some rows."""

    rows: int
    first_loss: float  # log loss in nats for the event that the first candidate is the next token
    loss: float  # mean of `outcome_losses`, in nats
    first_error: float  # calibration error of the first candidate's chance
    error: float  # calibration error of all candidates' chances
    accepted: float  # share of rows whose first candidate is the next token


def quality_of(chances: Tensor, rows: AcceptanceRows) -> Quality:
    """Measure log chances [R, K] on rows."""
    first, hit = chances[:, 0].exp(), (rows.rank == 0).float()
    bounded = first.clamp(LEAST, 1 - LEAST)
    return Quality(
        rows=len(rows),
        first_loss=F.binary_cross_entropy(bounded, hit).item(),
        loss=outcome_losses(chances, rows.rank).mean().item(),
        first_error=calibration_error(first, hit),
        error=calibration_error(chances.exp().flatten(), rows.labels.flatten()),
        accepted=hit.mean().item(),
    )


def calibration_error(chances: Tensor, labels: Tensor) -> float:
    """Mean distance between mean chance and mean label over BINS bins of equal mass. chances, labels [n]

    >>> round(calibration_error(torch.full((30,), 0.9), torch.ones(30)), 3)
    0.1
    """
    order = chances.argsort()
    bins = [part for part in order.tensor_split(BINS) if len(part)]
    apart = [(chances[part].mean() - labels[part].mean()).abs().item() * len(part) for part in bins]
    return sum(apart) / len(chances)
