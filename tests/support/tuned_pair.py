"""A tiny target with a drafter some of whose guesses are accepted, and a configuration of both."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from transformers import Mamba2ForCausalLM

from tests.support import tiny_mamba, tiny_models


def make_pair(folder: Path) -> tuple[Path, Path]:
    """A tiny Mamba-2 target, and as its drafter the same model with noise, so that some guesses are accepted."""
    config = tiny_mamba.tiny_config("mamba2", tiny_models.PADDED)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = tiny_models.END
    model = Mamba2ForCausalLM(config)
    tiny_mamba.randomise(model, 3)
    for name, noise in (("target", 0.0), ("drafter", 0.1)):
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator) * parameter.abs())
        model.save_pretrained(folder / name)
        tiny_models.write_tokenizer(folder / name)
    return folder / "target", folder / "drafter"


def configured(pair: tuple[Path, Path], folder: Path, **target: object) -> Path:
    file = folder / "cluster.yaml"
    sections = {
        "targets": {"tiny": {"checkpoint": str(pair[0]), "dtype": "float32", "max_length": 256} | target},
        "drafters": {"noisy": {"checkpoint": str(pair[1]), "dtype": "float32"}},
        "router": {"draft_timeout_ms": 20_000},
        "speculation": {"arms": ["off", "(1,1)", "(2,1)", "beam(2,2)"]},
    }
    file.write_text("# tiny\n" + yaml.safe_dump(sections))
    return file
