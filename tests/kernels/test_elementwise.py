"""Elementwise functions: a number's result does not depend on its place in a buffer or on the buffer's length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tree_kernels.elementwise import GRAIN, VECTOR_BYTES, elementwise, elementwise_, is_narrow, is_safe, threads_of
from tree_layers.narrow import NarrowRows, narrow

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "exp2": torch.exp2,
    "mish": F.mish,
    "pow": lambda x: x.abs().pow(1.5),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
}
THIRD_OF_A_BUFFER = (1 << 17) + 32


def numbers(count, dtype, seed=0):
    return (3 * torch.randn(count, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_has_the_same_bits_in_any_buffer(name, dtype):
    run = elementwise(FUNCTIONS[name])
    x = numbers(1024, dtype)
    truth = run(x)
    for count in range(1, 260, 3):
        for start in (0, 7, 64):
            assert torch.equal(run(x[start : start + count]), truth[start : start + count]), (count, start)


@pytest.mark.parametrize("name", ["silu", "exp2", "gelu"])
def test_half_of_a_gated_layers_output_has_the_bits_of_its_copy(name):
    run = elementwise(FUNCTIONS[name])
    both = numbers(24 * 200, torch.float32).view(24, 200)
    assert torch.equal(run(both[:, :100]), run(both[:, :100].contiguous()))


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_changes_no_bit(threads):
    x = numbers(THIRD_OF_A_BUFFER, torch.float32).view(-1, 32)
    truth = elementwise(F.silu)(x)
    with threads_of(threads):
        assert torch.equal(elementwise(F.silu)(x), truth)
        assert torch.equal(elementwise_(torch.Tensor.exp2_, x.clone()), elementwise(torch.exp2)(x))
        assert torch.get_num_threads() == threads


def test_a_buffer_is_safe_if_each_threads_part_consists_of_whole_vectors():
    assert is_safe(VECTOR_BYTES // 4, 4, threads=8)
    assert not is_safe(VECTOR_BYTES // 4 + 1, 4, threads=1)
    assert is_safe(GRAIN * 2, 4, threads=2)
    assert is_safe(GRAIN * 3, 4, threads=3)
    assert not is_safe(GRAIN * 3 + 32, 4, threads=3)  # thirds of it end inside a vector
    assert is_safe(GRAIN * 3 + 32, 4, threads=1)


def test_eight_rows_are_narrow_unless_their_width_is_a_multiple_of_eight():
    assert [width for width in range(1, 33) if not is_narrow(width)] == [8, 16, 24, 32]


def test_an_in_place_function_on_a_buffer_with_a_tail_is_an_error():
    with pytest.raises(AssertionError, match="leaves a tail"):
        elementwise_(torch.Tensor.exp2_, torch.zeros(4, 3))


@pytest.mark.parametrize("width", [1, 3, 6])
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus", "pow"])
def test_narrow_rows_have_the_same_bits_among_any_number_of_rows(width, name):
    """Model code applies functions to such rows outside any module: shared experts' gates and routers' logits."""
    x = numbers(64 * width, torch.float32).view(64, width)
    truth = FUNCTIONS[name](narrow(x))
    for count in (8, 16, 24, 40):
        for start in (0, 8, 13):
            assert torch.equal(FUNCTIONS[name](narrow(x[start : start + count])), truth[start : start + count])


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("power", [lambda x: x**1.5, lambda x: 2**x], ids=["x ** 1.5", "2 ** x"])
def test_power_operators_on_narrow_rows_have_the_same_bits_too(width, power):
    x = numbers(64 * width, torch.float32).view(64, width).abs()
    truth = power(narrow(x))
    for count in (8, 16, 24, 40):
        assert torch.equal(power(narrow(x[:count])), truth[:count])


def test_functions_of_narrow_rows_take_other_tensors_and_write_in_place():
    x = torch.rand(8, 3)
    assert torch.equal(torch.pow(narrow(x), torch.full((3,), 2.0)), x.pow(torch.full((3,), 2.0)))
    assert torch.equal(torch.sigmoid(input=narrow(x)), torch.sigmoid(x))
    rows = narrow(x.clone())
    made = F.silu(rows, inplace=True)
    assert torch.equal(rows, made) and not torch.equal(rows, x)


def test_results_of_narrow_rows_are_narrow_rows_unless_they_are_wide():
    x = narrow(torch.randn(8, 6))
    assert type(x) is NarrowRows
    assert type(x.float() + 1) is NarrowRows
    values, indices = torch.topk(x, 2, dim=-1)
    assert type(values) is NarrowRows and type(indices) is torch.Tensor
    assert type(x[:, :1] * torch.randn(8, 64)) is torch.Tensor
    assert type(narrow(torch.randn(8, 64))) is torch.Tensor
