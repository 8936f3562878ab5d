"""Classes by which costs and lengths are learned."""

from __future__ import annotations

import math

ROW_BUCKET = 8


def temperature_class(temperature: float) -> str:
    """Requests that accept alike: greedy, cool, warm."""
    if temperature == 0:
        return "greedy"
    return "cool" if temperature < 0.85 else "warm"


def row_bucket(rows: int) -> int:
    """Rows of a forward after padding."""
    return -(-rows // ROW_BUCKET) * ROW_BUCKET


def load_class(requests: int) -> int:
    """Loads that cost alike: 1 request, 2, 3 to 5, 6 to 11, 12 to 22, and so on."""
    return round(math.log2(max(requests, 1)))
