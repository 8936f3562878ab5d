"""Does a sampler draw from the law it should? Pearson's chi-square, over the cells where it means something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

MIN_EXPECTED = 5.0
"""Cells expected fewer times than this are merged into one: below it the statistic is not chi-square distributed."""
P_BAR = 1e-3


@dataclass(frozen=True, slots=True)
class Fit:
    """How well draws fit a law."""

    draws: int
    cells: int
    statistic: float
    p: float

    @property
    def good(self) -> bool:
        return self.p > P_BAR


def expected_law(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> npt.NDArray[np.float64]:
    """[V] the target's law, in float64 and written apart from the kernel that is on trial.

    Top-k keeps the k largest (ties by lower id), top-p the shortest head of what is left that holds at least top_p.
    """
    scores = logits.double().numpy() / temperature
    order = np.lexsort((np.arange(len(scores)), -scores))
    if top_k:
        order = order[:top_k]
    chances = np.exp(scores[order] - scores.max())
    chances /= chances.sum()
    kept = 1 + int(np.searchsorted(np.cumsum(chances), top_p)) if top_p < 1 else len(order)
    law = np.zeros(len(scores))
    law[order[:kept]] = chances[:kept] / chances[:kept].sum()
    return law


def fit(draws: Sequence[int], law: npt.NDArray[np.float64]) -> Fit:
    """Chi-square of draws (token ids) against a law [V]. A draw of no chance at all makes p zero."""
    counts = np.bincount(np.asarray(draws), minlength=len(law)).astype(np.float64)
    expected = law * len(draws)
    if counts[law == 0].any():
        return Fit(len(draws), 0, float("inf"), 0.0)
    big = expected >= MIN_EXPECTED
    observed_cells, expected_cells = counts[big], expected[big]
    rest = expected[~big].sum()
    if rest > 0:
        observed_cells = np.append(observed_cells, counts[~big].sum())
        expected_cells = np.append(expected_cells, rest)
    statistic = float(((observed_cells - expected_cells) ** 2 / expected_cells).sum())
    freedom = max(len(expected_cells) - 1, 1)
    p = torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double())
    return Fit(len(draws), len(expected_cells), statistic, float(p))
