"""Linear layers whose rows do not depend on other rows: the choice of a form, and detection of a bad one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tree_kernels.matmul import packing, why_not_packed
from tree_kernels.processor import has_matrix_tiles
from tree_layers.linear import (
    ALONE,
    MOST_CHECKED,
    RowForms,
    _checked_outputs,
    _choices,
    _first_independent,
    _pieces,
    kept_dtype,
    packed_product,
    rows_are_independent,
    why_not_compiled,
)
from tree_layers.row_weights import make_rows_independent
from tree_layers.rows_report import OWN

from tests.support.exactness import STRICT

BUCKETS = (8, 16, 24, 32, 48, 64)


def give_forms(model, threads=1, buckets=BUCKETS):
    forms = RowForms(buckets, threads)
    make_rows_independent(model, forms)
    return forms.report()


@pytest.fixture
def library_only(monkeypatch):
    """As on a machine where kernels cannot be compiled."""
    monkeypatch.setattr("tree_layers.linear.why_not_packed", lambda: "switched off by a test")


def form_or_skip(report):
    """Skip where the library's float32 products have no form, as on some Intel processors without MKL's STRICT; a
    report that says so makes an engine announce `margin`."""
    if not report.independent and not STRICT:
        pytest.skip(f"NOT RUN: without STRICT, MKL has no row-independent form of {', '.join(report.failed)}")
    assert report.independent


class Threads(TorchDispatchMode):
    """Records the number of threads of each product."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in function.__name__ or "linear" in function.__name__:
            self.seen.append(torch.get_num_threads())
        return function(*args, **(kwargs or {}))


def split_by_rows(weight, bias):
    """A form that splits its inner dimension into more parts for fewer rows, as libraries do."""

    def run(x):
        parts = 1 + 64 // x.shape[-2]
        slices = zip(x.tensor_split(parts, -1), weight.tensor_split(parts, -1), strict=True)
        return sum(F.linear(each, part).float() for each, part in slices).to(x.dtype)

    return run


@pytest.fixture(params=["our kernels", "the library"])
def products(request):
    """Whose products are used."""
    if request.param == "the library":
        request.getfixturevalue("library_only")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [48, 320, 896, 1000, 1152, 2048])
def test_every_layer_gets_a_form_with_independent_rows(inputs, dtype, products):
    torch.manual_seed(inputs)
    layer = nn.Linear(inputs, 72, dtype=dtype)
    model = nn.Sequential(layer)
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    with torch.inference_mode():
        report = give_forms(model)
        form_or_skip(report)
        x = torch.randn(64, inputs).to(dtype)
        truth = model(x[None])[0]
        for count in BUCKETS:
            assert torch.equal(model(x[None, -count:])[0], truth[-count:])
        exact = F.linear(x.double(), weight, bias)
        assert (truth.double() - exact).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [8, 32, 37, 80])
def test_every_form_computes_the_product(rows, dtype, bias):
    torch.manual_seed(0)
    layer = nn.Linear(200, 40, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(2, rows, 200).to(dtype)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    for choice in _choices(layer.weight):
        got = choice.make(layer.weight, layer.bias)(x)
        assert got.dtype == dtype, choice.name
        error = (got.double() - exact).abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 3e-2), choice.name


def test_a_form_that_splits_by_the_number_of_rows_is_detected(monkeypatch, library_only):
    """On ordinary numbers a check may miss it, since few results change; on sums that cancel it is always detected."""
    for name in ("_plain", "packed_product"):
        monkeypatch.setattr(f"tree_layers.linear.{name}", split_by_rows)
    for name in ("_in_tiles", "_in_full_tiles"):
        monkeypatch.setattr(f"tree_layers.linear.{name}", lambda form: form)
    layer = nn.Linear(640, 40, bias=False, dtype=torch.bfloat16)
    assert _first_independent(layer.weight, None, BUCKETS) is None
    with torch.inference_mode():
        report = give_forms(nn.Sequential(layer))
    assert not report.independent
    assert "640 x 40" in str(report)


@pytest.fixture
def packs_float32(monkeypatch, library_only):
    """Packs float32 layers, so that packing is tested also on processors where oneDNN cannot pack bfloat16."""
    monkeypatch.setattr("tree_layers.linear.PACKED_LAYERS", (torch.float32,))


def test_a_packed_weight_replaces_the_layers_weight_but_not_an_embeddings(packs_float32):
    torch.manual_seed(0)
    layer, embedding = nn.Linear(64, 48), nn.Embedding(48, 64)
    embedding.weight = layer.weight
    x = torch.randn(8, 64)
    expected = packed_product(layer.weight, layer.bias)(x)
    report = give_forms(nn.Sequential(layer))
    assert report.forms == {"packed": 1}
    assert torch.equal(layer(x), expected)
    assert layer.weight.is_meta
    assert not embedding.weight.is_meta


