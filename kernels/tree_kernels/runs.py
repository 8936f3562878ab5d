"""Runs: elements of an array that stand together, such as the rows of each text in a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def places_in_runs(lengths: Ints) -> Ints:
    """The place of each element in its run. lengths: of the runs, which stand one after the other

    >>> places_in_runs(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    places: Ints = np.arange(lengths.sum()) - np.repeat(ends - lengths, lengths)
    return places
