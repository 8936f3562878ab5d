"""Smoothing of measured times."""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of the newest measurement."""
OUTLIER = 3.0
"""A time counts as at most this many times the usual one: one page fault must not condemn an arm or a size of step."""


def smoothed(usual: float, newest: float) -> float:
    """The next smoothed value. `usual` 0 means that nothing was measured yet; the result is then `newest`."""
    return newest if not usual else usual + SMOOTHING * (newest - usual)
