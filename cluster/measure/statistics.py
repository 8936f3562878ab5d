"""Medians with distribution-free intervals, and ratios of paired measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

CONFIDENCE = 0.9


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and an interval that contains the true median with a probability of at least `coverage`."""

    median: float
    low: float
    high: float
    coverage: float  # coverage of the interval; less than 0.9 for fewer than 5 values, whose range it is

    def as_json(self) -> dict[str, float]:
        return {
            "median": round(self.median, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "coverage": round(self.coverage, 3),
        }


def median_estimate(values: Sequence[float]) -> Estimate:
    """The median and its interval by order statistics (sign test): exact for any distribution.

    The k-th smallest and the k-th largest of n values miss the true median with probability 2 P(Binomial(n, 1/2) < k);
    k is the largest for which that is at most 1 - CONFIDENCE. Of 16 values these are the 5th and the 12th.
    """
    ordered, count = sorted(values), len(values)
    rank, missed = _rank(count, (1 - CONFIDENCE) / 2)
    return Estimate(median(ordered), ordered[rank - 1], ordered[count - rank], max(1 - 2 * missed, 0.0))


def lower_bound(values: Sequence[float]) -> Estimate:
    """The median, and a bound below it: the true median is at least `low` with a probability of at least `coverage`."""
    ordered = sorted(values)
    rank, missed = _rank(len(values), 1 - CONFIDENCE)
    return Estimate(median(ordered), ordered[rank - 1], ordered[-1], 1 - missed)


def estimate(values: Sequence[float]) -> dict[str, float]:
    """A row's field: the median of values and its interval."""
    return median_estimate(values).as_json()


def estimates(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """A row's field: each way's estimate in milliseconds, of seconds."""
    return {way: estimate([1e3 * each for each in taken]) for way, taken in times.items()}


def over(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """A row's field: the estimate of the ratios of values that were measured next to each other."""
    return estimate([mine / its for mine, its in zip(one, other, strict=True)])


def _rank(count: int, most: float) -> tuple[int, float]:
    """The largest k, at least 1, for which P(Binomial(count, 1/2) < k) is at most `most`; and that probability."""
    below = [math.comb(count, successes) / 2**count for successes in range(count + 1)]
    if not count:
        raise ValueError("no values were measured")
    rank, missed = 1, below[0]
    while rank < (count + 1) // 2 and missed + below[rank] <= most:
        missed += below[rank]
        rank += 1
    return rank, missed


Key = tuple[int, int]
"""(prompt, repetition); measurements with the same key are a pair."""


def paired_ratio(over: Mapping[Key, float], under: Mapping[Key, float]) -> Estimate:
    """The median over prompts of `over / under`; raises as `ratios_by_prompt`."""
    return median_estimate(ratios_by_prompt(over, under))


def ratios_by_prompt(over: Mapping[Key, float], under: Mapping[Key, float]) -> list[float]:
    """Each prompt's `over / under`, paired by prompt and repetition.

    A prompt's ratio is the geometric mean over its repetitions, so every prompt counts once. Raises ValueError if the
    keys differ.
    """
    if over.keys() != under.keys():
        raise ValueError(f"paired_ratio: {len(over)} and {len(under)} measurements are not pairs")
    logs: dict[int, list[float]] = {}
    for prompt, repetition in over:
        pair = over[prompt, repetition] / under[prompt, repetition]
        logs.setdefault(prompt, []).append(math.log(pair))
    return [math.exp(sum(ratios) / len(ratios)) for ratios in logs.values()]
