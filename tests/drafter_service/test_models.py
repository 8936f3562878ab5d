"""Mamba drafters: logits against transformers, and checkpoints that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from dendro.errors import BadRequest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from drafter_service.models import load_model
from drafter_service.models.memory import DrafterMemory
from drafter_service.plan import EMPTY_TEXT, Chains, Level, Nodes, TextFold
from tests.support.tiny_mamba import (
    FAMILIES,
    PADDED,
    VOCABULARY,
    Family,
    make_checkpoint,
    make_state_spaces,
    write_tokenizer,
)
from tests.support.unsafe_pickles import UnsafePickle

CPU = torch.device("cpu")
Made = dict[Family, tuple[PreTrainedModel, dict[str, Path]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    checkpoints: Made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model = make_checkpoint(folder / "hugging-face", family)
        make_state_spaces(folder / "state-spaces", model)
        checkpoints[family] = model, {name.name: name for name in folder.iterdir()}
    return checkpoints


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(1))


def chained(memory: DrafterMemory, text: torch.Tensor, start: int, source: int, target: int) -> torch.Tensor:
    """Hidden [T, d] of a text, or of a part of it, as one chain."""
    lengths, starts, sources, targets = np.array([[len(text)], [start], [source], [target]])
    return memory.chain(Chains(text[None].numpy(), lengths, starts, sources, targets, np.zeros(0, np.int64)))[0]


def stepped(memory: DrafterMemory, token: torch.Tensor, start: int, text: int) -> torch.Tensor:
    """Hidden [1, d] of a token as a tree's root, which is folded into the text. A text at start 0 begins in slot 0."""
    source = text if start else EMPTY_TEXT
    hidden = memory.level(Level(token.numpy(), [1], [source], [start], [0], [Nodes([1], [-1])]))
    memory.fold([TextFold(start, source, text, (1,))])
    return hidden


@pytest.mark.parametrize("layout", ["hugging-face", "state-spaces"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_and_argmax_equal_those_of_transformers_within_2e_3_at_200_positions(made, family, layout):
    library, paths = made[family]
    model, _ = load_model(paths[layout], torch.float32, CPU)
    memory, text = model.memory(texts=3, nodes=2), tokens(200)
    expected = library(text[None]).logits[0, :, :VOCABULARY]
    by_steps = torch.cat([stepped(memory, text[t : t + 1], t, 1) for t in range(len(text))])
    for hidden in (by_steps, chained(memory, text, 0, EMPTY_TEXT, 2)):
        logits = model.logits(hidden)
        assert (logits - expected).abs().max() < 2e-3
        assert torch.equal(logits.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_prefill_in_chunks_leaves_the_state_of_2000_single_steps_within_1e_4(made, family):
    model, _ = load_model(made[family][1]["hugging-face"], torch.float32, CPU)
    memory, text = model.memory(texts=3, nodes=2), tokens(2000)
    for t in range(len(text)):
        last = stepped(memory, text[t : t + 1], t, 1)
    for start in range(0, len(text), 64):
        chunked = chained(memory, text[start : start + 64], start, 2 if start else EMPTY_TEXT, 2)[-1:]
    one, other = memory.save(1, 2000), memory.save(2, 2000)
    for name in one:
        assert np.linalg.norm(one[name] - other[name]) < 1e-4 * np.linalg.norm(one[name])
    assert torch.cosine_similarity(model.logits(last), model.logits(chunked)) > 0.99999


def remove(name: str):
    def change(folder: Path) -> None:
        (folder / name).unlink()

    return change


def configure(**changed: object):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))

    return change


def write(name: str, text: str):
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["backbone.layers.1.mixer.A_log"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change, reason",
    [
        (remove("config.json"), "config.json is missing"),
        (remove("model.safetensors"), "there are no weights"),
        (remove("tokenizer.json"), "no tokenizer that can be read"),
        (write("config.json", "{"), "config.json is unreadable"),
        (write("model.safetensors", "rubbish"), "cannot be read"),
        (write("tokenizer.json", "{}"), "tokenizer.json is unreadable"),
        (configure(model_type="gpt2"), "type 'gpt2' is not supported"),
        (configure(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (configure(hidden_size=31), "has shape"),
        (configure(state_size="many"), "state_size must be a whole number"),
        (configure(time_step_rank="many"), "time_step_rank must be a whole number"),
        (drop_tensor, "there is no tensor backbone.layers.1.mixer.A_log"),
        (lambda folder: shutil.rmtree(folder), "is not a folder"),
    ],
)
def test_an_unusable_checkpoint_is_refused_with_the_reason(made, tmp_path, change, reason):
    folder = tmp_path / "checkpoint"
    shutil.copytree(made["mamba"][1]["hugging-face"], folder)
    change(folder)
    with pytest.raises(BadRequest, match=reason) as refused:
        load_model(folder, torch.float32, CPU)
    assert refused.value.field == "checkpoint"


def test_a_tokenizer_larger_than_the_model_is_cut_to_the_models_rows(made, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(made["mamba"][1]["hugging-face"], folder)
    write_tokenizer(folder, 200)
    assert load_model(folder, torch.float32, CPU)[0].vocabulary == PADDED


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"attn_layer_idx": [1]}, "hybrid"),
        ({"rms_norm": False}, "rms_norm"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "Mamba3"),
        ({"ssm_cfg": {"layer": "Mamba2", "norm_before_gate": True}}, "norm_before_gate"),
        ({"sliding": 3}, "unknown keys"),
    ],
    ids=["hybrid", "layer-norm", "layer", "option", "key"],
)
def test_an_unsupported_state_spaces_configuration_is_refused(made, tmp_path, changed, reason):
    folder = tmp_path / "checkpoint"
    shutil.copytree(made["mamba2"][1]["state-spaces"], folder)
    configure(**changed)(folder)
    with pytest.raises(BadRequest, match=reason):
        load_model(folder, torch.float32, CPU)


def test_a_pickled_checkpoint_runs_no_code(made, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(made["mamba"][1]["state-spaces"], folder)
    torch.save({"backbone.embedding.weight": UnsafePickle()}, folder / "pytorch_model.bin")
    with pytest.raises(BadRequest, match="plain weights"):
        load_model(folder, torch.float32, CPU)
