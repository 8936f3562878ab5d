"""Time of a verifier's step by its rows: the mean of measured steps; for other numbers of rows what the verifier
measured while it loaded, in proportion; beyond these a fitted polynomial.

    T(n) = c + k n              for targets whose layers all have states (degree 1)
    T(n) = c + k n + k2 n^2     for targets with attention layers, hybrids included (degree 2)

(docs/design/policies.md#step-time). Coefficients are least squares and at least 0, so more rows never cost less.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
from dendro.calls import Hello
from dendro.measured import OUTLIER
from dendro.wire import MAX_STEP_ROWS

STEP = 0.01
"""Share by which all weights decay with each measured step."""
UNIT = 64
"""Rows per unit of n in a fit, which keeps the powers of n of similar size."""
MOST_SIZES = 64
"""Most numbers of rows whose mean times are kept; beyond that the one of least weight is dropped, since peers report
the rows."""
REFIT = 1 / 8
"""Share of the weight that must be measured anew before the predictions are computed again."""
SURE = 1 / 64
"""Weight of the fit beside each measured mean, as a share of all steps: a number of rows that one step in 64 had counts
as much by its mean as by the fit."""
LEAST_WEIGHT = 1e-7
"""Weight below which a number of rows is dropped: it was not measured in the last 1600 to 2100 steps. With weights down
to 1e-26 a fit lost the constant, so 8 rows seemed to take 1/16 of the time of 128; and a prior with a weight of 0
counts as missing."""

MULTIPLE = 8
"""Steps above a verifier's largest reported size, or of one that reports none, count as padded to this multiple."""

Matrix = npt.NDArray[np.float64] | Sequence[Sequence[float]]
Vector = npt.NDArray[np.float64] | Sequence[float]
Coefficients = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TargetSteps:
    """What a verifier's hello says of its target's steps.

    Times of steps are learned and predicted for padded rows:

    >>> TargetSteps(sizes=(1, 2, 8, 32)).padded(5)
    8
    """

    sizes: tuple[int, ...] = ()  # numbers of rows that steps are padded to, ascending; empty: multiples of MULTIPLE
    attends: bool = False  # True if the target has attention layers
    loaded: tuple[tuple[int, int], ...] = ()  # rows, ascending, and microseconds of steps timed while it loaded

    @classmethod
    def of(cls, hello: Hello) -> Self:
        """What a verifier's hello says. Sizes of more rows than any verdict reports are left out: their times could not
        be stored in a prior."""
        sizes = tuple(rows for rows in hello.step_sizes if rows <= MAX_STEP_ROWS)
        return cls(sizes, hello.attends, hello.timed_steps)

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


@dataclass(slots=True)
class StepTime:
    """Mean step times by number of rows, with weights that decay by STEP per step.

    Steps of 1, 9 and 17 rows in 1.00, 1.08 and 1.16 ms take 990 us and 10 us a row, so 33 rows take 1.32 ms:

    >>> step, target = StepTime(), TargetSteps()
    >>> for rows, us in ((1, 1000.0), (9, 1080.0), (17, 1160.0)):
    ...     step.learn(rows, us, target)
    >>> round(step.at(33, target)), round(step.slope(33, target))
    (1320, 10)

    Where the verifier measured 6.0, 6.3 and 9.0 ms for 1, 2 and 5 rows while it loaded, and steps of one row take
    8.0 ms now, 2 rows are predicted to take 8.4 ms:

    >>> step, target = StepTime(), TargetSteps(loaded=((1, 6000.0), (2, 6300.0), (5, 9000.0)))
    >>> step.learn(1, 8000.0, target)
    >>> round(step.at(2, target)), round(step.at(5, target))
    (8400, 12000)
    """

    sizes: dict[int, tuple[float, float]] = field(default_factory=dict)  # by rows: weight, mean microseconds
    _solved: _Solved | None = field(default=None, init=False, repr=False, compare=False)
    _unfitted: int = field(default=0, init=False, repr=False, compare=False)  # steps since it was solved

    @property
    def weight(self) -> float:
        """Sum of the weights of the measured steps."""
        return sum(weight for weight, _ in self.sizes.values())

    def learn(self, rows: int, us: float, target: TargetSteps) -> None:
        """Record a measured step. Its time is cut at OUTLIER times the predicted one."""
        longest_us = OUTLIER * self.at(rows, target) if self.sizes else us
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
            self._solved = None

    def at_most(self, weight: float) -> StepTime:
        """A copy whose total weight is at most `weight` steps."""
        scale = min(1.0, weight / self.weight) if self.sizes else 1.0
        return StepTime({rows: (scale * each, us) for rows, (each, us) in self.sizes.items()})

    def coefficients(self, target: TargetSteps) -> Coefficients:
        """Coefficients [degree + 1] of the fit: microseconds per step, per row and, at degree 2, per row squared; zeros
        if no step was measured. The fit is solved again after REFIT of the weight was measured, after an outlier, and
        when a number of rows is new or dropped."""
        return self._current(target).fit

    def at(self, rows: float, target: TargetSteps) -> float:
        """Predicted microseconds of a step of `rows` rows; 0 if no step was measured. Between numbers of rows that were
        measured here or while loading it is interpolated; beyond them it is the fit, scaled to the nearest of them."""
        if not self.sizes:
            return 0.0
        solved = self._current(target)
        after, last = bisect_left(solved.rows, rows), len(solved.rows) - 1
        end = min(after, last)
        if rows == solved.rows[end]:
            return solved.us[end]
        if 0 < after <= last:
            return line_through(solved.rows[after - 1 : after + 1], solved.us[after - 1 : after + 1], rows)
        fitted = step_at(solved.fit, solved.rows[end])
        return solved.us[end] * (step_at(solved.fit, rows) / fitted) if fitted else solved.us[end]

    def slope(self, rows: float, target: TargetSteps) -> float:
        """Predicted microseconds that one more row adds to a step of `rows` rows, without padding."""
        fit = self.coefficients(target)
        return sum(power * each * rows ** (power - 1) for power, each in enumerate(fit) if power)

    def _current(self, target: TargetSteps) -> _Solved:
        if self._solved is None or self._solved.target is not target:
            self._solved, self._unfitted = self._solve(target), 0
        return self._solved

    def _solve(self, target: TargetSteps) -> _Solved:
        share = SURE * self.weight
        loaded = self._loaded(target)
        found = _Solved(target, self.sizes, loaded)
        known = {rows: (0.0, 0.0) for rows in loaded} | self.sizes
        blocks = list[tuple[float, float, int]]()  # weight, mean, number of sizes
        for rows, (weight, us) in sorted(known.items()):
            total, count = weight + share, 1
            guess = line_through(list(loaded), list(loaded.values()), rows) if loaded else step_at(found.fit, rows)
            mean = (weight * us + share * guess) / total
            while blocks and blocks[-1][1] > mean:  # more rows cannot take less time: both get their common mean
                other, higher, more = blocks.pop()
                mean = (total * mean + other * higher) / (total + other)
                total, count = total + other, count + more
            blocks.append((total, mean, count))
        found.rows, found.us = sorted(known), [mean for _, mean, count in blocks for _ in range(count)]
        return found

    def _loaded(self, target: TargetSteps) -> dict[int, float]:
        """Microseconds, by rows, of the steps timed while the verifier loaded, scaled to the steps measured here; empty
        if it timed fewer than two numbers of rows, or no step was measured here."""
        if len(target.loaded) < 2 or not self.sizes:
            return {}
        rows, us = zip(*target.loaded, strict=True)
        here = sum(weight * mean for weight, mean in self.sizes.values())
        then = sum(weight * line_through(rows, us, size) for size, (weight, _) in self.sizes.items())
        return {size: here / then * each for size, each in target.loaded}


