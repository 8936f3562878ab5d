"""Linear layers whose rows do not depend on their neighbours: what is chosen, and that a bad form would be noticed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tree_layers.linear import _first_independent, _sliced, _tiled, make_rows_independent, rows_are_independent

BUCKETS = (8, 16, 24, 32, 48, 64)


def split_by_rows(weight, bias):
    """A form that splits its inner dimension the more, the fewer rows there are: what libraries do."""

    def run(x):
        parts = 1 + 64 // x.shape[-2]
        slices = zip(x.tensor_split(parts, -1), weight.tensor_split(parts, -1), strict=True)
        return sum(F.linear(each, part).float() for each, part in slices).to(x.dtype)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [48, 320, 896, 1000, 1152, 2048])
def test_every_layer_gets_rows_that_stand_alone(inputs, dtype):
    torch.manual_seed(inputs)
    layer = nn.Linear(inputs, 72, dtype=dtype)
    model = nn.Sequential(layer)
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    with torch.inference_mode():
        report = make_rows_independent(model, BUCKETS)
        assert report.independent
        x = torch.randn(64, inputs).to(dtype)
        truth = model(x[None])[0]
        for count in BUCKETS:
            assert torch.equal(model(x[None, -count:])[0], truth[-count:])
        exact = F.linear(x.double(), weight, bias)
        assert (truth.double() - exact).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", [lambda w, b: _sliced(w, b, 64), _tiled], ids=["slices", "tiles"])
@pytest.mark.parametrize("inputs", [128, 200])
def test_forms_are_the_product(form, inputs, bias):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, 40, bias=bias).requires_grad_(False)
    x = torch.randn(2, 37, inputs)
    torch.testing.assert_close(form(layer.weight, layer.bias)(x), layer(x), atol=1e-5, rtol=1e-5)


def test_a_form_that_splits_by_the_number_of_rows_is_noticed(monkeypatch):
    """On ordinary numbers it shows in so few results that a check may miss it; on sums that cancel it always does."""
    monkeypatch.setattr("tree_layers.linear._plain", split_by_rows)
    monkeypatch.setattr("tree_layers.linear._sliced", lambda weight, bias, size: split_by_rows(weight, bias))
    monkeypatch.setattr("tree_layers.linear._tiled", split_by_rows)
    layer = nn.Linear(640, 40, bias=False, dtype=torch.bfloat16)
    assert _first_independent(layer, BUCKETS) is None
    with torch.inference_mode():
        report = make_rows_independent(nn.Sequential(layer), BUCKETS)
    assert not report.independent
    assert "640 x 40" in str(report)


def test_a_form_that_looks_at_a_rows_place_is_noticed():
    def placed(x):
        return x * torch.arange(x.shape[-2])[:, None]

    assert not rows_are_independent(placed, torch.randn(64, 16), BUCKETS)
    assert rows_are_independent(lambda x: 2 * x, torch.randn(64, 16), BUCKETS)


def test_a_layer_with_a_form_of_its_own_is_left_alone():
    layer = nn.Linear(640, 8, dtype=torch.bfloat16)
    layer.forward = lambda x: x
    make_rows_independent(nn.Sequential(layer), BUCKETS)
    assert layer(1) == 1
