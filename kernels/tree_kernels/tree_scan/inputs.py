"""The inputs of the recurrence.

    H heads of P channels, G groups of heads that share B and C, N state width. Mamba-1: H channels, P = 1, G = 1.

Mamba-in-Llama has fewer inputs per token: X = H / r heads have an x, each for r consecutive heads, and G groups have a
B, each for r consecutive groups of C. Otherwise r = 1.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenInputs(NamedTuple):
    """A layer's inputs of every token, by slot; `x`, `B` after the convolution, `dt` after softplus and clamp."""

    x: Tensor  # [slots, X, P]
    B: Tensor  # [slots, G, N]
    dt: Tensor  # [slots, H] float32
