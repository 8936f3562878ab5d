"""Quantised checkpoints are refused by name before anything is started, and never loaded as if they were plain."""

from __future__ import annotations

import json

import pytest
import tiny_models
import torch
from dendro.errors import BadRequest

from cluster.checkpoints import check_checkpoints
from cluster.config import pair_config
from drafter_service.models import load_model
from verifier_service.models import load_target

METHODS = {
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "compressed-tensors": {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
    "compressed-tensors, early": {"compression_config": {"quant_method": "compressed-tensors"}},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 4}},
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "inside text_config": {"text_config": {"quantization_config": {"quant_method": "awq"}}},
}


@pytest.fixture
def folder(tmp_path):
    tiny_models.make_checkpoint(tmp_path / "model", "llama")
    return tmp_path / "model"


def says(folder, changes):
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | changes))


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_checkpoint_is_refused_by_its_method_by_the_check_and_by_both_engines(folder, method):
    says(folder, METHODS[method])
    reason = rf"its weights are quantised \({list(METHODS[method].values())[0].get('quant_method', 'awq')}\)"
    with pytest.raises(BadRequest, match=reason) as refused:
        check_checkpoints(pair_config(folder, []))
    assert refused.value.field == "targets.model.checkpoint"
    with pytest.raises(BadRequest, match=reason):
        load_target(folder, torch.float32, torch.device("cpu"), [8])
    with pytest.raises(BadRequest, match=reason):
        load_model(folder, torch.float32, torch.device("cpu"))


def test_an_empty_entry_is_no_quantisation(folder):
    says(folder, {"quantization_config": None})
    check_checkpoints(pair_config(folder, []))
