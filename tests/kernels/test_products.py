"""Batched products: an item's bits do not depend on the size of its batch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tree_kernels.products import bmm, library_digest

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


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch multiplies without MKL")
def test_the_librarys_digest_is_another_where_its_products_round_otherwise():
    code = "AUTO,STRICT" if os.environ["MKL_CBWR"] == "COMPATIBLE" else "COMPATIBLE"
    script = f"import sys; sys.path[:0] = {sys.path!r}; from tree_kernels.products import library_digest as made"
    run = [sys.executable, "-c", f"{script}; print(made())"]
    environment = dict(os.environ, MKL_CBWR=code, OMP_WAIT_POLICY="passive")
    found = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert found != library_digest() and len(found) == len(library_digest()) == 8
