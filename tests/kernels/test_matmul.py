"""Products with packed weights: their values, and that a row's bits depend on nothing but the row and the weight."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
import torch
from tree_kernels.matmul import PackedWeight, why_not_packed
from tree_kernels.matmul.cpu import Helpers, dots_pay
from tree_kernels.matmul.packing import CHUNK, LINE, in_large_pages, pack
from tree_kernels.matmul.reference import product, product_in_groups
from tree_kernels.matmul.shapes import MATRIX_INPUTS, Precision
from tree_kernels.processor import has_dots, has_matrix_tiles

pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((1, 1), (3, 31), (64, 33), (257, 16), (1100, 100))
"""Inputs and outputs: below, at and above a panel and a part, odd and even."""
GROUPED = ((32, 1), (64, 33), (1120, 100))
"""Inputs and outputs of weights that matrix tiles multiply: below, at and above a panel and a part."""
MANY = 130
"""Rows of several chunks."""


def made(inputs, outputs, dtype, rows=MANY, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return torch.randn(rows, inputs, generator=generator).to(dtype), weight, torch.randn(outputs, generator=generator)


@pytest.fixture
def vectors(monkeypatch):
    """Lets a processor with matrix tiles compute as one without."""
    monkeypatch.setattr("tree_kernels.matmul.cpu.has_matrix_tiles", lambda: False)


needs_matrix_tiles = pytest.mark.skipif(not has_matrix_tiles(), reason="this processor has no matrix tiles")


@pytest.mark.parametrize("allowed", [True, False])
def test_matrix_tiles_are_used_only_where_the_system_lets_the_process(allowed, monkeypatch):
    """A container may deny them on a processor that has them."""
    monkeypatch.setattr("tree_kernels.processor.writes_matrix_tiles", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: allowed)
    assert has_matrix_tiles.__wrapped__() is allowed


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_every_result_is_the_rounded_sum_in_the_order_of_the_inputs(inputs, outputs, dtype, biased):
    rows, weight, bias = made(inputs, outputs, dtype, rows=9)
    bias = bias.to(dtype) if biased else None
    got = PackedWeight(weight, bias)(rows)
    assert torch.equal(got, product(rows, weight, bias))


@needs_matrix_tiles
@pytest.mark.parametrize(("inputs", "outputs"), GROUPED)
@pytest.mark.parametrize("biased", [False, True])
def test_a_result_by_matrix_tiles_is_the_rounded_sum_in_the_order_of_groups(inputs, outputs, biased):
    rows, weight, bias = made(inputs, outputs, torch.bfloat16, rows=40)
    bias = bias.bfloat16() if biased else None
    form = PackedWeight(weight, bias)
    assert torch.equal(form(rows), product_in_groups(rows, weight, bias))
    wide = PackedWeight(weight, dtype=torch.float32)(rows)
    assert torch.equal(wide.bfloat16(), product_in_groups(rows, weight)) and wide.dtype == torch.float32
    assert not torch.equal(wide, product(rows.float(), weight)) or inputs == MATRIX_INPUTS


def test_the_order_of_groups_is_that_of_the_inputs_where_they_are_two():
    rows, weight, _ = made(2, 5, torch.bfloat16, rows=3)
    assert torch.equal(product_in_groups(rows, weight), product(rows, weight))


@needs_matrix_tiles
@pytest.mark.parametrize(("inputs", "outputs"), GROUPED)
@pytest.mark.parametrize("threads", [1, 3])
def test_matrix_tiles_give_a_row_the_same_bits_among_any_number_of_rows_and_threads(
    inputs, outputs, threads, monkeypatch
):
    monkeypatch.setattr("tree_kernels.matmul.cpu.THREADED", 0)
    rows, weight, bias = made(inputs, outputs, torch.bfloat16)
    alone = PackedWeight(weight, bias.bfloat16())
    truth = torch.cat([alone(row[None]) for row in rows])
    form = PackedWeight(weight, bias.bfloat16(), threads)
    for count in (*range(2, 36), 48, 49, 64, 65, MANY):
        order = torch.randperm(MANY, generator=torch.Generator().manual_seed(count))[:count]
        assert torch.equal(form(rows[order]), truth[order]), count


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(inputs, outputs, dtype, threads, monkeypatch):
    monkeypatch.setattr("tree_kernels.matmul.cpu.THREADED", 0)
    rows, weight, bias = made(inputs, outputs, dtype)
    alone = PackedWeight(weight, bias.to(dtype))
    truth = torch.cat([alone(row[None]) for row in rows])
    form = PackedWeight(weight, bias.to(dtype), threads)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 31, 48, 49, 64, MANY):
        order = torch.randperm(MANY, generator=torch.Generator().manual_seed(count))[:count]
        assert torch.equal(form(rows[order]), truth[order]), count


def test_products_of_several_callers_at_once_are_those_of_each_alone(monkeypatch):
    monkeypatch.setattr("tree_kernels.matmul.cpu.THREADED", 0)
    rows, weight, _ = made(512, 300, torch.bfloat16, rows=7)
    form = PackedWeight(weight, threads=2)
    truth = form(rows)
    found = []

    def call():
        found.extend(torch.equal(form(rows), truth) for _ in range(200))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 600


def test_where_no_thread_can_start_the_callers_own_computes_everything(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("tree_kernels.matmul.cpu.THREADED", 0)
    monkeypatch.setattr("tree_kernels.matmul.cpu._helpers", Helpers())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    rows, weight, _ = made(512, 300, torch.bfloat16, rows=7)
    form = PackedWeight(weight, threads=3)
    assert torch.equal(form(rows), PackedWeight(weight)(rows))
    assert torch.equal(form(rows), PackedWeight(weight)(rows))


def test_inputs_of_any_shape_and_strides_and_no_rows_at_all():
    rows, weight, _ = made(40, 24, torch.float32, rows=12)
    form = PackedWeight(weight)
    truth = form(rows)
    assert torch.equal(form(rows.view(3, 4, 40)), truth.view(3, 4, 24))
    assert torch.equal(form(rows.t().contiguous().t()), truth)
    assert torch.equal(form(rows[0]), truth[0])
    assert form(rows[:0]).shape == (0, 24)
    assert torch.equal(PackedWeight(weight.t().contiguous().t())(rows), truth)


def test_a_narrow_weights_float32_product_is_that_of_the_widened_weight():
    rows, weight, bias = made(300, 70, torch.bfloat16, rows=5)
    wide = PackedWeight(weight, bias, dtype=torch.float32)(rows.float())
    assert wide.dtype == torch.float32
    assert torch.equal(wide, PackedWeight(weight.float(), bias)(rows.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_that_are_not_finite_stay_so(dtype):
    weight = torch.ones(4, 2, dtype=dtype)
    rows = torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0], [float("inf"), float("-inf")]], dtype=dtype)
    got = PackedWeight(weight)(rows)
    assert got[0].isinf().all() and got[1].isnan().all() and got[2].isnan().all()
    large = torch.full((1, 2), torch.finfo(dtype).max, dtype=dtype)
    assert PackedWeight(weight)(large).isinf().all()


def test_results_are_rounded_to_the_nearest_even_bfloat16():
    values = torch.arange(1 << 12, dtype=torch.int32) * 524309 % (1 << 31)
    numbers = values.view(torch.float32)
    numbers = numbers[numbers.isfinite() & ((numbers == 0) | (numbers.abs() >= torch.finfo(torch.float32).tiny))]
    got = PackedWeight(torch.ones(1, 1, dtype=torch.bfloat16), dtype=torch.bfloat16)
    wide = PackedWeight(torch.ones(1, 1), dtype=torch.bfloat16)(numbers[:, None])
    assert got.outputs == 1
    assert torch.equal(wide[:, 0], numbers.bfloat16())


def test_a_panel_holds_its_outputs_side_by_side():
    weight = torch.arange(6.0).view(3, 2)
    assert pack(weight, 4).tolist() == [[[0.0, 2.0, 4.0, 0.0], [1.0, 3.0, 5.0, 0.0]]]
    assert pack(weight.bfloat16(), 4).tolist() == [[[1.0, 0.0, 3.0, 2.0], [5.0, 4.0, 0.0, 0.0]]]
    assert pack(weight.view(2, 3).bfloat16(), 2).tolist() == [[[1.0, 0.0], [4.0, 3.0], [2.0, 5.0]]]


@pytest.mark.parametrize("matrix", [False, pytest.param(True, marks=needs_matrix_tiles)])
def test_numbers_that_are_not_normal_count_as_zero(matrix, monkeypatch):
    """A processor's dot products of bfloat16 do the same, so that they and other processors have the same bits."""
    monkeypatch.setattr("tree_kernels.matmul.cpu.has_matrix_tiles", lambda: matrix)
    rows, weight, _ = made(64, 33, torch.bfloat16, rows=9)
    expected = product_in_groups if matrix else product
    small = torch.ldexp(rows.float(), 3 * torch.arange(9)[:, None] - 140).bfloat16()
    for its in (weight, torch.ldexp(weight.float(), torch.tensor(-2)).bfloat16()):
        got = PackedWeight(its, dtype=torch.float32)(small)
        assert torch.equal(got, expected(small.float(), its))
        assert bool(((got == 0) | (got.abs() >= torch.finfo(torch.float32).tiny)).all())


