"""Float32 results of narrow weights on a GPU. None of it needs one: a CPU's library stands for a GPU's."""

from __future__ import annotations

import pytest
import torch
from tree_layers import wide_results
from tree_layers.linear import RowForms

BUCKETS = (8, 16, 32, 64)
EXACT = 2.0**-18


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def weight(request, monkeypatch):
    """A weight on a device with a library's product of float32 results, and no product of ours."""
    monkeypatch.setattr(wide_results, "WIDENING", {"cpu"})
    monkeypatch.setattr("tree_layers.linear.why_not_compiled", lambda weight: "switched off by a test")
    monkeypatch.setattr("tree_layers.linear.faster_rows", lambda *_: {})
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(request.param)


def put_library(monkeypatch, noise=0.0):
    """noise: of results, times the number of rows"""

    def mm(x, turned, out_dtype):
        assert x.dtype == turned.dtype and out_dtype == torch.float32
        return (x.double() @ turned.double() + noise * len(x)).float()

    monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.parametrize("biased", [False, True])
def test_results_are_float32_sums_of_the_weight_itself(weight, biased, monkeypatch):
    put_library(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "float", _of_no_weight(torch.Tensor.float, weight))
    bias = weight[:, 0].clone() if biased else None
    forms = RowForms(BUCKETS)
    form = forms.in_float32(weight, bias)
    assert forms.report().forms == {"with float32 results": 1} and forms.report().independent
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    truth = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    for rows in (1, 7, 8, 33, 40):
        found = form(x[:, :rows])
        assert found.dtype == torch.float32 and found.shape == (1, rows, 48)
        assert (found - truth[:, :rows]).abs().max() < EXACT * truth.abs().max()


def test_rows_that_depend_on_their_number_are_multiplied_in_full_tiles(weight, monkeypatch):
    put_library(monkeypatch, noise=1e-3)
    forms = RowForms(BUCKETS)
    forms.in_float32(weight)
    assert forms.report().forms == {"with float32 results, in full tiles": 1}


def test_a_product_that_passes_no_check_is_replaced_by_one_of_the_widened_weight(weight, monkeypatch):
    put_library(monkeypatch)
    library, calls = torch.mm, []

    def mm(*given, **named):
        calls.append(0)
        return library(*given, **named) + len(calls)

    monkeypatch.setattr(torch, "mm", mm)
    form = RowForms(BUCKETS).in_float32(weight)
    calls.clear()
    x = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    assert (form(x) - x.double() @ weight.double().t()).abs().max() < 1e-4 and not calls


def test_a_library_without_such_products_multiplies_by_the_widened_weight(weight, monkeypatch):
    def mm(*given, **named):
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch, "mm", mm)
    form = RowForms(BUCKETS).in_float32(weight)
    x = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    assert (form(x) - x.double() @ weight.double().t()).abs().max() < 1e-4


def _of_no_weight(widened, weight):
    def run(tensor):
        assert tensor is not weight, "the weight is not copied"
        return widened(tensor)

    return run
