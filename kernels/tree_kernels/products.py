"""Batched matrix products whose items have the same bits in a batch of any size, and a digest of the library's bits."""

from __future__ import annotations

import hashlib
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_kernels.elementwise import threads_of


def bmm(left: Tensor, right: Tensor) -> Tensor:
    """torch.bmm of left [batch, n, k] and right [batch, k, m] float32; an item's bits do not depend on `batch`.

    On a CPU, torch calls SGEMM for a batch of one and SGEMM_BATCH for larger ones, and MKL may use other kernels in
    the two: with 4 x 16 by 16 x 32 they differed on one processor and agreed on an AMD EPYC with AVX2. So a batch of
    one is computed as a batch of two equal items. `expand` copies nothing.
    """
    if len(left) != 1 or left.device.type != "cpu":
        return torch.bmm(left, right)
    return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]


@cache
def library_digest() -> str:
    """8 hex digits of a SHA-256 of results that this process's libraries compute from fixed numbers on a CPU: products,
    sums and functions that scans, attention, norms, activations and routers use. MKL and torch choose instructions by
    the processor, MKL_CBWR and ATEN_CPU_CAPABILITY, and round accordingly."""
    digest = hashlib.sha256()
    with threads_of(1), torch.inference_mode():
        x = torch.arange(4 * 64 * 64).mul_(7919).remainder_(4093).float().div_(4093).sub_(0.5).view(4, 64, 64)
        made = [torch.bmm(x[:, :rows], x[:, :, :columns]) for rows, columns in ((16, 32), (64, 64), (1, 64))]
        made += [x.sum(-1), x.cumsum(-1), x.exp(), x.exp2(), x.tanh(), F.softplus(x), F.silu(x), x.sigmoid()]
        made += [x.softmax(-1), x.view(-1, 8).softmax(-1), F.layer_norm(x, x.shape[-1:]), x.square().mean(-1).rsqrt()]
        made += [F.gelu(x), F.gelu(x, approximate="tanh")]
        for each in made:
            digest.update(each.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]
