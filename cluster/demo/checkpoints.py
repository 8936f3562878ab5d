"""The pair as ordinary Hugging Face checkpoints: config.json, model.safetensors in bf16, tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cluster.demo.corpus import END_OF_TEXT

# Small parameters of the state-space recurrence, for which the three digits of bf16 are too few.
KEPT_IN_FP32 = ("A_log", ".D", "dt_bias", "dt_proj.bias")


def export(model: PreTrainedModel, folder: Path, tokenizer_file: Path) -> None:
    """Write the checkpoint beside `folder`, then move it there; replaces an existing folder."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    weights = {
        name: weight.detach().cpu().to(torch.float32 if name.endswith(KEPT_IN_FP32) else torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    model.save_pretrained(partial, state_dict=weights)
    config = json.loads((partial / "config.json").read_text()) | {
        "dtype": "bfloat16"
    }  # the dtype of the file, not of training
    (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (partial / "model.safetensors").chmod(0o644)
    shutil.copy(tokenizer_file, partial / "tokenizer.json")
    describe = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT}
    (partial / "tokenizer_config.json").write_text(json.dumps(describe, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def load_fp32(folder: Path, device: torch.device) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return nn.Module.to(model.eval(), device)
