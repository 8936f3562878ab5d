"""Numbers that all forms of the acceptance head share."""

from __future__ import annotations

import math

SHARPEST = 16.0
"""Upper bound of the sharpness 1 / tau; the lower bound is its inverse."""
LOG_SHARPEST = math.log(SHARPEST)
MOST_UNSEEN = 12.0
"""Upper bound of log n, the weight of all tokens past the candidates; the lower bound is its negative."""
WIDEST_GAP, LEAST_LOG_PROB = 16.0, -16.0
"""Bounds to which gaps of scores are cut from above, and log-probabilities from below, before the head reads them."""
GAP_UNIT, LAW_UNIT, DEPTH_UNIT = 4.0, 4.0, 8.0
"""Divisors of gaps, of entropies and log-probabilities, and of depths, before the head reads them."""
DEEPEST = 16
"""Depth to which greater depths are cut."""
LAW_NUMBERS = 5
"""Count of a row's numbers beside the K - 1 gaps: entropy, log-probability, temperature, whether it is 0, depth."""
OUTPUTS = 3
"""Number of the head's outputs: log sharpness, log n, and the lift of the first candidate before softplus."""
