"""Trained models as ordinary Hugging Face checkpoints: configuration, bf16 weights and the tokenizer's files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from tree_layers.draft_vocabulary import DRAFT_VOCABULARY

from drafter_service.training.saving import replacing
from drafter_service.training.vocabulary import (
    OF_VOCABULARY,
    draft_embedding,
    save_vocabulary,
    with_vocabulary,
)

# Small parameters of the state-space recurrence, for which the three digits of bf16 are too few.
KEPT_IN_FP32 = ("A_log", ".D", "dt_bias", "dt_proj.bias")


def export(model: PreTrainedModel, folder: Path, tokenizer_files: Iterable[Path]) -> None:
    """Write the checkpoint beside `folder`, then move it there; replaces an existing folder. Raises NotSaved on a full
    disk."""
    tied = ("lm_head.weight",) if has_tied_head(model) else ()
    embedding = draft_embedding(model)
    weights = {
        name: weight.detach().cpu().to(torch.float32 if name.endswith(KEPT_IN_FP32) else torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name not in tied and not name.endswith(OF_VOCABULARY)
    }
    with replacing(folder) as partial:
        model.save_pretrained(partial, state_dict=weights)
        # The dtype of the file, not of training.
        config = json.loads((partial / "config.json").read_text()) | {"dtype": "bfloat16"}
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if embedding is not None:
            save_vocabulary(embedding, partial / DRAFT_VOCABULARY)
        for weight_file in partial.glob("*.safetensors"):
            weight_file.chmod(0o644)
        for file in tokenizer_files:
            shutil.copy(file, partial / file.name)


def has_tied_head(model: PreTrainedModel) -> bool:
    """True if a model's head is its embedding. It may not be where the configuration says so: the library then keeps
    the files' head."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def load_fp32(folder: Path, device: torch.device) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return nn.Module.to(with_vocabulary(model.eval(), folder / DRAFT_VOCABULARY), device)
