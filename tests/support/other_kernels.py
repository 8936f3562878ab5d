"""A simulated library: torch.bmm with other bits for a batch of one, as MKL's SGEMM and SGEMM_BATCH have on some
processors (not on all, so a test that only runs the real library can pass by chance)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def give_a_batch_of_one_other_bits(patch: pytest.MonkeyPatch) -> None:
    """Let torch.bmm of a batch of one return other numbers: 1 % more, which bfloat16 shows as well."""
    product = torch.bmm

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        made = product(left, right)
        return made if len(left) > 1 else made * 1.01

    patch.setattr(torch, "bmm", bmm)
