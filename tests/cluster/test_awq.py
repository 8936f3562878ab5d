"""Targets whose weights AWQ has quantised, in the format GEMM."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from safetensors.torch import load_file, save_file
from tree_kernels.matmul import why_not_packed
from tree_layers import quantised_packing
from tree_layers.awq import read_weight
from tree_layers.checkpoint import read_facts
from tree_layers.quantised_packing import ROWS

from cluster.certify.checks import LibraryModel
from cluster.checkpoints import check_checkpoints
from cluster.config import pair_config
from drafter_service.models import load_model
from tests.support import tiny_models
from tests.support.engines import engine_of, tree_logits
from tests.support.routers import LAWS, alone, arrive_at_random
from verifier_service.models import load_target

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""A word's outputs, from the lowest bits on."""
SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}


def words(numbers):
    """[rows, outputs / 8] int32 of numbers [rows, outputs]."""
    made = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int32)
    for place, output in enumerate(ORDER):
        made |= numbers[:, output::8].int() << 4 * place
    return made


def quantise(folder, group):
    """Replace a checkpoint's linear layers by random weights of 4 bits; returns all tensors unpacked, in float32."""
    generator, tensors, plain = torch.Generator().manual_seed(0), {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = plain[name] = weight.bfloat16()
        if name.endswith("proj.weight"):
            outputs, inputs = weight.shape
            fields = torch.randint(16, (inputs, outputs), generator=generator)
            zeros = torch.randint(16, (inputs // group, outputs), generator=generator)
            scales = (torch.rand(zeros.shape, generator=generator) / 64).half()
            plain[name] = (
                ((fields.unflatten(0, (-1, group)) - zeros[:, None]) * scales[:, None].float()).flatten(0, 1).t()
            )
            module = name.removesuffix(".weight")
            tensors |= {
                f"{module}.qweight": words(fields),
                f"{module}.qzeros": words(zeros),
                f"{module}.scales": scales,
            }
            del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    change_settings(folder, {"group_size": group})
    return {name: tensor.float().contiguous() for name, tensor in plain.items()}


def change_settings(folder, changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = SETTINGS | config.get("quantization_config", {}) | changes
    (folder / "config.json").write_text(json.dumps(config))


def make(folder, group=64):
    """A folder with weights in AWQ's form, and one with the same weights in float32."""
    awq, plain = folder / "model", folder / "plain"
    tiny_models.make_checkpoint(awq, "llama", hidden_size=128, intermediate_size=192, num_attention_heads=4)
    shutil.copytree(awq, plain)
    save_file(quantise(awq, group), plain / "model.safetensors", {"format": "pt"})
    return awq, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
async def test_a_target_answers_like_its_unpacked_weights(dtype, tmp_path):
    prompts, rng, truths, found = [[5, 9, 2, 40, 7], list(range(30, 70))], np.random.default_rng(0), [], []
    for folder in make(tmp_path):
        loaded = engine_of(folder, dtype)
        await loaded.start()
        try:
            truths.append(await alone(loaded, prompts, LAWS[:2], 16))
            await arrive_at_random(loaded, prompts, LAWS[:2], 16, rng)
            found.append(tree_logits(loaded))
        finally:
            await loaded.stop()
    assert truths[0] == truths[1] and all(map(torch.equal, *found))


@pytest.mark.skipif(bool(why_not_packed()), reason=why_not_packed())
@pytest.mark.parametrize(("group", "most", "form"), [(64, 3, "up to 3"), (32, ROWS[-1], "any"), (16, ROWS[-1], "")])
def test_weights_that_stay_quantised_have_the_same_logits(group, most, form, tmp_path, monkeypatch):
    """Groups of 16 inputs are not: a block of products has 32."""
    awq, plain = make(tmp_path, group)
    monkeypatch.setattr(quantised_packing, "may_gain", lambda form, threads: True)
    monkeypatch.setattr(quantised_packing, "rows_that_gain", lambda seconds: most)
    quantised = engine_of(awq, torch.bfloat16)
    found = tree_logits(quantised)
    assert (f"21 Q4_K for {form} rows" in quantised.kernels) if form else ("Q4_K" not in quantised.kernels)
    assert all(map(torch.equal, found, tree_logits(engine_of(plain, torch.bfloat16))))


def test_certify_compares_with_the_same_unpacked_weights(tmp_path):
    ours, plain = (LibraryModel(folder, torch.bfloat16).model.state_dict() for folder in make(tmp_path))
    assert all(torch.equal(ours[name], plain[name]) for name in plain) and ours.keys() == plain.keys()


def test_facts_count_the_unpacked_numbers(tmp_path):
    awq, plain = map(read_facts, make(tmp_path))
    assert awq.numbers == plain.numbers and awq.rows == plain.rows


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 8}, "with bits 8; only 4 is read"),
        ({"version": "GEMV"}, "with format 'gemv'; only 'gemm' is read"),
        ({"zero_point": False}, "with zero_point False; only True is read"),
    ],
)
def test_other_settings_are_refused_by_name(changes, reason, tmp_path):
    folder, _ = make(tmp_path)
    change_settings(folder, changes)
    with pytest.raises(BadRequest, match=rf"quantised \(awq\), which is not supported {reason}; name the bfloat16"):
        check_checkpoints(pair_config(folder, []))


def test_a_drafter_is_refused(tmp_path):
    folder, _ = make(tmp_path)
    with pytest.raises(BadRequest, match=r"quantised \(awq\), which is not supported for a drafter"):
        load_model(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_missing_or_misshapen_tensor_is_refused_by_name(part, tmp_path):
    folder, _ = make(tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.up_proj.{part}"
    for changed in ({name: tensors[name][:-1].contiguous()}, {}):
        save_file({key: each for key, each in tensors.items() if key != name} | changed, file, {"format": "pt"})
        with pytest.raises(BadRequest, match=f"model.layers.1.mlp.up_proj.*{part}"):
            load_target(folder, torch.float32, torch.device("cpu"), [8])


def test_a_word_holds_its_outputs_in_the_order_of_the_format(tmp_path):
    tensors = {
        "a.qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "a.qzeros": torch.tensor([[0]], dtype=torch.int32),
        "a.scales": torch.ones(1, 8).half(),
    }
    found = read_weight(tmp_path, "a", tensors)
    assert found.fields.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