def test_a_layer_that_is_never_called_keeps_its_weight(packs_float32):
    """longcat_flash's router multiplies by its layer's weight and does not call the layer."""
    router = nn.Linear(64, 48)
    weight, x = router.weight.detach().clone(), torch.randn(8, 64)
    give_forms(nn.Sequential(router))
    assert torch.equal(F.linear(x, router.weight), F.linear(x, weight))


def test_layers_that_share_a_weight_share_its_packed_form(packs_float32):
    """As in zamba2's attention layers."""
    torch.manual_seed(0)
    first, second = nn.Linear(64, 48, bias=False), nn.Linear(64, 48, bias=False)
    second.weight = first.weight
    x = torch.randn(8, 64)
    report = give_forms(nn.Sequential(first, second))
    assert report.forms == {"packed": 1}
    assert torch.equal(first(x), second(x))
    assert first.weight is second.weight and first.weight.is_meta


def test_large_layers_run_in_all_threads_and_small_ones_in_one(library_only):
    seen = []
    large, small = nn.Linear(1024, ALONE // 1024), nn.Linear(8, 8)
    give_forms(nn.Sequential(large, small), threads=3)
    before = torch.get_num_threads()
    with Threads(seen):
        large(torch.randn(8, 1024))
        small(torch.randn(8, 8))
    assert seen == [3, 1]
    assert torch.get_num_threads() == before


def test_a_form_that_depends_on_a_rows_place_is_detected():
    def placed(x):
        return x * torch.arange(x.shape[-2])[:, None]

    assert not rows_are_independent(placed, torch.randn(64, 16), BUCKETS)
    assert rows_are_independent(lambda x: 2 * x, torch.randn(64, 16), BUCKETS)


def test_a_layer_with_its_own_forward_is_not_changed():
    layer = nn.Linear(640, 8, dtype=torch.bfloat16)
    layer.forward = lambda x: x
    give_forms(nn.Sequential(layer))
    assert layer(1) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_any_number_of_rows_has_the_bits_of_a_step(dtype, bias):
    """Libraries use another product for one to three float32 rows than for more. Experts get so few rows."""
    torch.manual_seed(0)
    layer = nn.Linear(48, 40, bias=bias, dtype=dtype)
    with torch.inference_mode():
        give_forms(layer)
        x = torch.randn(200, 48).to(dtype)
        truth = torch.cat([layer(each) for each in x.split(64)])
        for count in (0, 1, 2, 3, 5, 9, 47, 63, 65, 100, 199):
            assert torch.equal(layer(x[:count]), truth[:count]), count
            assert torch.equal(layer(x[None, :count])[0], truth[:count]), count
        assert torch.equal(layer(x[0]), truth[0])
        assert torch.equal(layer(x.view(20, 10, 48)).view(200, 40), truth)


def test_rows_are_split_into_buckets_with_less_padding_than_the_smallest_bucket():
    for rows in range(1, 400):
        pieces = list(_pieces(rows, BUCKETS))
        assert [start for start, *_ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])]
        assert pieces[-1][1] == rows
        assert all(bucket in BUCKETS and stop - start <= bucket for start, stop, bucket in pieces)
        assert sum(bucket for *_, bucket in pieces) - rows < 8


class Routed(nn.Module):
    """Weights outside linear layers, multiplied in each way that transformers uses."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 48).to(dtype))
        self.experts = nn.Parameter(torch.randn(3, 48, 24).to(dtype))
        self.scale = nn.Parameter(torch.randn(48).to(dtype))

    def forward(self, x):
        x = x * self.scale
        routed = F.linear(x.float(), self.weight.float())
        each = [x @ self.experts[expert] for expert in range(3)]
        together = torch.bmm(x.expand(3, *x.shape), self.experts)
        gate = torch.nn.functional.linear(x, self.experts[1].T.chunk(3, 0)[0])
        return torch.cat([routed.to(x.dtype), *each, *together.unbind(0), gate], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_outside_linear_layers_have_forms_too(dtype):
    if dtype == torch.float32 and not STRICT:
        pytest.skip(
            "NOT RUN: without STRICT, a form of MKL's that passes the check may have other bits in other products"
        )
    torch.manual_seed(0)
    module = Routed(dtype)
    x = torch.randn(64, 48).to(dtype)
    with torch.inference_mode():
        expected = module(x)
        report = give_forms(module)
        truth = module(x)
        assert report.independent
        assert type(truth) is torch.Tensor
        assert (truth.double() - expected.double()).abs().max() < (1e-5 if dtype == torch.float32 else 0.3)
        for count in (1, 2, 3, 5, 9, 40):
            assert torch.equal(module(x[:count]), truth[:count]), count


def test_a_failed_weight_outside_linear_layers_is_named_by_its_shape(monkeypatch):
    for name in ("_plain", "packed_product"):
        monkeypatch.setattr(f"tree_layers.linear.{name}", split_by_rows)
    for name in ("_in_tiles", "_in_full_tiles"):
        monkeypatch.setattr(f"tree_layers.linear.{name}", lambda form: form)
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(40, 640).bfloat16())
    forms = RowForms(BUCKETS)
    make_rows_independent(module, forms)
    F.linear(torch.randn(8, 640).bfloat16(), module.weight)
    assert forms.report().failed == ("640 x 40 torch.bfloat16",)


@pytest.mark.parametrize("may_pack", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_are_padded_to_the_smallest_unit_that_passes_the_check(dtype, may_pack):
    torch.manual_seed(0)
    weight = torch.randn(72, 1000).to(dtype)
    forms = RowForms(BUCKETS)
    unit = forms.unit(weight, may_pack=may_pack)
    assert unit in (1, 4, 8)
    form, padded = forms.of(weight, may_pack=may_pack, unit=unit), forms.of(weight, may_pack=may_pack)
    form_or_skip(forms.report())
    x = torch.randn(64, 1000).to(dtype)
    for count in range(unit, 65, unit):
        assert torch.equal(form(x[:count]), padded(x)[:count]), count


@pytest.mark.skipif(not STRICT, reason="without STRICT, MKL's plain product may have no form to begin with")
def test_a_unit_whose_multiples_have_other_bits_is_rejected(monkeypatch):
    """With three rows or fewer the bits differ, so the unit is at least four."""

    def few_otherwise(weight, bias):
        return lambda x: F.linear(x, weight, bias) * (1 if x.shape[-2] > 3 else 1 + 2**-20)

    monkeypatch.setattr("tree_layers.linear._plain", few_otherwise)
    assert RowForms(BUCKETS).unit(torch.randn(24, 320)) in (4, 8)


def test_an_accelerators_products_are_checked_with_all_outputs_of_a_weight():
    """Its libraries choose by all sizes; a CPU's check of a large head would take minutes."""
    head = (128256, 4096)
    assert _checked_outputs(torch.empty(head, device="meta")) == head[0]
    assert _checked_outputs(torch.empty(1).expand(head)) == MOST_CHECKED // head[1] < head[0]


