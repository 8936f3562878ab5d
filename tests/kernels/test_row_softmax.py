"""Probabilities of rows: the formula, and the same bits in every place and with vectors of every width."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from tree_kernels.processor import why_not_vectors
from tree_kernels.row_softmax import cpu, log_probabilities, softmax
from tree_kernels.row_softmax.reference import law_of, log_law_of

pytestmark = pytest.mark.skipif(bool(why_not_vectors()), reason=why_not_vectors())
WIDTHS = (1, 2, 50, 63, 64, 65, 257, 4099, 49_152)


def random_rows(width: int, scale: float, rows: int = 4) -> torch.Tensor:
    return scale * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 30.0, 1e4])
def test_probabilities_and_their_logarithms_are_those_of_the_formula(width, scale):
    rows = random_rows(width, scale)
    law, expected = softmax(rows).double(), law_of(rows)
    below = rows.amax(1, keepdim=True).double() - rows  # its rounding is part of the float32 formula
    assert ((law - expected).abs() <= (6e-7 + 6e-8 * below) * expected + 1e-37).all()
    assert (law.sum(1) - 1).abs().max() < 5e-7
    every = torch.arange(width)
    for row, logarithms in zip(rows.split(1), log_law_of(rows), strict=True):
        found = log_probabilities(row, every).double()
        assert ((found - logarithms).abs() <= 1e-6 + 1.2e-7 * logarithms.abs()).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_alone_at_any_address_and_in_a_batch(width):
    rows = random_rows(width, 3.0)
    together = softmax(rows)
    for row in range(len(rows)):
        for place in range(5):
            moved = torch.empty(width + 8)[place : place + width].copy_(rows[row])[None]
            assert torch.equal(softmax(moved)[0], together[row])
            ids = torch.arange(width)
            assert torch.equal(log_probabilities(moved, ids), log_probabilities(rows[row : row + 1], ids))
    apart = torch.empty(len(rows), width + 3)[:, :width].copy_(rows)
    assert torch.equal(softmax(apart), together)


def test_removed_tokens_have_no_probability_and_unusable_rows_no_number():
    rows = torch.zeros(4, 130)
    rows[:, 1] = -math.inf
    rows[1, 5], rows[2, 70], rows[3, :] = math.nan, math.inf, -math.inf
    law = softmax(rows)
    assert law[0, 1] == 0 and law[0, 0] == 1 / torch.tensor(129.0)
    assert law[1:].isnan().all()
    assert log_probabilities(rows[:1], torch.tensor([1]))[0] == -math.inf


def test_a_token_with_nearly_all_probability_keeps_its_digits():
    """1 - 2e-9 is 1 in float32."""
    found = log_probabilities(torch.tensor([[20.0, 0.0]]), torch.tensor([0]))[0]
    assert found == pytest.approx(-math.exp(-20), rel=1e-6)


def test_bits_do_not_depend_on_the_width_of_vectors(tmp_path):
    """torch's softmax has other bits with AVX2 than with AVX-512."""
    rows = torch.randint(-9000, 9000, (8, 32_000), generator=torch.Generator().manual_seed(1)) / 1000
    found = softmax(rows), log_probabilities(rows[:1], torch.arange(32_000))
    torch.save((rows, *found), tmp_path / "here.pt")
    script = (
        f"import sys, torch; sys.path[:0] = {sys.path!r}; "
        "from tree_kernels.row_softmax import log_probabilities, softmax; "
        f"rows, law, logarithms = torch.load({str(tmp_path / 'here.pt')!r}); "
        "assert torch.equal(softmax(rows), law); "
        "assert torch.equal(log_probabilities(rows[:1], torch.arange(32_000)), logarithms)"
    )
    features = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2"}
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    other = {"ATEN_CPU_CAPABILITY": "avx2", "DENDRO_KERNEL_CACHE": str(folder)} | features
    subprocess.run([sys.executable, "-c", script], env=os.environ | other, check=True)
    assert [each.name for each in folder.glob("*.zip")], "the kernel was compiled for the other processor"


def test_torch_computes_both_where_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(cpu, "_kernel", lambda: None)
    rows = random_rows(300, 3.0)
    assert torch.equal(softmax(rows), torch.softmax(rows, 1))
    assert torch.equal(log_probabilities(rows[:1], torch.arange(300)), torch.log_softmax(rows[:1], 1)[0])
