"""Targets whose weights stay quantised have the bits of those whose weights are unpacked."""

from __future__ import annotations

import asyncio
from itertools import cycle

import pytest
import torch
from transformers import AutoModelForCausalLM
from tree_kernels.matmul import PackedWeight, why_not_packed
from tree_kernels.matmul.quantised import FewRowsWeight, QuantisedWeight
from tree_kernels.matmul.quantised_shapes import QuantisedForm
from tree_layers import quantised_packing
from tree_layers.gguf_blocks import READ, QuantisedTensors
from tree_layers.gguf_weights import gguf_settings
from tree_layers.quantised_packing import ROWS, QuantisedPacking, may_gain, rows_that_gain

from cluster.config import TargetConfig, demo_config
from cluster.gguf_files import folder_of
from cluster.measure import gguf_file
from cluster.precompiling import kernel_modules
from tests.support.engines import engine_of, tree_logits
from tests.support.tiny_gguf import FACTORS, random_blocks, write_llama

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())

TOKENS = [5, 6, 7]
WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Of models whose weights are in blocks of 256 numbers."""


def write_quantised(folder, monkeypatch, kind, only=""):
    """A folder of a tiny Llama whose matrices, those with `only` in their names, are stored in this type."""

    def add(gguf, writer, name, weight):
        numbers, matrix = weight.detach().float().numpy(), weight.dim() == 2 and only in name
        stored = gguf.GGMLQuantizationType[kind if matrix else "F32"]
        if matrix:
            numbers = random_blocks(kind, *weight.shape) if kind in FACTORS else gguf.quantize(numbers, stored)
        writer.add_tensor(name, numbers, raw_dtype=stored)

    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(gguf_file, "_add", add)
    return folder_of(write_llama(folder, monkeypatch, **(WIDE if kind in FACTORS else {})))


def library_model(folder, dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **gguf_settings(folder))


@pytest.mark.parametrize("kind", FACTORS)
def test_blocks_are_unpacked_to_the_numbers_of_the_package_gguf(kind):
    """Whose zeros may have the other sign."""
    stored = random_blocks(kind, 9, 768, seed=1)
    stored[0] = 0
    stored[1] = 255
    stored[1].reshape(-1, READ[kind].bytes)[:, [at for each in FACTORS[kind] for at in (each, each + 1)]] = 3
    blocks = READ[kind].read(stored.reshape(9, 3, -1))
    assert blocks.fits()
    truth = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]))
    assert torch.equal((blocks.unpacked() + 0.0).view(torch.int32), (truth + 0.0).view(torch.int32))


@pytest.mark.parametrize("kind", READ)
def test_every_weight_is_found_with_the_numbers_that_the_library_unpacks(kind, tmp_path, monkeypatch):
    folder = write_quantised(tmp_path, monkeypatch, kind)
    model = library_model(folder)
    tensors = QuantisedTensors(folder, model)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    assert len(matrices) > 7
    for weight in matrices:
        blocks = tensors.blocks_of(weight)
        assert blocks is not None
        assert torch.equal(blocks.unpacked().bfloat16(), weight)
    first = model.get_input_embeddings().weight[:100]
    blocks = tensors.blocks_of(first)
    assert blocks is not None and torch.equal(blocks.unpacked().bfloat16(), first)


def test_a_weight_with_other_numbers_than_its_files_is_not_found(tmp_path, monkeypatch):
    folder = write_quantised(tmp_path, monkeypatch, "Q4_1")
    model = library_model(folder)
    tensors = QuantisedTensors(folder, model)
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight[3, 5] += 1
    assert tensors.blocks_of(weight) is None
    assert tensors.blocks_of(torch.zeros(64, 64, dtype=torch.bfloat16)) is None


def settled_at(monkeypatch, most):
    """Weights stay quantised for so many rows, whatever takes less time."""
    monkeypatch.setattr(quantised_packing, "may_gain", lambda form, threads: True)
    monkeypatch.setattr(quantised_packing, "rows_that_gain", lambda seconds: seconds(3) and most)


@pytest.mark.parametrize("most", [1, 3, ROWS[-1]])
@pytest.mark.parametrize(("kind", "only"), [*((form.name, "") for form in QuantisedForm), ("Q4_1", "ffn_gate")])
def test_logits_and_fingerprint_are_those_of_the_unpacked_target(kind, only, most, tmp_path, monkeypatch):
    """Also where of two products of the same rows one has a quantised weight."""
    folder = write_quantised(tmp_path, monkeypatch, kind, only)
    settled_at(monkeypatch, 0)
    unpacked = engine_of(folder, torch.bfloat16)
    truth, fingerprint = tree_logits(unpacked), asyncio.run(unpacked.hello()).fingerprint
    assert "quantised" not in unpacked.kernels
    settled_at(monkeypatch, most)
    quantised = engine_of(folder, torch.bfloat16)
    assert f"{kind} for {'any' if most == ROWS[-1] else f'up to {most}'} rows" in quantised.kernels
    assert asyncio.run(quantised.hello()).fingerprint == fingerprint
    for found, expected in zip(tree_logits(quantised), truth, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [({1, 2}, 2), (set(), 0), (set(ROWS), ROWS[-1]), ({1, 2, 4, 6}, 6), ({1, 2, 6, 8}, 2), ({2, 3}, 3)],
)
def test_weights_are_quantised_for_as_many_rows_as_that_takes_less_time(gains, expected):
    """One loss among gains is taken for chance, two in a row are not."""
    noise = cycle([1.0, 3.0, 0.4])  # of both forms alike
    assert rows_that_gain(lambda rows: ((each := next(noise)) * (0.9 if rows in gains else 1.0), each)) == expected


def test_a_gain_by_chance_does_not_outweigh_losses_of_fewer_rows():
    ratio = {1: 0.6, 2: 0.7, 3: 0.8, 4: 0.9, 5: 1.1, 6: 0.97, 7: 1.2, 8: 1.2}
    assert rows_that_gain(lambda rows: (ratio.get(rows, 2.0), 1.0)) == 4


def test_a_form_that_is_slower_for_one_row_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(quantised_packing, "TIMED_SHAPE", (64, 64))
    for share, gains in ((1.2, False), (1.0, True)):

        def seconds(weight: PackedWeight, rows, share=share) -> float:
            return share if isinstance(weight, QuantisedWeight) else 1.0

        assert may_gain(QuantisedForm.Q4_1, 1, seconds) == gains
    folder = write_quantised(tmp_path, monkeypatch, "Q4_1")
    model = library_model(folder)
    tensors = QuantisedTensors(folder, model)
    monkeypatch.setattr(tensors, "blocks_of", lambda weight: pytest.fail("read"))
    monkeypatch.setattr(quantised_packing, "may_gain", lambda form, threads: False)
    packing = QuantisedPacking(tensors)
    assert type(packing(model.model.layers[0].mlp.up_proj.weight)) is PackedWeight
    assert str(packing) == ""


@pytest.mark.parametrize("most", [0, 2, ROWS[-1]])
def test_a_form_that_no_product_uses_is_freed(most, tmp_path, monkeypatch):
    folder = write_quantised(tmp_path, monkeypatch, "Q4_1")
    model = library_model(folder)
    settled_at(monkeypatch, most)
    packing = QuantisedPacking(QuantisedTensors(folder, model))
    weight = model.model.layers[0].mlp.up_proj.weight
    packed, plain = packing(weight), PackedWeight(weight)
    assert isinstance(packed, FewRowsWeight)
    rows = torch.randn(ROWS[-1] + 1, weight.shape[1]).bfloat16()
    packing.settle(lambda count: packed(rows[:count]))
    assert (packed._few is None) == (most == 0) and (not len(packed._panels)) == (most == ROWS[-1])
    assert str(packing) == {0: "", 2: "1 Q4_1 for up to 2 rows", ROWS[-1]: "1 Q4_1 for any rows"}[most]
    assert all(torch.equal(packed(rows[:count]), plain(rows[:count])) for count in (1, 2, 3, ROWS[-1] + 1))


def test_the_kernels_of_the_forms_in_the_file_are_compiled_ahead(tmp_path, monkeypatch):
    folder = write_quantised(tmp_path, monkeypatch, "Q4_0")
    for dtype, expected in (("bfloat16", {"tree_kernels.matmul.q4_1"}), ("float32", set())):
        target = TargetConfig(checkpoint=folder, dtype=dtype)
        modules = kernel_modules(demo_config().model_copy(update={"targets": {"tiny": target}, "drafters": {}}))
        assert {module for module in modules if ".q" in module} == expected
