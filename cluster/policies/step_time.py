"""Time of a verifier's step as a function of its rows, fitted as steps are measured.

    T(n) = c + k n              for targets whose layers all have states (degree 1)
    T(n) = c + k n + k2 n^2     for targets with attention layers, hybrids included (degree 2)

(ALGORITHMS 10.2). Least squares with no coefficient below zero, so that more rows never cost less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dendro.smoothing import OUTLIER

STEP = 0.01
UNIT = 64
"""Rows per unit of n in the sums, which keeps fourth powers small."""
SINGULAR = 1e-9
"""Least relative remainder of a feature after elimination of the others; less is rounding."""
ALIKE = 1e-13
"""Difference of squared errors, relative to a step's squared time, below which the simplest fit is taken."""
FEATURES = {1: ((0,), (0, 1), (1,)), 2: ((0,), (0, 1), (0, 2), (1,), (1, 2), (2,), (0, 1, 2))}
"""By degree: sets of powers of n that a fit may have, in order of preference."""

Coefficients = tuple[float, ...]


def degree_of(attends: bool) -> int:
    """Degree of the polynomial of a target's step times, by whether it has attention layers."""
    return 2 if attends else 1


@dataclass(slots=True)
class StepTime:
    """Means over the steps measured so far, with weights that decay by STEP per step.

    The means serve both degrees; each method takes the degree of the target. n is rows / UNIT.
    """

    weight: float = 0.0
    n: float = 0.0
    n2: float = 0.0
    n3: float = 0.0
    n4: float = 0.0
    us: float = 0.0
    n_us: float = 0.0
    n2_us: float = 0.0
    _fits: dict[int, Coefficients] = field(default_factory=dict, init=False, repr=False, compare=False)  # by degree

    def learn(self, rows: int, us: float, degree: int) -> None:
        """Record a measured step."""
        if self.weight:
            us = min(us, OUTLIER * self.at(rows, degree))
        n = rows / UNIT
        self.weight = self.weight * (1 - STEP) + 1
        step = 1 / self.weight
        self.n += step * (n - self.n)
        self.n2 += step * (n**2 - self.n2)
        self.n3 += step * (n**3 - self.n3)
        self.n4 += step * (n**4 - self.n4)
        self.us += step * (us - self.us)
        self.n_us += step * (n * us - self.n_us)
        self.n2_us += step * (n**2 * us - self.n2_us)
        self._fits.clear()

    def coefficients(self, degree: int) -> Coefficients:
        """[degree + 1] microseconds of a step, per row, and at degree 2 per row squared."""
        if degree not in self._fits:
            powers = (1.0, self.n, self.n2, self.n3, self.n4)
            gram = [powers[power : power + degree + 1] for power in range(degree + 1)]
            fit = nonnegative_fit(gram, (self.us, self.n_us, self.n2_us)[: degree + 1])
            self._fits[degree] = tuple(each / UNIT**power for power, each in enumerate(fit))
        return self._fits[degree]

    def at(self, rows: float, degree: int) -> float:
        """Predicted microseconds of a step of so many rows; 0 where none was measured."""
        return step_at(self.coefficients(degree), rows)


def step_at(coefficients: Coefficients, rows: float) -> float:
    """The polynomial's value at so many rows."""
    return sum(each * rows**power for power, each in enumerate(coefficients))


def fit_steps(rows: Sequence[float], us: Sequence[float], degree: int) -> Coefficients:
    """The coefficients for steps of equal weight."""
    count = len(rows)
    sums = [sum((each / UNIT) ** power for each in rows) / count for power in range(2 * degree + 1)]
    gram = [sums[power : power + degree + 1] for power in range(degree + 1)]
    wanted = [
        sum((each / UNIT) ** power * took for each, took in zip(rows, us, strict=True)) / count
        for power in range(degree + 1)
    ]
    return tuple(each / UNIT**power for power, each in enumerate(nonnegative_fit(gram, wanted)))


def nonnegative_fit(gram: Sequence[Sequence[float]], wanted: Sequence[float]) -> Coefficients:
    """The x >= 0, of two or three numbers, with the least x' G x - 2 w' x, found by trying all sets of nonzero
    coefficients. Of equally good ones, as with too few different numbers of rows, the first in FEATURES is taken."""
    best, least = (0.0,) * len(wanted), 0.0
    for chosen in FEATURES[len(wanted) - 1]:
        found = _solved(gram, wanted, chosen)
        if found is None or min(found) < 0:
            continue
        by_power = dict(zip(chosen, found, strict=True))
        fit = tuple(by_power.get(power, 0.0) for power in range(len(wanted)))
        # Not -w' x, which is equal at a minimum: a rounding error of x changes this form only by its square.
        value = sum(
            each * (sum(g * other for g, other in zip(row, fit, strict=True)) - 2 * w)
            for each, row, w in zip(fit, gram, wanted, strict=True)
        )
        if value < least - ALIKE * wanted[0] ** 2:
            best, least = fit, value
    return best


def _solved(gram: Sequence[Sequence[float]], wanted: Sequence[float], chosen: Sequence[int]) -> Sequence[float] | None:
    """The solution of G x = w for these features alone; None where they are linearly dependent."""
    rows = [[*(gram[i][j] for j in chosen), wanted[i]] for i in chosen]
    for at, row in enumerate(rows):
        if row[at] <= SINGULAR * gram[chosen[at]][chosen[at]]:
            return None
        for below in rows[at + 1 :]:
            factor = below[at] / row[at]
            for column in range(at, len(row)):
                below[column] -= factor * row[column]
    found = [0.0] * len(rows)
    for at in reversed(range(len(rows))):
        known = sum(rows[at][later] * found[later] for later in range(at + 1, len(rows)))
        found[at] = (rows[at][-1] - known) / rows[at][at]
    return found
