"""Checkpoint errors name the configuration's field, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dendro.errors import BadRequest
from safetensors.torch import save_file

from cluster.certify.checks import LibraryModel
from cluster.checkpoints import check_checkpoints
from cluster.config import Config, pair_config
from cluster.measure.baselines import Baselines
from cluster.measure.costly import costly_checkpoint
from cluster.router.ingress import Ingress
from cluster.sessions import MemorySessions
from tests.support.cut_heads import write_draft_vocabulary
from tests.support.edge import EdgePeers


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A pair with all its files, each with minimal contents."""
    for name, kind in (("target", "llama"), ("mamba", "mamba")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 64}))
        save_file({"x": torch.zeros(1)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    return pair_config(tmp_path / "target", [tmp_path / "mamba"])


def test_a_pair_with_all_files_passes(config: Config):
    check_checkpoints(config)


@pytest.mark.parametrize(
    "file, field, reason",
    [
        ("target/config.json", "targets.target.checkpoint", "config.json"),
        ("target/model.safetensors", "targets.target.checkpoint", "no weights, neither model.safetensors"),
        (
            "target/tokenizer.json",
            "targets.target.checkpoint",
            "no tokenizer that can be read: neither tokenizer.json",
        ),
        ("mamba/config.json", "drafters.mamba.checkpoint", "config.json"),
        ("mamba/model.safetensors", "drafters.mamba.checkpoint", "no weights, neither model.safetensors"),
    ],
)
def test_a_missing_file_is_named(config: Config, tmp_path: Path, file: str, field: str, reason: str):
    (tmp_path / file).unlink()
    with pytest.raises(BadRequest, match=reason) as refused:
        check_checkpoints(config)
    assert refused.value.field == field


def test_a_missing_head_is_named(config: Config, tmp_path: Path):
    drafter = config.drafters["mamba"].model_copy(update={"head": tmp_path / "nowhere.safetensors"})
    with pytest.raises(BadRequest, match=r"^drafters\.mamba\.head: there is no file .*nowhere\.safetensors; `dendro"):
        check_checkpoints(config.model_copy(update={"drafters": {"mamba": drafter}}))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("model, field", [("target", "targets.target"), ("mamba", "drafters.mamba")])
def test_a_file_that_git_lfs_did_not_download_is_named(config: Config, tmp_path: Path, model: str, field: str, file):
    if file == "pytorch_model.bin":
        (tmp_path / model / "model.safetensors").unlink()
    (tmp_path / model / file).write_text(POINTER)
    with pytest.raises(BadRequest, match=rf"^{field}.checkpoint: .*{file} is a Git LFS pointer, .* `git lfs pull`"):
        check_checkpoints(config)


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: LibraryModel(folder, torch.float32),
        lambda folder: Baselines(folder, None, "float32", 1),
        lambda folder: costly_checkpoint(folder, folder / "made"),
    ],
    ids=["certify", "baselines", "costly"],
)
def test_mamba_in_llama_is_refused_where_answers_are_compared_with_the_library(config: Config, tmp_path: Path, use):
    (tmp_path / "target" / "mamba_config.json").write_text("{}")
    check_checkpoints(config)
    with pytest.raises(BadRequest, match="is a Mamba-in-Llama, which transformers has no class for"):
        use(tmp_path / "target")


def test_a_missing_shard_is_named(config: Config, tmp_path: Path):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "target" / "model.safetensors").rename(tmp_path / "target" / "model-00001-of-00002.safetensors")
    with pytest.raises(BadRequest, match=r"files that are missing: \['model-00002-of-00002.safetensors'\]"):
        check_checkpoints(config)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}'], ids=["cut", "list", "no-vocabulary"])
def test_an_invalid_configuration_file_is_refused(config: Config, tmp_path: Path, text: str):
    (tmp_path / "target" / "config.json").write_text(text)
    with pytest.raises(BadRequest, match=r"^targets\.target\.checkpoint: "):
        check_checkpoints(config)


def test_a_drafter_of_another_tokenizer_is_refused_with_the_first_ids_and_both_texts(config: Config, tmp_path: Path):
    (tmp_path / "mamba" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "c": 1}}}')
    with pytest.raises(BadRequest, match="1 is 'b' to the target and 'c' to the drafter") as refused:
        check_checkpoints(config)
    assert refused.value.field == "drafters.mamba.checkpoint"


def test_a_router_refuses_such_a_drafter_when_it_starts(config: Config, tmp_path: Path):
    """`serve deploy` and KubeRay start routers without the checks of `dendro serve`."""
    (tmp_path / "mamba" / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "c": 1}}}')
    with pytest.raises(BadRequest, match="does not fit target target: .*1 is 'b' to the target"):
        Ingress(config, EdgePeers(), MemorySessions())


def test_a_drafter_that_differs_only_in_padding_and_bytes_passes(config: Config, tmp_path: Path):
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba", "vocab_size": 72}')
    (tmp_path / "mamba" / "tokenizer.json").write_text('{ "model": {"vocab": {"b": 1, "a": 0}, "merges": []}}')
    check_checkpoints(config)


def test_a_drafter_of_some_tokens_is_refused_as_a_target_and_a_bad_map_is_named(config: Config, tmp_path: Path):
    for name in ("mamba", "target"):
        given = torch.zeros(64, dtype=torch.int32), torch.zeros(0, 4), torch.zeros(4, 8)
        write_draft_vocabulary(tmp_path / name, *given)
        with pytest.raises(BadRequest, match=r"draft_vocabulary.safetensors: others_basis has shape") as refused:
            check_checkpoints(config)
        assert refused.value.field == ("drafters.mamba.checkpoint" if name == "mamba" else "targets.target.checkpoint")
        settings = json.loads((tmp_path / name / "config.json").read_text()) | {"hidden_size": 8, "vocab_size": 2}
        (tmp_path / name / "config.json").write_text(json.dumps(settings))
        write_draft_vocabulary(tmp_path / name, given[0][:2], *given[1:])
        if name == "mamba":
            check_checkpoints(config)
    with pytest.raises(BadRequest, match="cannot be a target: .* it guesses 2 of 2 tokens") as refused:
        check_checkpoints(config)
    assert refused.value.field == "targets.target.checkpoint"
