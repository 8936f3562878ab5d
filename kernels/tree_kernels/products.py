"""Batched matrix products whose items have the same bits in a batch of any size."""

from __future__ import annotations

import torch
from torch import Tensor


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """torch.bmm of left [batch, n, k] and right [batch, k, m] float32; an item's bits do not depend on `batch`.

    On a CPU, torch calls SGEMM for a batch of one and SGEMM_BATCH for larger ones, and MKL may use other kernels in
    the two: with 4 x 16 by 16 x 32 they differed on one processor and agreed on an AMD EPYC with AVX2. So a batch of
    one is computed as a batch of two equal items. `expand` copies nothing.
    """
    if len(left) != 1 or left.device.type != "cpu":
        return torch.bmm(left, right)
    return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
