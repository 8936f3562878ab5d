"""The convolution along paths in PyTorch: one gather, and one multiply-add per tap."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tree_kernels.elementwise import elementwise

_silu = elementwise(F.silu)


def tree_conv(raw: Tensor, taps: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution and SiLU of each row: [rows, C] in the dtype of `raw`.

    raw [slots, C] inputs of the convolution; slot 0 holds zeros
    taps [rows, W] slots of each row's last inputs, itself last, 0 before the text   weight [W, C]   bias [C], float32
    """
    rows, width = taps.shape
    seen = raw.index_select(0, taps.t().reshape(-1)).view(width, rows, -1).float()
    first, *rest = zip(seen.unbind(0), weight.unbind(0), strict=True)
    out = first[0].mul_(first[1])
    for inputs, factors in rest:
        out.addcmul_(inputs, factors)
    return _silu(out.add_(bias)).to(raw.dtype)
