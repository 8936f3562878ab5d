"""A drafter in float16: its logits are near those of transformers, and a saved state is restored bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter_service.models import load_model
from drafter_service.plan import EMPTY_TEXT, Chains
from tests.support.tiny_drafters import VOCABULARY, WITH_HYBRID, make_drafter


@pytest.mark.parametrize("family", WITH_HYBRID)
@torch.inference_mode()
def test_logits_in_float16_are_near_transformers_and_a_saved_state_is_restored_bit_for_bit(tmp_path, family):
    library = make_drafter(tmp_path, family)
    model, _ = load_model(tmp_path, torch.float16, torch.device("cpu"))
    text = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(2)).tolist()

    def chained(memory, start, stop, source, target):
        lengths, starts, sources, targets = np.array([[stop - start], [start], [source], [target]])
        return memory.chain(
            Chains(np.array([text[start:stop]]), lengths, starts, sources, targets, np.zeros(0, np.int64))
        )[0]

    memory, other = model.memory(texts=2, nodes=1), model.memory(texts=2, nodes=1)
    first = model.logits(chained(memory, 0, 30, EMPTY_TEXT, 1))
    arrays = memory.save(1, 30)
    other.check(arrays, 30)
    for name, array in arrays.items():
        if array.dtype == np.uint16:
            with pytest.raises(ValueError, match=f"{name} has a number that is not finite"):
                other.check({**arrays, name: np.full_like(array, 0xFFFF)}, 30)  # a NaN in float16
    other.load(1, arrays)
    last = model.logits(chained(memory, 30, 40, 1, 1))
    assert torch.equal(model.logits(chained(other, 30, 40, 1, 1)), last)
    expected = library(torch.tensor([text])).logits[0, :, :VOCABULARY]
    assert (torch.cat((first, last)) - expected).abs().max() < 0.05
    assert "float16" in memory.layout