needs_kernels = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layers_use_our_products_in_every_dtype_and_free_their_weights(dtype):
    layer, x = nn.Linear(64, 48, dtype=dtype), torch.randn(5, 64).to(dtype)
    expected = F.linear(x.float(), layer.weight.float(), layer.bias.float())
    report = give_forms(nn.Sequential(layer))
    assert report.own and list(report.forms.values()) == [1]
    assert torch.allclose(layer(x).float(), expected, rtol=0.02, atol=0.02)
    assert layer.weight.is_meta


@needs_kernels
@pytest.mark.parametrize("matrix", [False, True])
def test_a_form_is_named_after_the_order_of_its_sums(matrix, monkeypatch):
    """A target's fingerprint has the names of its forms: replicas that round differently do not share texts."""
    monkeypatch.setattr("tree_kernels.matmul.cpu.has_matrix_tiles", lambda: matrix and has_matrix_tiles())
    name = "compiled, in matrix tiles" if matrix and has_matrix_tiles() else "compiled"
    for inputs, dtype, expected in ((64, torch.bfloat16, name), (48, torch.bfloat16, OWN), (64, torch.float32, OWN)):
        report = give_forms(nn.Sequential(nn.Linear(inputs, 48, dtype=dtype)))
        assert report.own and report.forms == {expected: 1}


def test_the_reason_is_named_where_products_are_not_ours(library_only):
    assert why_not_compiled(torch.zeros(2, 2)) == "switched off by a test"
    assert "float64" in why_not_compiled(torch.zeros(2, 2, dtype=torch.float64))
    assert "CPU" in why_not_compiled(torch.zeros(2, 2, device="meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float32_sums_of_a_narrow_weight_are_those_of_the_widened_one_for_any_rows(dtype, products, monkeypatch):
    """A head's weights stay in the checkpoint's dtype where products are ours; its logits have the same bits, but by
    matrix tiles, which take no float32."""
    monkeypatch.setattr("tree_kernels.matmul.cpu.has_matrix_tiles", lambda: False)
    torch.manual_seed(0)
    weight, bias, x = torch.randn(72, 320).to(dtype), torch.randn(72).to(dtype), torch.randn(40, 320).to(dtype)
    forms, wide = RowForms(BUCKETS), RowForms(BUCKETS)
    with torch.inference_mode():
        form = forms.in_float32(weight, bias)
        form_or_skip(forms.report())
        truth = form(x)
        assert truth.dtype == torch.float32
        assert torch.equal(truth, wide.of(weight.float(), bias.float(), may_pack=True)(x.float()))
        for rows in (1, 2, 7, 16, 33):
            assert torch.equal(form(x[-rows:]), truth[-rows:])
    assert forms.report().forms == wide.report().forms


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_our_products_with_float32_sums_keep_the_weight_in_its_dtype(dtype, monkeypatch):
    weight = torch.randn(72, 64).to(dtype)
    kept = []
    pack = packing.pack
    monkeypatch.setattr(
        "tree_kernels.matmul.cpu.pack", lambda given, panel: kept.append(pack(given, panel)) or kept[-1]
    )
    RowForms(BUCKETS).in_float32(weight)
    assert {each.dtype for each in kept} == {dtype} == {kept_dtype(weight)}