@dataclass
class _Solved:
    """Predictions from the measured steps, for one target."""

    target: TargetSteps
    measured: Mapping[int, tuple[float, float]]  # by rows: weight, mean microseconds
    loaded: Mapping[int, float]  # by rows: microseconds of the steps timed while loading, scaled
    rows: Sequence[int] = ()  # numbers of rows with a time of their own, ascending
    us: Sequence[float] = ()  # microseconds of each, ascending

    @cached_property
    def fit(self) -> Coefficients:
        """Coefficients of the polynomial. Computed when first read: most predictions are of known numbers of rows, and
        solving takes as long as a tenth of a router's round without speculation."""
        weights = [weight for weight, _ in self.measured.values()]
        share = SURE * sum(weights)
        return fit_steps(
            [*self.measured, *self.loaded],
            [*(us for _, us in self.measured.values()), *self.loaded.values()],
            2 if self.target.attends else 1,
            [*weights, *(share for _ in self.loaded)],
        )


def line_through(rows: Sequence[int], us: Sequence[float], at: float) -> float:
    """Time at `at` rows on the line through the two nearest points. Below the first point it is at least that point's
    time in proportion to the rows, since the line may fall to 0 there. rows: at least two, ascending   us: not falling

    >>> line_through([1, 3], [10.0, 14.0], 2), line_through([1, 3], [10.0, 14.0], 4)
    (12.0, 16.0)
    >>> line_through([8, 9], [4.0, 8.0], 2)
    1.0
    """
    after = min(max(bisect_left(rows, at), 1), len(rows) - 1)
    part = (at - rows[after - 1]) / (rows[after] - rows[after - 1])
    return max(us[after - 1] + part * (us[after] - us[after - 1]), us[0] * min(at / rows[0], 1.0))


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


def usual_step_time(measured: Sequence[StepTime], target: TargetSteps) -> StepTime:
    """Step times that most of these agree on: by number of rows the median of their ratios to a step of one row, times
    the median step of one row. A ratio weighs as much as its steps, since one with few steps is uncertain.

    Texts are of different lengths, so a mean over all texts would compare steps of few rows of long texts with steps of
    many rows of short ones:

    >>> short, long = StepTime({1: (8.0, 1000.0), 5: (4.0, 1500.0)}), StepTime({1: (8.0, 2000.0)})
    >>> usual = usual_step_time([short, long, long], TargetSteps())
    >>> {rows: (weight, round(us)) for rows, (weight, us) in usual.sizes.items()}
    {1: (24.0, 2000), 5: (4.0, 3000)}
    """
    known = [each for each in measured if each.sizes]
    plain_us = [max(each.at(1, target), 1.0) for each in known]
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