needs_dots = pytest.mark.skipif(not has_dots(), reason="this processor has no dot products of bfloat16")


@needs_dots
@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 31), (64, 33), (258, 16), (1102, 100)])
@pytest.mark.parametrize("threads", [1, 3])
def test_dot_products_of_pairs_have_the_bits_of_multiply_adds_for_any_rows(inputs, outputs, threads, monkeypatch):
    monkeypatch.setattr("tree_kernels.matmul.cpu.THREADED", 0)
    rows, weight, bias = made(inputs, outputs, torch.bfloat16)
    rows[::3] = torch.ldexp(rows[::3].float(), torch.arange(len(rows[::3]))[:, None] % 25 - 135).bfloat16()
    form = PackedWeight(weight, bias.bfloat16(), threads, torch.float32)
    truth = form.product(rows, Precision.F32)
    for count in (1, 2, 3, 4, 5, 6, 7, 13, 48, 49, MANY):
        assert torch.equal(form.product(rows[-count:], Precision.PAIRS), truth[-count:]), count


@needs_dots
@pytest.mark.parametrize("spoilt", ["bits", "time"])
def test_dot_products_of_other_bits_or_of_no_use_are_not_used(spoilt, monkeypatch):
    calls = iter(range(1000))
    product_of = PackedWeight.product

    def changed(self, x, kind):
        made_now = product_of(self, x, kind)
        return made_now + 1.0 if spoilt == "bits" and kind == Precision.PAIRS else made_now

    monkeypatch.setattr(PackedWeight, "product", changed)
    monkeypatch.setattr("tree_kernels.matmul.cpu.time.perf_counter", lambda: float(next(calls)))
    assert not dots_pay.__wrapped__()


