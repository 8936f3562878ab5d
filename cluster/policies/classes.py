"""Classes of temperature, rows and load. Costs and emitted lengths are learned per class."""

from __future__ import annotations

import functools
import math

from dendro.modes import LISTED_MODES, VerificationMode
from tree_kernels import ROW_MULTIPLE

CLASS_TEMPERATURES = {"greedy": 0.0, "cool": 0.7, "warm": 1.0}
"""A usual temperature of each class."""


def temperature_class(temperature: float) -> str:
    """Class of requests with similar acceptance rates: greedy (0), cool (below 0.85) or warm."""
    if temperature == 0:
        return "greedy"
    return "cool" if temperature < 0.85 else "warm"


def mode_class(mode: VerificationMode) -> str:
    """Class of verification modes with similar acceptance rates: a mode of LISTED_MODES is its own class; the others,
    whose drafters rank by the target's noise, are one class, named by the empty text."""
    return str(mode) if mode in LISTED_MODES else ""


def row_class(rows: int) -> int:
    """Class of trees that cost a step about as much: the tree's rows, rounded up to a multiple of ROW_MULTIPLE."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


@functools.lru_cache(maxsize=4096)  # cached: called several times a round
def load_class(requests: int) -> int:
    """Class of running requests with similar costs: 1 request, 2, 3 to 5, 6 to 11, 12 to 22, and so on.

    >>> [load_class(requests) for requests in (1, 2, 3, 5, 6, 11, 12)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return round(math.log2(max(requests, 1)))
