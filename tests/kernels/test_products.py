"""Batched products: an item's bits do not depend on the size of its batch."""

from __future__ import annotations

import pytest
import torch
from tree_kernels.products import bmm

from tests.support.other_kernels import give_a_batch_of_one_other_bits


@pytest.mark.parametrize("simulated", [False, True], ids=["real", "simulated"])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(4, 16, 32), (1, 64, 32), (40, 16, 1), (71, 64, 32)])
def test_an_item_has_the_same_bits_alone_as_in_a_batch(rows, inner, columns, simulated, monkeypatch):
    if simulated:
        give_a_batch_of_one_other_bits(monkeypatch)
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(24, rows, inner, generator=generator)
    right = torch.randn(24, columns, 2 * inner + 1, generator=generator)[..., :inner].transpose(1, 2)
    together = bmm(left, right)
    for item in range(24):
        assert torch.equal(bmm(left[item : item + 1], right[item : item + 1])[0], together[item])