def test_dot_products_are_not_used_for_rows_that_are_not_bfloat16_or_odd_numbers_of_inputs(monkeypatch):
    monkeypatch.setattr("tree_kernels.matmul.cpu.dots_pay", lambda: True)
    for inputs, dtype in ((63, torch.bfloat16), (64, torch.float16), (64, torch.float32)):
        rows, weight, _ = made(inputs, 40, dtype, rows=3)
        assert PackedWeight(weight).x_kind(1) == Precision.F32
    rows, weight, _ = made(64, 40, torch.bfloat16, rows=3)
    exact = torch.randn(3, 64)
    assert torch.equal(PackedWeight(weight, dtype=torch.float32)(exact), product(exact, weight))


@pytest.mark.parametrize(("given", "reason"), [((3, 5), "inputs"), ((3, 0), "inputs")])
def test_rows_of_another_width_are_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        PackedWeight(torch.randn(2, 4))(torch.randn(given))


def test_small_weights_of_one_dtype_share_chunks_and_the_last_of_them_frees_its_chunk():
    """numpy's arrays are traced by tracemalloc."""
    each = CHUNK // 16 - LINE
    tracemalloc.start()
    try:
        weights = {
            dtype: [in_large_pages((each // 2,), dtype) for _ in range(40)] for dtype in (torch.bfloat16, torch.float16)
        }
        made = [weight for its in weights.values() for weight in its]
        for number, weight in enumerate(made):
            assert weight.data_ptr() % LINE == 0
            weight.fill_(number)
        assert all(bool((weight == number).all()) for number, weight in enumerate(made))
        assert tracemalloc.get_traced_memory()[0] < 7 * CHUNK  # 3 of each dtype: 40 weights are 2.5
        del weights[torch.float16], made, weight
        assert tracemalloc.get_traced_memory()[0] < 5 * CHUNK  # the last one of float16 is open
        alive = weights.pop(torch.bfloat16)[20]
        assert tracemalloc.get_traced_memory()[0] < 4 * CHUNK and not bool((alive != 20).any())
    finally:
        tracemalloc.stop()
