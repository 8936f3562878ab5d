"""Whether draws come from a law that is near a given one, by a test with a simulated null distribution.

A server computes in another arithmetic than the reference, so its law is another one. The hypothesis is a set of laws:
those whose log-probabilities are each within a tolerance of the given ones. The statistic is the likelihood ratio to
the nearest law of the set, and its distribution is simulated under that law. As every law of the set has a statistic
at least as large, a server whose law is in the set fails one test with at most the probability of the p-value.

All tests of one run are judged together by Holm's rule: a server whose laws are all within the tolerance fails a run
with probability at most FAMILY_ERROR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from cluster.certify.law import Law, deviations_above, likelihood_ratio, simulated_p

FAMILY_ERROR = 1e-3
"""Largest probability that a run finds a fault in the draws of a server without one."""
BIAS = 1.05
"""The fault whose detection is reported: a likeliest token drawn this many times too often. It is that of vLLM's issue
54282, 63.0 % in place of 60 %."""
POWER = 0.99
"""Probability of noticing that fault with the reported number of draws."""
MISSED = NormalDist().inv_cdf(POWER)
MOST_NEEDED = 10**9


@dataclass(frozen=True, slots=True)
class DrawCounts:
    """Draws of one kind, counted in cells: the likeliest tokens have one each, all others share the last."""

    what: str  # the request whose answers were drawn
    counts: npt.NDArray[np.int64]  # [cells]
    chances: Law  # [cells]

    @property
    def draws(self) -> int:
        return int(self.counts.sum())


def nearest_law(shares: Law, chances: Law, tolerance: float) -> Law:
    """The law that makes draws in these shares likeliest, of those whose log-probabilities are within the tolerance of
    those of `chances`.

    >>> nearest_law(np.array([0.63, 0.37]), np.array([0.6, 0.4]), 0.1)
    array([0.63, 0.37])
    >>> nearest_law(np.array([0.63, 0.37]), np.array([0.6, 0.4]), 0.0)
    array([0.6, 0.4])
    """
    least, most = chances * math.exp(-tolerance), np.minimum(chances * math.exp(tolerance), 1.0)
    low, high = -60.0, 60.0  # bounds of the multiplier's logarithm; the sum of chances grows with the multiplier
    for _ in range(200):
        middle = (low + high) / 2
        if np.clip(shares * math.exp(middle), least, most).sum() < 1:
            low = middle
        else:
            high = middle
    found = np.clip(shares * math.exp(high), least, most)
    return np.asarray(np.round(found / found.sum(), 15))


def p_value(draws: DrawCounts, tolerance: float, family: int) -> float:
    """The largest probability, under a law within the tolerance, of draws as far from the set of these laws.

    family: the number of tests that are judged together, which sets the number of simulations
    """
    total = draws.draws
    possible = draws.chances > 0
    if draws.counts[~possible].any():
        return 0.0
    counts, chances = draws.counts[possible], draws.chances[possible]
    if not total or len(counts) < 2:
        return 1.0
    near = nearest_law(counts / total, chances, tolerance)
    statistic = float(likelihood_ratio(counts[None], near)[0])
    return simulated_p(statistic, total, near, round(2 * family / FAMILY_ERROR), 0)


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the same order; a fault is found where one is at most FAMILY_ERROR.

    >>> adjusted([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    found, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min((len(p_values) - place) * p_values[index], 1.0))
        found[index] = largest
    return found


def draws_for_bias(chances: Law, tolerance: float, family: int) -> int | None:
    """The number of draws with which BIAS on the first cell is noticed with probability POWER, by the normal
    approximation; None where it is not noticed, as it is within the tolerance or the cell is too likely."""
    top = chances[0] * BIAS
    if top >= 1 or len(chances) < 2:
        return None
    biased = np.concatenate([[top], chances[1:] * (1 - top) / (1 - chances[0])])
    biased, possible = biased[chances > 0], chances[chances > 0]
    near, alpha = nearest_law(biased, possible, tolerance), FAMILY_ERROR / family
    fewest, most = 1, 1
    while deviations_above(most, biased, near, alpha) < MISSED:
        fewest, most = most, 2 * most
        if most > MOST_NEEDED:
            return None
    while most - fewest > 1:
        middle = (fewest + most) // 2
        if deviations_above(middle, biased, near, alpha) < MISSED:
            fewest = middle
        else:
            most = middle
    return most


def pooled(what: str, found: Sequence[DrawCounts]) -> DrawCounts:
    """The likeliest tokens of several laws together, against all others, so that a bias of all of them adds up.

    Their number is a sum of binomials, which varies no more than the one binomial of the mean chance.
    """
    draws = np.array([each.draws for each in found])
    tops = sum(int(each.counts[0]) for each in found)
    chance = float(draws @ np.array([each.chances[0] for each in found])) / max(int(draws.sum()), 1)
    return DrawCounts(what, np.array([tops, int(draws.sum()) - tops]), np.array([chance, 1 - chance]))
