"""SiLU of the gate times the up projection, by torch's operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of gate [..., width] times up [..., width]; each is rounded to the type of both."""
    return F.silu(gate) * up
