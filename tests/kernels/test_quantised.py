"""Products with quantised weights have the bits of those with the unpacked ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tree_kernels.matmul import PackedWeight, why_not_packed
from tree_kernels.matmul.quantised import QuantisedBlocks, QuantisedWeight, pack_blocks
from tree_kernels.matmul.quantised_shapes import FORMS, QuantisedForm
from tree_kernels.matmul.shapes import SCRATCH

pytestmark = pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())

SIZES = ((32, 1), (64, 33), (576, 100), (3392, 65))
"""Inputs and outputs: one block and several, of less than a part and more; below, at and above panels."""
MANY = 300
"""Rows of several chunks."""


def blocks(form, inputs, outputs, seed=0):
    generator, its = torch.Generator().manual_seed(seed), FORMS[form]
    fields = torch.randint(0, 1 << its.bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    kind = torch.float32 if its.wide else torch.float16
    scales = (torch.randn(outputs, inputs // its.block, generator=generator) * 0.01).half().float()
    if its.wide:  # as many bits as they may have
        scales *= torch.randint(1, 128, scales.shape, generator=generator) / 64
    offsets = scales * -(1 + 7 * torch.rand(scales.shape, generator=generator))  # a block has both signs
    return QuantisedBlocks(form, fields, scales.to(kind), offsets.to(kind) if its.offset else None)


@pytest.mark.parametrize("form", QuantisedForm)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_bits_of_the_unpacked_weights_product_among_any_number_of_rows(
    form, inputs, outputs, threads, monkeypatch
):
    monkeypatch.setattr("tree_kernels.matmul.cpu.THREADED", 0)
    given = blocks(form, inputs, outputs)
    assert given.fits()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(MANY, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16()
    truth = PackedWeight(given.unpacked().bfloat16(), bias)(rows)
    made = QuantisedWeight(given, bias, threads)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 31, 48, 49, 130, 289, MANY):
        assert torch.equal(made(rows[:count]), truth[:count]), count


@pytest.mark.parametrize("form", QuantisedForm)
def test_sums_in_float32_are_those_of_the_unpacked_weight(form):
    """Also where rows are of float32, which no dot product takes."""
    given = blocks(form, 256, 70)
    made, truth = (
        QuantisedWeight(given, dtype=torch.float32),
        PackedWeight(given.unpacked().bfloat16(), None, 1, torch.float32),
    )
    for count in range(1, 10):
        rows = torch.randn(count, 256, generator=torch.Generator().manual_seed(count))
        for given_rows in (rows, rows.bfloat16()):
            assert torch.equal(made(given_rows), truth(given_rows)), count


@pytest.mark.parametrize("form", QuantisedForm)
def test_every_weight_is_the_unpacked_one_rounded_to_bfloat16_ties_to_even(form):
    """One row with a single 1 for each input. Scales that are powers of two make many ties."""
    given = blocks(form, 64, 300)
    given.scales.copy_(2.0 ** torch.randint(-8, 0, given.scales.shape, generator=torch.Generator().manual_seed(2)))
    if given.offsets is not None:
        given.offsets.copy_((given.offsets * 2**12).round() / 2**12)
    assert given.fits()
    truth = given.unpacked()
    lower = truth.view(torch.int32) & 0xFFFF
    assert not FORMS[form].offset or (lower == 0x8000).any()
    made = QuantisedWeight(given, dtype=torch.float32)(torch.eye(64))
    assert torch.equal(made.t(), truth.bfloat16().float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", QuantisedForm)
def test_scales_that_are_not_finite_do_not_fit(form, bad):
    given = blocks(form, 64, 3)
    given.scales[1, 1] = bad
    assert not given.fits()


def test_scales_of_so_many_bits_that_a_product_is_rounded_before_its_offset_is_added_do_not_fit():
    given = blocks(QuantisedForm.Q4_K, 64, 3)
    given.scales[1, 1] = 1 + 2**-23
    assert not given.fits()


def test_offsets_that_make_sums_inexact_do_not_fit():
    """The offset's last bit is 2^-24, and 2^12 scales are 2^5 and more: their sum has more than 24 bits."""
    given = blocks(QuantisedForm.Q4_1, 64, 3)
    given.scales[1, 1], given.offsets[1, 1] = 0.0078125 + 2**-17, 2**-24
    assert not given.fits()


def test_a_block_holds_its_outputs_factors_and_then_the_words_of_their_fields():
    fields = torch.arange(64, dtype=torch.uint8).view(2, 32) % 16
    scales, offsets = torch.tensor([[1.0], [2.0]]).half(), torch.tensor([[3.0], [4.0]]).half()
    given = QuantisedBlocks(QuantisedForm.Q4_1, fields, scales, offsets)
    made = pack_blocks(given, 4, pairs=False)
    assert made.shape == (1, 1, 80)
    assert made[0, 0, :16].view(torch.float16).tolist() == [1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0]
    words = made[0, 0, 16:].view(torch.int32).view(4, 4)
    assert words[0].tolist() == [0x76543210, 0x76543210, 0, 0]
    assert [word & 0xFFFFFFFF for word in words[1].tolist()] == [0xFEDCBA98, 0xFEDCBA98, 0, 0]


def test_words_for_pairs_hold_every_second_input_the_odd_ones_first():
    fields = torch.arange(32, dtype=torch.uint8).expand(16, 32) % 16
    scales = torch.arange(16.0).half()[:, None]
    made = pack_blocks(QuantisedBlocks(QuantisedForm.Q4_1, fields, scales, scales), 16, pairs=True)
    assert made.shape == (1, 1, 320)
    factors = made[0, 0, :32].view(torch.float16).tolist()
    assert factors == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    words = made[0, 0, 64:].view(torch.int32).view(2, 16, 2)
    assert {word & 0xFFFFFFFF for word in words[..., 0].flatten().tolist()} == {0xFDB97531}
    assert {word & 0xFFFFFFFF for word in words[..., 1].flatten().tolist()} == {0xECA86420}


DENIED = """
import torch

torch.cpu._init_amx = lambda: False  # what a container's system may answer
from tree_kernels.matmul import PackedWeight
from tree_kernels.matmul.quantised import QuantisedWeight
from tree_kernels.matmul.shapes import SCRATCH
from tests.kernels.test_quantised import QuantisedForm, blocks

given = blocks(QuantisedForm({form}), 3392, 130)
rows = torch.randn(300, 3392, generator=torch.Generator().manual_seed(1)).bfloat16()
truth, found = PackedWeight(given.unpacked().bfloat16()), QuantisedWeight(given, None, 3)
assert torch.equal(found(rows), truth(rows))
print(SCRATCH)
"""


@pytest.mark.parametrize("form", QuantisedForm)
def test_kernels_compiled_for_matrix_tiles_serve_a_process_to_which_the_system_denies_them(form):
    """They are kept by the processor alone, and the size of a thread's scratch memory is in them."""
    script = DENIED.format(form=int(form))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(run.stdout) == SCRATCH
