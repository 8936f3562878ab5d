"""Time of a verifier's step by its rows: the mean of measured steps, and a fitted polynomial for other numbers of rows.

    T(n) = c + k n              for targets whose layers all have states (degree 1)
    T(n) = c + k n + k2 n^2     for targets with attention layers, hybrids included (degree 2)

(docs/design/policies.md#step-time). Coefficients are least squares and at least 0, so more rows never cost less.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from dendro.measured import OUTLIER

STEP = 0.01
"""Share by which all weights decay with each measured step."""
UNIT = 64
"""Rows per unit of n in a fit, which keeps the powers of n of similar size."""
MOST_SIZES = 64
"""Most numbers of rows whose mean times are kept; beyond that the one of least weight is dropped, since peers report
the rows."""
REFIT = 1 / 8
"""Share of the weight that must be measured anew before the fit is solved again. Solving takes as long as a fifth of a
router's round without speculation."""
SURE = 1 / 64
"""Weight of the fit beside each measured mean, as a share of all steps: a number of rows that one step in 64 had counts
as much by its mean as by the fit."""
LEAST_WEIGHT = 1e-7
"""Weight below which a number of rows is dropped: it was not measured in the last 1600 to 2100 steps. With weights down
to 1e-26 a fit lost the constant, so 8 rows seemed to take 1/16 of the time of 128; and a prior with a weight of 0
counts as missing."""

MULTIPLE = 8
"""Steps of a verifier that does not report its sizes, and rows above its largest, count as padded to a multiple."""

Matrix = npt.NDArray[np.float64] | Sequence[Sequence[float]]
Vector = npt.NDArray[np.float64] | Sequence[float]
Coefficients = tuple[float, ...]
Curve = tuple[Sequence[int], Sequence[float]]
"""Numbers of rows, ascending, and microseconds of each."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Numbers of rows to which a verifier pads its steps, ascending, from its hello; none: every multiple of MULTIPLE.
    Times of steps are learned and predicted for padded rows."""

    sizes: tuple[int, ...] = ()

    def padded(self, rows: int) -> int:
        """Padded size of a step with `rows` rows."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else -(-rows // MULTIPLE) * MULTIPLE


def nonnegative_fit(design: Matrix, values: Vector) -> list[float]:
    """The x >= 0 with the least |design x - values|, one number for each column of `design`. For a weighted fit
    multiply each row and its value by the root of its weight.

    >>> [round(each, 6) for each in nonnegative_fit([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])]
    [2.0, 0.0]
    """
    from scipy.optimize import nnls  # imported here: it takes tenths of a second, and most commands do not need it

    found: list[float] = nnls(design, values)[0].tolist()
    return found


def degree_of(attends: bool) -> int:
    """Degree of the polynomial of a target's step times. attends: True if the target has attention layers"""
    return 2 if attends else 1


