"""Tests whether a sampler draws from a given law, by a likelihood-ratio test with a simulated null distribution.

Tokens are counted in cells: likely tokens have one each, the others share cells in order of probability, so that each
cell is expected MIN_EXPECTED times or more. The statistic is G = 2 sum observed * log(observed / expected). Its
distribution under the law is simulated with the same number of draws, so the p-value holds for peaked laws and rare
cells too: a correct sampler fails one comparison with probability at most ALPHA, and any of the TESTS comparisons of
one run of `dendro certify` with probability at most FAMILY_ERROR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import chi2

Law = npt.NDArray[np.float64]
"""Token probabilities [V]; they sum to 1."""

FAMILY_ERROR = 1e-4
"""Largest probability that a run of certify rejects a correct sampler."""
TESTS = 4
"""Comparisons of draws with a law in one run, all in promise (c)."""
ALPHA = FAMILY_ERROR / TESTS
SIMULATIONS = round(2 / ALPHA) - 1
"""The smallest p-value is ALPHA / 2."""
BATCH = 100
"""Simulations made at once, before those that reach the statistic are counted."""
EXCEEDED = 50
"""The simulation ends after this many that reach the statistic: p is then above ALPHA."""

MIN_EXPECTED = 5.0
MAX_CELLS = 512
MISSED = NormalDist().inv_cdf(1 - 1e-6)
"""Standard deviations by which a fault's mean statistic must exceed the critical value to be missed once in 10^6."""
SMALLEST_DRAWS, LARGEST_DRAWS, DRAWS_STEP = 10, 10**12, 1.1
"""Numbers of draws for which the power is computed: smallest, largest, and the factor between two."""


@dataclass(frozen=True, slots=True)
class LawFit:
    """Fit of draws to a law."""

    draws: int
    cells: int
    statistic: float
    p: float

    @property
    def good(self) -> bool:
        return self.p > ALPHA


def expected_law(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Law:
    """The target's law [V] in float64, computed independently of the kernel under test.

    Top-k keeps the k largest logits (ties: the lower id); top-p keeps the shortest head of these that has probability
    top_p or more.
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


def fit(draws: Sequence[int], law: Law, seed: int = 0) -> LawFit:
    """Compare draws (token ids) with a law. A draw of probability 0 makes p zero.

    seed: the simulation's. p is (1 + simulations that reach the statistic) / (1 + simulations).
    """
    return fit_counts(np.bincount(np.asarray(draws), minlength=len(law)), law, seed)


def fit_counts(counts: npt.NDArray[np.int64], law: Law, seed: int = 0) -> LawFit:
    """`fit`, from the number of times [V] that each token was drawn."""
    total = int(counts.sum())
    if counts[law == 0].any():
        return LawFit(total, 0, math.inf, 0.0)
    cells = _cells(law, total)
    chances = _in_cells(law, cells)
    statistic = float(likelihood_ratio(_in_cells(counts, cells)[None], chances)[0])
    return LawFit(total, len(chances), statistic, simulated_p(statistic, total, chances, SIMULATIONS, seed))


def simulated_p(statistic: float, draws: int, chances: Law, simulations: int, seed: int) -> float:
    """The share of samples of a law [cells] whose statistic is as large as this one.

    (1 + simulations that reach the statistic) / (1 + simulations), of which there are fewer where many reach it.
    """
    rng, made, reached = np.random.default_rng(seed), 0, 0
    while len(chances) > 1 and made < simulations and reached < EXCEEDED:
        simulated = rng.multinomial(draws, chances, size=min(BATCH, simulations - made))
        reached += int(np.count_nonzero(likelihood_ratio(simulated, chances) >= statistic * (1 - 1e-12)))
        made += len(simulated)
    return (1 + reached) / (1 + made)


def draws_to_notice(fault: Law, law: Law) -> int:
    """The number of draws from `fault` with which `fit` against `law` fails with probability about 1 - 10^-6.

    Computed from the statistic's mean and deviation under the fault, by the normal approximation. LARGEST_DRAWS if more
    are needed, e.g. for equal laws.
    """
    draws = float(SMALLEST_DRAWS)
    while draws < LARGEST_DRAWS:
        cells = _cells(law, int(draws))
        if deviations_above(draws, _in_cells(fault, cells), _in_cells(law, cells), ALPHA) > MISSED:
            return math.ceil(draws)
        draws *= DRAWS_STEP
    return LARGEST_DRAWS


def deviations_above(draws: float, faulty: Law, chances: Law, alpha: float) -> float:
    """The statistic's mean under a fault [cells], in its standard deviations above the value that it exceeds with
    probability `alpha` under the law [cells]. By the normal approximation."""
    freedom = len(chances) - 1
    if not freedom:
        return -math.inf
    ratio = np.zeros_like(chances)
    np.log(faulty / chances, out=ratio, where=faulty > 0)
    apart = float(faulty @ ratio)
    scatter = 4 * draws * float(faulty @ (ratio - apart) ** 2) + 2 * freedom
    return (freedom + 2 * draws * apart - float(chi2.isf(alpha, freedom))) / math.sqrt(scatter)


def _cells(law: Law, draws: int) -> npt.NDArray[np.int64]:
    """Cell of each token, [V], numbered from 0; tokens of probability 0 are in the last cell."""
    order = np.argsort(-law, kind="stable")
    least = max(MIN_EXPECTED / draws, 1 / MAX_CELLS)
    cells = np.empty(len(law), np.int64)
    alone = int(np.count_nonzero(law >= least))
    cells[order[:alone]] = np.arange(alone)
    rest = np.cumsum(law[order[alone:]])
    total = float(rest[-1]) if len(rest) else 0.0
    groups = max(int(total / least), 1)  # at least one cell, even if it is expected less often
    if len(rest):
        share = np.ceil(rest / total * groups).astype(np.int64) - 1 if total else np.zeros(len(rest), np.int64)
        cells[order[alone:]] = alone + np.clip(share, 0, groups - 1)
        if not total and alone:
            cells[order[alone:]] = alone - 1
    return np.unique(cells, return_inverse=True)[1].astype(np.int64)


def _in_cells(numbers: npt.NDArray[np.generic], cells: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return np.bincount(cells, weights=numbers.astype(np.float64)).astype(np.float64)


def likelihood_ratio(counts: npt.NDArray[np.generic], chances: Law) -> npt.NDArray[np.float64]:
    """The statistic G of counts [simulations, cells]."""
    observed = counts.astype(np.float64)
    expected = chances * observed.sum(1, keepdims=True)
    logs = np.zeros_like(observed)
    np.log(observed / expected, out=logs, where=observed > 0)
    return np.asarray(2 * (observed * logs).sum(1))
