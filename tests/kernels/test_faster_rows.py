"""Products of few rows are padded to more where a GPU's library takes less time for them. None of it needs a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tree_layers import faster_rows
from tree_layers.linear import RowForms, _at_once, _Choice, _plain

BUCKETS = (8, 16, 32, 64)


@pytest.fixture
def slow_with_few(monkeypatch):
    """A clock by which 8 and 16 rows take ten times as long as 32."""
    times = {8: 300e-6, 16: 320e-6, 32: 30e-6, 64: 45e-6}
    monkeypatch.setattr(faster_rows, "seconds_of", lambda form, x: times[x.shape[-2]])
    return times


def test_few_rows_are_padded_to_the_fastest_number(slow_with_few):
    assert faster_rows.faster_rows(lambda x: x, torch.zeros(64, 4), BUCKETS) == {8: 32, 16: 32}


def test_a_small_gain_pads_nothing(slow_with_few):
    slow_with_few |= {8: 45e-6, 16: 31e-6}
    assert faster_rows.faster_rows(lambda x: x, torch.zeros(64, 4), BUCKETS) == {}


def test_a_padded_product_returns_its_own_rows_alone():
    weight, seen = torch.randn(6, 5), []

    def product(x):
        seen.append(x.shape[-2])
        return F.linear(x, weight)

    run = faster_rows.padded(product, {8: 32})
    for shape in ((1, 8, 5), (8, 5), (1, 16, 5)):
        x = torch.randn(shape)
        made = run(x)
        assert made.shape == (*shape[:-1], 6) and made.is_contiguous()
        assert torch.allclose(made, F.linear(x, weight), rtol=1e-5, atol=1e-6)
    assert seen == [32, 32, 16]


@pytest.mark.parametrize("bias", [None, torch.randn(24)], ids=["", "bias"])
def test_a_gpus_products_are_timed_once_for_a_kind_of_weight_and_padded(slow_with_few, monkeypatch, bias):
    """As if a CPU's were: rows keep the bits that they have unpadded."""
    seen, timed = [], []
    library, clock = F.linear, faster_rows.seconds_of

    def linear(x, *given):
        seen.append(x.shape[-2])
        return library(x, *given)

    weight, x = torch.randn(24, 40), torch.randn(1, 64, 40)
    plain = RowForms(BUCKETS).of(weight, bias)
    monkeypatch.setattr("tree_layers.linear._choices", lambda weight, may_pack: [_Choice("plain", _plain, _at_once)])
    monkeypatch.setattr("tree_layers.linear.rows_are_independent", lambda *_: True)
    assert torch.allclose(RowForms(BUCKETS).of(weight, bias)(x), plain(x), atol=1e-5)
    monkeypatch.setattr(F, "linear", linear)
    monkeypatch.setattr("tree_layers.linear.TIMED", {"cpu"})
    monkeypatch.setattr(faster_rows, "seconds_of", lambda form, x: timed.append(x.shape[-2]) or clock(form, x))
    forms = RowForms(BUCKETS)
    made = [forms.of(weight, bias), forms.of(weight + 1, bias)][0]
    assert timed == [*BUCKETS]
    for rows, run in ((8, 32), (5, 32), (1, 32), (16, 32), (32, 32), (40, 32), (64, 64)):
        seen.clear()
        found = made(x[:, :rows])
        assert max(seen) == run and found.shape == (1, rows, 24)
        assert torch.allclose(found, plain(x)[:, :rows], atol=1e-5)
