"""Quantised checkpoints: FP8 by blocks is dequantised by transformers for a target; other methods but AWQ's are refused
by name before anything starts."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from dendro.tree import DraftTree
from safetensors.torch import load_file, save_file

from cluster.certify.checks import LibraryModel
from cluster.checkpoints import check_checkpoints
from cluster.config import pair_config
from drafter_service.models import load_model
from tests.support import tiny_experts, tiny_models
from tests.support.engines import engine_of
from tests.support.routers import LAWS, alone, arrive_at_random
from verifier_service.models import load_target

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
METHODS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
    "compressed-tensors, early": {"compression_config": {"quant_method": "compressed-tensors"}},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 3}},
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "inside text_config": {"text_config": {"quantization_config": {"quant_method": "awq"}}},
}


@pytest.fixture
def folder(tmp_path):
    tiny_models.make_checkpoint(tmp_path / "model", "llama")
    return tmp_path / "model"


def change_config(folder, changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("method", METHODS)
def test_the_check_and_both_engines_refuse_a_quantised_checkpoint_by_its_method(folder, method):
    change_config(folder, METHODS[method])
    reason = rf"its weights are quantised \({list(METHODS[method].values())[0].get('quant_method', 'awq')}\)"
    with pytest.raises(BadRequest, match=reason) as refused:
        check_checkpoints(pair_config(folder, []))
    assert refused.value.field == "targets.model.checkpoint"
    with pytest.raises(BadRequest, match=reason):
        load_target(folder, torch.float32, torch.device("cpu"), [8])
    with pytest.raises(BadRequest, match=reason):
        load_model(folder, torch.float32, torch.device("cpu"))


def test_an_empty_quantisation_entry_is_ignored(folder):
    change_config(folder, {"quantization_config": None})
    check_checkpoints(pair_config(folder, []))


# FP8 with one scale per block


def quantise(folder):
    """Quantise a checkpoint's linear layers by blocks, in place; returns all tensors dequantised, in float32."""
    tensors, plain = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = plain[name] = weight.bfloat16()
        if name.endswith("proj.weight"):
            blocks = weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 16))  # [rows, 16, columns, 16]
            scales = blocks.abs().amax((1, 3)) / 448
            small = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors |= {name: small.flatten(0, 1).flatten(1), f"{name}_scale_inv": scales}
            plain[name] = (small.float() * scales[:, None, :, None]).flatten(0, 1).flatten(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, FP8)
    return {name: tensor.float() for name, tensor in plain.items()}


@pytest.fixture(params=["llama", "mixtral"])
def quantised(request, tmp_path):
    """A folder with FP8 weights, and one with the same weights in float32."""
    make = tiny_models.make_checkpoint if request.param == "llama" else tiny_experts.make_checkpoint
    make(tmp_path / "model", request.param)
    shutil.copytree(tmp_path / "model", tmp_path / "plain")
    save_file(quantise(tmp_path / "model"), tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    return tmp_path / "model", tmp_path / "plain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
async def test_a_target_in_fp8_answers_like_its_dequantised_weights(quantised, dtype):
    engines = [engine_of(folder, dtype) for folder in quantised]
    prompts, rng = [[5, 9, 2, 40, 7], list(range(30, 70))], np.random.default_rng(0)
    truths, logits = [], []
    for engine in engines:
        await engine.start()
        try:
            truths.append(await alone(engine, prompts, LAWS[:2], 16))
            await arrive_at_random(engine, prompts, LAWS[:2], 16, rng)
            logits.append(engine.logits_of([5, 6, 7], DraftTree.of([7, 8, 9], [-1, 0, 0])))
        finally:
            await engine.stop()
    assert truths[0] == truths[1] and torch.equal(*logits)


def test_certify_compares_with_the_same_dequantised_weights(quantised):
    ours, plain = (LibraryModel(folder, torch.bfloat16).model.state_dict() for folder in quantised)
    assert all(torch.equal(ours[name], plain[name]) for name in plain) and ours.keys() == plain.keys()


def test_a_drafter_in_fp8_is_refused(folder):
    change_config(folder, FP8)
    with pytest.raises(BadRequest, match=r"quantised \(fp8\), which is not supported for a drafter"):
        load_model(folder, torch.float32, torch.device("cpu"))
    with pytest.raises(BadRequest, match=r"quantised \(fp8\)") as refused:
        check_checkpoints(pair_config(folder, [folder]))
    assert refused.value.field == "drafters.model.checkpoint"


def test_fp8_weights_without_their_scales_are_refused(quantised):
    folder, _ = quantised
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("_scale_inv"))
    tensors[lost.replace("_scale_inv", "_scale")] = tensors.pop(lost)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadRequest, match=f"there is no {lost}"):
        load_target(folder, torch.float32, torch.device("cpu"), [8])


def test_fp8_weights_are_refused_with_several_workers(quantised):
    with pytest.raises(BadRequest, match=r"quantised weights \(fp8\) are not supported .* tensor_parallel"):
        load_target(quantised[0], torch.float32, torch.device("cpu"), [8], group=object())
