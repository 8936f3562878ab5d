"""The formulas, in float64."""

from __future__ import annotations

from torch import Tensor


def law_of(scores: Tensor) -> Tensor:
    """Probabilities [rows, n] of scores [rows, n]."""
    weights = (scores.double() - scores.double().amax(1, keepdim=True)).exp()
    return weights / weights.sum(1, keepdim=True)


def log_law_of(scores: Tensor) -> Tensor:
    """Logarithms of the probabilities [rows, n] of scores [rows, n]."""
    below = scores.double() - scores.double().amax(1, keepdim=True)
    return below - below.exp().sum(1, keepdim=True).log()
