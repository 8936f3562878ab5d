"""Least squares with nonnegative coefficients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64] | Sequence[Sequence[float]]
Vector = npt.NDArray[np.float64] | Sequence[float]


def nonnegative_fit(design: Matrix, values: Vector) -> list[float]:
    """The x >= 0 with the least |design x - values|, one number for each column of `design`. For a weighted fit
    multiply each row and its value by the root of its weight.

    >>> [round(each, 6) for each in nonnegative_fit([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])]
    [2.0, 0.0]
    """
    from scipy.optimize import nnls  # imported here: it takes tenths of a second, and most commands do not need it

    found: list[float] = nnls(design, values)[0].tolist()
    return found
