"""RMS norms and gated activations against their formulas, and that each row is computed alone."""

from __future__ import annotations

import pytest
import torch
from tree_kernels.row_functions import CompiledNorm, gated_silu, reference, why_not_compiled

pytestmark = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())

STEPS = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""The largest relative difference: a few last places in float32, one in the others."""
WIDTHS = (1, 7, 8, 31, 64, 384, 1000)


def rows_of(width, dtype, rows=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, width, generator=generator)).to(dtype)


def rms_norm(x, weight, eps):
    return CompiledNorm(weight, eps)(x)


def near(got, expected, dtype):
    assert got.dtype == expected.dtype == dtype and got.shape == expected.shape
    difference = (got.double() - expected.double()).abs()
    return bool((difference <= STEPS[dtype] * expected.double().abs() + 1e-30).all())


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_those_of_the_formula(width, dtype):
    x, weight = rows_of(width, dtype), rows_of(width, dtype, rows=1, seed=1)[0]
    assert near(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    assert near(rms_norm(x[None], weight, 0.5)[0], reference.rms_norm(x, weight, 0.5), dtype)


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_activations_are_those_of_the_formula(width, dtype):
    gate, up = rows_of(width, dtype), rows_of(width, dtype, seed=1)
    assert near(gated_silu(gate, up), reference.gated_silu(gate, up), dtype)


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_alone_and_among_others(width, dtype):
    x, up, weight = rows_of(width, dtype, 13), rows_of(width, dtype, 13, 1), rows_of(width, dtype, 1, 2)[0]
    normed, gated = rms_norm(x, weight, 1e-6), gated_silu(x, up)
    for row in range(13):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], normed[row])
        assert torch.equal(gated_silu(x[row], up[row]), gated[row])
    order = torch.randperm(13, generator=torch.Generator().manual_seed(3))
    assert torch.equal(rms_norm(x[order], weight, 1e-6), normed[order])


def test_rows_of_any_strides_are_taken():
    x = rows_of(48, torch.bfloat16, 6)
    weight = torch.ones(24, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x[:, ::2], weight, 1e-6), rms_norm(x[:, ::2].contiguous(), weight, 1e-6))
    assert torch.equal(gated_silu(x[:, :24], x[:, 24:]), gated_silu(x[:, :24].clone(), x[:, 24:].clone()))


def test_arguments_that_do_not_fit_each_other_are_refused():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.ones(8, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="gates"):
        gated_silu(x, x.bfloat16())
    with pytest.raises(ValueError, match="gates"):
        gated_silu(x, x[:1])


@pytest.mark.parametrize("dtype", STEPS)
def test_extreme_gates_give_the_results_of_torch(dtype):
    """Zero for large negative gates, the gate for large positive ones, and NaN for -inf and NaN."""
    given = [-1e36, -1e38, -3e38, -torch.inf, torch.inf, torch.nan, 3e38, -1e4, -100.0, -89.0, -0.0, 0.0, 100.0, 1e4]
    gate = torch.tensor(given).to(dtype)
    up = torch.ones_like(gate)
    expected = reference.gated_silu(gate, up)
    assert torch.allclose(gated_silu(gate, up), expected, rtol=0, atol=1e-30, equal_nan=True)
