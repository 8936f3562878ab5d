"""Classes of temperature, rows and load. Costs and emitted lengths are learned per class."""

from __future__ import annotations

import functools
import math

from dendro.modes import LISTED_MODES, VerificationMode
from tree_kernels import ROW_MULTIPLE


def temperature_class(temperature: float) -> str:
    """Class of requests with similar acceptance: greedy (0), cool (below 0.85) or warm."""
    if temperature == 0:
        return "greedy"
    return "cool" if temperature < 0.85 else "warm"


def mode_class(mode: VerificationMode) -> str:
    """Class of modes with similar acceptance: each of LISTED_MODES, and the empty text for the others, whose guesses
    are ranked by the noise that the target draws with."""
    return str(mode) if mode in LISTED_MODES else ""


def row_class(rows: int) -> int:
    """Class of trees with similar costs of a step: the rows, rounded up to a multiple of ROW_MULTIPLE."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


@functools.lru_cache(maxsize=4096)  # several times a round
def load_class(requests: int) -> int:
    """Class of concurrency with similar costs: 1 request, 2, 3 to 5, 6 to 11, 12 to 22, and so on."""
    return round(math.log2(max(requests, 1)))
