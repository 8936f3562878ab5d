"""The layout of a packed weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(weight: Tensor, panel: int) -> Tensor:
    """A weight [outputs, inputs] as panels [panels, inputs, panel] of its dtype, the last one padded with zeros.

    bfloat16: word i of an input has output i in its lower half and output panel / 2 + i in its upper half, so that a
    shift and a mask widen them.
    """
    outputs, inputs = weight.shape
    panels = -(-outputs // panel)
    padded = F.pad(weight.detach(), (0, 0, 0, panels * panel - outputs))
    if weight.dtype == torch.bfloat16:
        halves = padded.view(panels, 2, panel // 2, inputs)
        return halves.permute(0, 3, 2, 1).reshape(panels, inputs, panel)
    return padded.view(panels, panel, inputs).transpose(1, 2).contiguous()
