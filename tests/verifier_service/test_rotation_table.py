"""Cosines and sines that are computed once for each position."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from tree_kernels.decoder_layer import why_not_compiled

from verifier_service.models.direct import BLOCK, MOST_POSITIONS, RotationTable

pytestmark = pytest.mark.skipif(bool(why_not_compiled()), reason=why_not_compiled())

ROWS = torch.zeros(1, 1, 64, dtype=torch.bfloat16)


def rotary(positions=4096, **rope):
    given = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=positions, rope_parameters=given)
    )


def test_rows_are_those_of_the_module_at_any_positions():
    rotate = rotary()
    table = RotationTable(rotate, ROWS, 4096)
    assert table.fits and table.most == 4096
    for its in ([0], [5, 4, 3], [63, 64, 65], [1000, 7, 4095], list(range(500, 520))):
        found = table.at(torch.tensor(its), max(its))
        cos, sin = rotate(ROWS, torch.tensor([its]))
        assert torch.equal(found.cos, cos[0]) and torch.equal(found.sin, sin[0])


def test_the_digest_tells_the_last_bit_of_each_frequency():
    """torch's powers may have another last bit with AVX2 than with AVX-512, as for heads of 48 numbers."""
    rotate = rotary()
    found = {RotationTable(rotate, ROWS, 4096).digest}
    for frequency in rotate.inv_freq:
        before = frequency.clone()
        frequency.copy_(torch.nextafter(before, torch.tensor(2.0)))
        found.add(RotationTable(rotate, ROWS, 4096).digest)
        frequency.copy_(before)
    assert len(found) == 1 + len(rotate.inv_freq)
    assert RotationTable(rotate, ROWS, 4096).digest in found


def test_a_table_has_a_bound_and_none_is_made_for_a_model_of_few_positions():
    assert RotationTable(rotary(1 << 20), ROWS, 1 << 20).most == MOST_POSITIONS
    assert not RotationTable(rotary(BLOCK), ROWS, BLOCK).fits


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "long_factor": [2.0] * 8,
            "short_factor": [1.0] * 8,
            "original_max_position_embeddings": 1024,
            "factor": 4.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_rotary_embedding_that_depends_on_the_furthest_position_has_no_table(rope):
    limit = 1024 if rope["rope_type"] == "dynamic" else 4096
    assert not RotationTable(rotary(limit, **rope), ROWS, 4096).fits