@dataclass(slots=True)
class StepTime:
    """Mean step times by number of rows, with weights that decay by STEP per step.

    Steps of 1, 9 and 17 rows in 1.00, 1.08 and 1.16 ms take 990 us and 10 us a row, so 33 rows take 1.32 ms:

    >>> step = StepTime()
    >>> for rows, us in ((1, 1000.0), (9, 1080.0), (17, 1160.0)):
    ...     step.learn(rows, us, degree=1)
    >>> round(step.at(33, degree=1)), round(step.slope(33, degree=1))
    (1320, 10)
    """

    sizes: dict[int, tuple[float, float]] = field(default_factory=dict)  # by rows: weight, mean microseconds
    _fits: dict[int, Coefficients] = field(default_factory=dict, init=False, repr=False, compare=False)  # key: degree
    _curves: dict[int, Curve] = field(default_factory=dict, init=False, repr=False, compare=False)  # key: degree
    _unfitted: int = field(default=0, init=False, repr=False, compare=False)  # steps since the fits were solved

    @property
    def weight(self) -> float:
        """Sum of the weights of the measured steps."""
        return sum(weight for weight, _ in self.sizes.values())

    def learn(self, rows: int, us: float, degree: int) -> None:
        """Record a measured step. Its time is cut at OUTLIER times the predicted one. degree: of the prediction"""
        longest_us = OUTLIER * self.at(rows, degree) if self.sizes else us
        outlier, us = us > longest_us, min(us, longest_us)
        before = self.sizes.keys()
        self.sizes = {
            size: (weight * (1 - STEP), mean) for size, (weight, mean) in self.sizes.items() if weight >= LEAST_WEIGHT
        }
        weight, mean = self.sizes.get(rows, (0.0, 0.0))
        self.sizes[rows] = weight + 1, mean + (us - mean) / (weight + 1)
        if len(self.sizes) > MOST_SIZES:
            del self.sizes[min(self.sizes, key=lambda size: self.sizes[size])]
        self._unfitted += 1
        if self._unfitted > REFIT * self.weight or outlier or self.sizes.keys() != before:
            self._fits.clear()
            self._curves.clear()
            self._unfitted = 0

    def at_most(self, weight: float) -> StepTime:
        """A copy whose total weight is at most `weight` steps."""
        scale = min(1.0, weight / self.weight) if self.sizes else 1.0
        return StepTime({rows: (scale * each, us) for rows, (each, us) in self.sizes.items()})

    def coefficients(self, degree: int) -> Coefficients:
        """Coefficients [degree + 1] of the fit: microseconds per step, per row and, at degree 2, per row squared; zeros
        if no step was measured. The fit is solved again after REFIT of the weight was measured, after an outlier, and
        when a number of rows is new or dropped."""
        if degree not in self._fits:
            weights, us = zip(*self.sizes.values(), strict=True) if self.sizes else ((), ())
            self._fits[degree] = fit_steps(list(self.sizes), us, degree, weights)
        return self._fits[degree]

    def at(self, rows: float, degree: int) -> float:
        """Predicted microseconds of a step of `rows` rows; 0 if no step was measured. Between numbers of rows that were
        measured it is a line through their means, beyond them the fit in proportion."""
        if not self.sizes:
            return 0.0
        if degree not in self._curves:
            self._curves[degree] = self._curve(degree)
        sizes, us = self._curves[degree]
        after = bisect_left(sizes, rows)
        if 0 < after < len(sizes):
            before = after - 1
            part = (rows - sizes[before]) / (sizes[after] - sizes[before])
            return us[before] + part * (us[after] - us[before])
        end, fit = min(after, len(sizes) - 1), self.coefficients(degree)
        fitted = step_at(fit, sizes[end])
        return us[end] * (step_at(fit, rows) / fitted) if fitted else us[end]

    def _curve(self, degree: int) -> Curve:
        """The measured numbers of rows, ascending, and their times. A time is the weighted mean of what was measured
        and the fit; where more rows would take less time, both get their common mean."""
        fit, share = self.coefficients(degree), SURE * self.weight
        blocks = list[tuple[float, float, int]]()  # weight, mean, number of sizes
        for rows, (weight, us) in sorted(self.sizes.items()):
            total, count = weight + share, 1
            mean = (weight * us + share * step_at(fit, rows)) / total
            while blocks and blocks[-1][1] > mean:
                other, higher, more = blocks.pop()
                mean = (total * mean + other * higher) / (total + other)
                total, count = total + other, count + more
            blocks.append((total, mean, count))
        return sorted(self.sizes), [mean for _, mean, count in blocks for _ in range(count)]

    def slope(self, rows: float, degree: int) -> float:
        """Predicted microseconds that one more row adds to a step of `rows` rows, without padding."""
        return sum(power * each * rows ** (power - 1) for power, each in enumerate(self.coefficients(degree)) if power)


def step_at(coefficients: Coefficients, rows: float) -> float:
    """Value of the polynomial, in microseconds, at `rows` rows."""
    value = 0.0
    for each in reversed(coefficients):
        value = value * rows + each
    return value


def fit_steps(rows: Sequence[int], us: Vector, degree: int, weights: Vector | None = None) -> Coefficients:
    """Fit the polynomial to steps with these rows, times and weights (by default equal). Fewer different numbers of
    rows than coefficients give a polynomial of lower degree, padded with zeros."""
    count = min(degree + 1, len(set(rows)))
    root = np.sqrt(np.ones(len(rows)) if weights is None else weights)
    design = (np.array(rows, np.float64)[:, None] / UNIT) ** np.arange(count)
    fit = nonnegative_fit(design * root[:, None], us * root) if count else []
    return tuple(each / UNIT**power for power, each in enumerate(fit + [0.0] * (degree + 1 - count)))


def usual_step_time(measured: Sequence[StepTime], degree: int) -> StepTime:
    """Step times that most of these agree on: by number of rows the median of their ratios to a step of one row, times
    the median step of one row. A ratio weighs as much as its steps, since one with few steps is uncertain.

    Texts are of different lengths, so a mean over all texts would compare steps of few rows of long texts with steps of
    many rows of short ones:

    >>> short, long = StepTime({1: (8.0, 1000.0), 5: (4.0, 1500.0)}), StepTime({1: (8.0, 2000.0)})
    >>> usual = usual_step_time([short, long, long], degree=1)
    >>> {rows: (weight, round(us)) for rows, (weight, us) in usual.sizes.items()}
    {1: (24.0, 2000), 5: (4.0, 3000)}
    """
    known = [each for each in measured if each.sizes]
    plain_us = [max(each.at(1, degree), 1.0) for each in known]
    ratios: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for each, one_us in zip(known, plain_us, strict=True):
        for rows, (weight, us) in each.sizes.items():
            ratios[rows].append((us / one_us, weight))
    usual_us = statistics.median_low(plain_us) if known else 0.0
    return StepTime(
        {rows: (sum(w for _, w in found), usual_us * _weighted_median(found)) for rows, found in ratios.items()}
    )


def _weighted_median(found: list[tuple[float, float]]) -> float:
    """The least value with at least half of the weight at or below it. found: values and weights"""
    left = sum(weight for _, weight in found) / 2
    for value, weight in sorted(found):
        left -= weight
        if left <= 0:
            return value
    return max(found)[0]
