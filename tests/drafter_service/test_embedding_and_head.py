"""Drafters whose configuration says that the head is the embedding, with and without a head in their files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafter_service.models import MODELS, load_model
from drafter_service.plan import EMPTY_TEXT, Chains
from tests.support.tiny_families import VOCABULARY, make_checkpoint

CPU = torch.device("cpu")
EMBEDDINGS = ("model.embed_tokens.weight", "backbone.embeddings.weight", "model.embeddings.weight")
HEAD = "lm_head.weight"


def write(folder: Path, family: str, files: str) -> None:
    """A checkpoint in whose files the head is another matrix than the embedding (`both`), or one of them is missing."""
    make_checkpoint(folder, family)
    tensors = load_file(folder / "model.safetensors")
    embedding = next(name for name in EMBEDDINGS if name in tensors)
    rows = tensors[embedding]
    tensors[HEAD] = torch.randn(rows.shape, generator=torch.Generator().manual_seed(5)) / rows.shape[1] ** 0.5
    if files != "both":
        tensors.pop({"embedding": HEAD, "head": embedding}[files])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def configure(folder: Path, **settings: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("files", ["embedding", "both", "head"])
@pytest.mark.parametrize("family", MODELS)
@torch.inference_mode()
def test_a_drafter_has_the_librarys_embedding_and_head_or_is_refused(tmp_path, family, files, tied):
    write(tmp_path, family, files)
    configure(tmp_path, tie_word_embeddings=tied, sliding_window=None)
    library, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert info["missing_keys"] or tied or files == "both"
    if info["missing_keys"]:  # nemotron_h's embedding is never its head
        with pytest.raises(BadRequest, match="there is no tensor"):
            load_model(tmp_path, torch.float32, CPU, form="eager")
        return
    text = torch.randint(0, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(1))
    model, _ = load_model(tmp_path, torch.float32, CPU, form="eager")
    lengths, starts, sources, targets = np.array([[12], [0], [EMPTY_TEXT], [1]])
    chains = Chains(text.numpy(), lengths, starts, sources, targets, np.zeros(0, np.int64))
    hidden = model.memory(texts=2, nodes=1).chain(chains)[0]
    expected = library(text, use_cache=False).logits[0, :, :VOCABULARY]
    torch.testing.assert_close(model.logits(hidden), expected, atol=2e-4, rtol=2e-4)
