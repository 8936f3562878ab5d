"""Acceptance heads with random weights, in files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tree_layers.checkpoint import weights_fingerprint

from drafter_service.acceptance_head import HEAD_FILE, VERSION, HeadFacts, write_head
from drafter_service.models import load_model


def random_tensors(facts: HeadFacts, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of a head whose chances differ much from row to row. Matrices of blocks are exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator) for name, shape in facts.shapes.items()}
    for name, tensor in made.items():
        if name.endswith("weight"):
            made[name] = (tensor / facts.width**0.5).bfloat16().float()
        elif name in ("numbers", "hidden_scale"):
            made[name] = 0.2 * tensor
        elif name in ("output", "output_bias", "calibration"):  # a great sharpness would magnify rounding
            made[name] = (0.05 if name == "output" else 0.4) * tensor
    return made


def make_head(checkpoint_folder: Path, folder: Path, blocks: int = 2, tied: bool = False, **changes: Any) -> Path:
    """Write a head for the drafter of a folder; `changes` are other facts than the drafter's."""
    model, checkpoint = load_model(checkpoint_folder, torch.float32, torch.device("cpu"), form="eager")
    assert checkpoint.fingerprint == weights_fingerprint(checkpoint_folder)
    own = {"drafter": checkpoint.fingerprint, "width": model.hidden_size, "vocabulary": model.vocabulary, "depths": 3}
    facts = HeadFacts(**{"version": VERSION, "blocks": blocks, "tied": tied, **own, **changes})
    write_head(folder / HEAD_FILE, facts, random_tensors(facts))
    return folder / HEAD_FILE
