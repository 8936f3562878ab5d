"""Llama drafters: logits against transformers over whole texts, and configurations that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dendro.calls import CloseCall, Closed, DraftCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.errors import BadRequest
from dendro.shapes import LevelShape
from dendro.state import MemoryStates, NoStates
from dendro.text import Limits, Sampling, Tokens

from drafter_service.engine import DrafterEngine
from drafter_service.models import load_model
from drafter_service.options import DrafterOptions
from drafter_service.plan import EMPTY_TEXT, Chains
from tests.support.tiny_drafters import POSITIONS, VOCABULARY, make_drafter

CPU = torch.device("cpu")
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def chained(memory, text: list[int], start: int, source: int, target: int) -> torch.Tensor:
    lengths, starts, sources, targets = np.array([[len(text)], [start], [source], [target]])
    return memory.chain(Chains(np.array([text]), lengths, starts, sources, targets, np.zeros(0, np.int64)))[0]


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rope", ROPES)
@torch.inference_mode()
def test_logits_in_chunks_equal_those_of_transformers_over_the_whole_text(tmp_path, rope, kv_heads, tied):
    settings = {"rope_parameters": ROPES[rope], "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    library = make_drafter(tmp_path, "llama", **settings, head_dim=12)
    model, _ = load_model(tmp_path, torch.float32, CPU)
    text = torch.randint(0, VOCABULARY, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = library(torch.tensor([text])).logits[0, :, :VOCABULARY]
    memory, found = model.memory(texts=2, nodes=1), []
    for start, stop in ((0, 1), (1, 70), (70, 134), (134, 135), (135, 200)):
        found.append(chained(memory, text[start:stop], start, 1 if start else EMPTY_TEXT, 1))
    torch.testing.assert_close(model.logits(torch.cat(found)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"intermediate_size": 49}, "has shape"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type dynamic depend on"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unsupported_llama_is_refused_with_the_reason(tmp_path, changed, reason):
    make_drafter(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(BadRequest, match=reason):
        load_model(tmp_path, torch.float32, CPU)


def test_a_llama_with_mixers_is_refused(tmp_path):
    make_drafter(tmp_path, "llama")
    (tmp_path / "mamba_config.json").write_text("{}")
    with pytest.raises(BadRequest, match="a Llama with mixers"):
        load_model(tmp_path, torch.float32, CPU)


def update(opening: bytes, text: Tokens, held: int) -> TextUpdate:
    return TextUpdate.of(opening, text, held)


@pytest.mark.parametrize("room", [0, 1])
async def test_a_text_of_up_to_max_length_is_drafted_for_and_a_longer_one_refused(tmp_path, room):
    """Guesses may lie past `max_length`. The memory of a text longer than that is discarded when the text is closed."""
    make_drafter(tmp_path, "llama", max_position_embeddings=40)
    states = MemoryStates()
    engine = DrafterEngine.load(tmp_path, DrafterOptions(name="tiny", prefill_chunk=16), states=states)
    await engine.start()
    try:
        assert (await engine.hello()).max_length == 40
        text, opening, shape = Tokens(), new_opening(), LevelShape((2, 1, 1))
        text.extend(range(40 - room))
        parameters = RequestParameters(Sampling(), Limits(100), "", ())
        await engine.open(OpenCall(update(opening, text, 0), parameters))
        assert (await engine.draft(DraftCall(update(opening, text, len(text)), shape))).rows == shape.rows
        text.extend([1])
        if room:
            assert (await engine.draft(DraftCall(update(opening, text, 39), shape))).rows == shape.rows
            assert await engine.close(CloseCall(update(opening, text, 40))) == Closed(39)
            return
        with pytest.raises(BadRequest, match="at most 40") as refused:
            await engine.draft(DraftCall(update(opening, text, 40), shape))
        assert refused.value.field == "update.base"
        with pytest.raises(BadRequest, match="at most 40"):
            await engine.open(OpenCall(update(new_opening(), text, 0), parameters))
        assert await engine.close(CloseCall(update(opening, text, 40))) == Closed(0)
    finally:
        await engine.stop()
    assert engine.sessions == 0 and len(states.blobs) == room


async def test_saved_keys_of_another_number_of_tokens_are_refused(tmp_path):
    make_drafter(tmp_path, "llama")
    engine = DrafterEngine.load(tmp_path, DrafterOptions(name="tiny"), states=NoStates())
    memory = engine._runner.memory
    with torch.inference_mode():
        chained(memory, [1, 2, 3], 0, EMPTY_TEXT, 1)
    saved = memory.save(1, 3)
    memory.check(saved, 3)
    with pytest.raises(ValueError, match="the arrays are .*, not "):
        memory.check(saved, 4)
    with pytest.raises(ValueError, match="finite"):
        memory.check({"keys": np.full_like(saved["keys"], np.nan)}, 3)


def test_buffers_grow_by_doubling_and_have_text_bytes(tmp_path: Path):
    make_drafter(tmp_path, "llama")
    model, _ = load_model(tmp_path, torch.float32, CPU)
    memory: Any = model.memory(texts=2, nodes=1)
    with torch.inference_mode():
        for start in range(0, 160, 40):
            chained(memory, list(range(40)), start, 1 if start else EMPTY_TEXT, 1)
    assert memory._texts[1].shape[1] == 256
    assert memory.text_bytes(160) == memory._texts[1].nbytes == memory.text_bytes(256)
    assert memory.text_bytes(1 << 30) == POSITIONS * memory.node_bytes
    assert memory.node_bytes == 2 * 2 * 2 * 8 * 4  # layers, keys and values, kv heads, channels, bytes
