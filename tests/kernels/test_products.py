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
    assert _printed("made()", MKL_CBWR=code) != library_digest()
    assert len(library_digest()) == 8


def test_the_librarys_digest_is_another_where_a_routers_softmax_rounds_otherwise():
    """Of 8 experts its bits with AVX2 are others than with AVX-512."""
    softmax = "zlib.crc32(torch.linspace(-9, 9, 4096).sin().view(-1, 8).softmax(-1).numpy().tobytes())"
    here, there = (_printed(f"made(), {softmax}", **each).split() for each in ({}, {"ATEN_CPU_CAPABILITY": "avx2"}))
    assert (here[0] == there[0]) is (here[1] == there[1])


def _printed(values: str, **environment: str) -> str:
    """What a process with these variables prints. values: expressions; `made` is `library_digest`"""
    begin = f"import sys, torch, zlib; sys.path[:0] = {sys.path!r}"
    script = f"{begin}; from tree_kernels.products import library_digest as made; print({values})"
    run = [sys.executable, "-c", script]
    variables = os.environ | {"OMP_WAIT_POLICY": "passive"} | environment
    return subprocess.run(run, env=variables, capture_output=True, text=True, check=True).stdout.strip()
