"""A drafter in float16: near the library's logits, and its states come back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_drafters import FAMILIES, VOCABULARY, make_drafter

from drafter_service.models import load_model
from drafter_service.plan import EMPTY_TEXT, Chains


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_text_in_float16_is_near_the_librarys_and_its_state_goes_on_elsewhere(tmp_path, family):
    library = make_drafter(tmp_path, family)
    model, _ = load_model(tmp_path, torch.float16, torch.device("cpu"))
    text = torch.randint(0, VOCABULARY, (40,), generator=torch.Generator().manual_seed(2)).tolist()

    def chained(memory, start, stop, source, target):
        one = np.array([[stop - start], [start], [source], [target]])
        return memory.chain(Chains(np.array([text[start:stop]]), *one, np.zeros(0, np.int64)))[0]

    memory, other = model.memory(texts=2, nodes=1), model.memory(texts=2, nodes=1)
    first = model.logits(chained(memory, 0, 30, EMPTY_TEXT, 1))
    arrays = memory.save(1, 30)
    other.check(arrays, 30)
    other.load(1, arrays)
    last = model.logits(chained(memory, 30, 40, 1, 1))
    assert torch.equal(model.logits(chained(other, 30, 40, 1, 1)), last)
    wanted = library(torch.tensor([text])).logits[0, :, :VOCABULARY]
    assert (torch.cat((first, last)) - wanted).abs().max() < 0.05
    assert "float16" in memory.layout
