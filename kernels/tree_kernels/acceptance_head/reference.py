"""The acceptance head in plain PyTorch: the chances that a drafter's candidates are the text's next token.

R rows, d the drafter's width, K candidates per row, V tokens, D blocks. All tensors are float32 unless another dtype is
given.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels.acceptance_head.constants import (
    DEEPEST,
    DEPTH_UNIT,
    GAP_UNIT,
    LAW_UNIT,
    LEAST_LOG_PROB,
    LOG_SHARPEST,
    MOST_UNSEEN,
    WIDEST_GAP,
)


class HeadWeights(NamedTuple):
    """The tensors of a head."""

    hidden_scale: Tensor  # [d]
    token_scale: Tensor  # [d]
    numbers: Tensor  # [K - 1 + LAW_NUMBERS, d]
    bias: Tensor  # [d]
    blocks: tuple[tuple[Tensor, Tensor], ...]  # D times W [d, d], inputs first, and b [d]; the same pair where tied
    output: Tensor  # [OUTPUTS, d]
    output_bias: Tensor  # [OUTPUTS]
    calibration: Tensor  # [depths, OUTPUTS] added to the outputs of a row by its depth; the last row for deeper ones


class RowLaw(NamedTuple):
    """Numbers of a drafter's law of a row, before noise."""

    entropy: Tensor  # [R] nats
    log_prob: Tensor  # [R] of the first candidate


def row_law(logits: Tensor, first: Tensor, temperature: Tensor) -> RowLaw:
    """The law softmax(logits / temperature) of each row; at temperature 0, softmax(logits).

    logits [R, V]   first [R] int64   temperature [R]
    """
    log_probs = (logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(-1)  # 0 for a probability of 0
    return RowLaw(entropy, log_probs.gather(1, first[:, None])[:, 0])


def row_numbers(scores: Tensor, law: RowLaw, temperature: Tensor, depth: Tensor, candidates: int) -> Tensor:
    """Inputs of the head beside hidden rows and tokens, [R, K - 1 + LAW_NUMBERS].

    scores [R, k] never increasing; those past K = candidates are ignored, missing ones count as the widest gap
    depth [R] int64, 0 for a root
    """
    gaps = (scores[:, :1] - scores[:, 1:candidates]).nan_to_num(WIDEST_GAP, WIDEST_GAP).clamp(max=WIDEST_GAP)
    gaps = F.pad(gaps, (0, candidates - 1 - gaps.shape[1]), value=WIDEST_GAP)
    of_law = torch.stack(
        [
            law.entropy / LAW_UNIT,
            law.log_prob.clamp(min=LEAST_LOG_PROB) / LAW_UNIT,
            temperature,
            (temperature == 0).float(),
            depth.clamp(max=DEEPEST) / DEPTH_UNIT,
        ],
        1,
    )
    return torch.cat([gaps / GAP_UNIT, of_law], 1)


def head_outputs(weights: HeadWeights, hidden: Tensor, tokens: Tensor, numbers: Tensor) -> Tensor:
    """Outputs [R, OUTPUTS] of the head before calibration: D residual blocks x + silu(W x + b), then a linear output.

    hidden [R, d] the rows that the drafter's own head multiplies   tokens [R, d] embeddings of first candidates
    """
    x = hidden * weights.hidden_scale + tokens * weights.token_scale + numbers @ weights.numbers + weights.bias
    for weight, bias in weights.blocks:
        x = x + F.silu(x @ weight + bias)
    return x @ weights.output.T + weights.output_bias


def log_chances(outputs: Tensor, calibration: Tensor, scores: Tensor, depth: Tensor, candidates: int) -> Tensor:
    """Log chance of every candidate, [R, k], at most 0, never increasing along a row.

        c_j = exp(s_j sharpness + lift [j = 0]) / Z      c_none = n exp(s_(K-1) sharpness) / Z

    Z is the sum over j < K, and none. outputs [R, OUTPUTS] log sharpness, log n and the lift before softplus
    calibration, scores, depth, candidates: as above
    """
    moved = outputs + calibration[depth.clamp(max=len(calibration) - 1)]
    sharpness = moved[:, 0].clamp(-LOG_SHARPEST, LOG_SHARPEST).exp()[:, None]
    weights = (scores - scores[:, :1]) * sharpness
    last = weights[:, min(candidates, scores.shape[1]) - 1, None]
    none = moved[:, 1, None].clamp(-MOST_UNSEEN, MOST_UNSEEN) + last
    weights = torch.cat([F.softplus(moved[:, 2:3]) + weights[:, :1], weights[:, 1:]], 1)
    normaliser = torch.cat([weights[:, :candidates], none], 1).logsumexp(1, keepdim=True)
    return (weights - normaliser).nan_to_num(-math.inf, neginf=-math.inf)
