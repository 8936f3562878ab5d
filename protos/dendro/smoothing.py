"""Exponential smoothing of measured times."""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of the newest measurement."""


def smoothed(usual: float, newest: float) -> float:
    """The next smoothed value; `newest` itself where `usual` is 0, as nothing was measured before."""
    return newest if not usual else usual + SMOOTHING * (newest - usual)
