"""A target has the same logits in every layout in which checkpoints are published, and none of them runs code."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from dendro.errors import BadRequest
from torch import nn
from transformers.models.mamba2 import modeling_mamba2

from cluster.certify.checks import LibraryModel
from tests.support import tiny_hybrids, tiny_models
from tests.support.layouts import FORMS, copy_as
from tests.support.made_once import made_once
from tests.support.tiny_hybrids import oracle, paths_below, tree_below
from tests.support.tiny_mamba import make_state_spaces
from verifier_service.engine import VerifierEngine
from verifier_service.models import load_target
from verifier_service.models.reading import load_library_model
from verifier_service.options import VerifierOptions

IDS = [5, 9, 2, 40, 7, 7, 31, 12, 3]
FAMILIES = ("llama", "mamba2", "mamba_in_llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints in transformers' layout, with one file of safetensors."""

    def make(folder, family):
        return (tiny_models if family == "llama" else tiny_hybrids).make_checkpoint(folder, family)

    return made_once(tmp_path_factory, make)


def target_in(folder):
    return load_target(folder, torch.float32, torch.device("cpu"), [8])


def same_weights(one, other):
    """Compared before layers get their forms: packed ones have no weights."""
    ours, theirs = (load_library_model(folder, dtype=torch.float32).state_dict() for folder in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def logits_in(folder, degree=1):
    engine = VerifierEngine.load(
        folder,
        VerifierOptions(
            name="tiny",
            dtype=torch.float32,
            max_length=64,
            max_sessions=1,
            max_depth=8,
            tensor_parallel=degree,
            prefill_chunk=128,
        ),
    )
    try:
        return engine.logits_of(IDS, tree_below(IDS[-1]))
    finally:
        if engine.runner.crew is not None:
            engine.runner.crew.stop()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_form_of_weight_files_has_the_same_weights(folders, tmp_path, family, form):
    folder, _ = folders(family)
    assert same_weights(copy_as(folder, tmp_path / "other", form), folder)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_target_in_state_spaces_own_layout_has_the_librarys_logits(folders, tmp_path, family):
    _, model = folders(family)
    make_state_spaces(tmp_path / "own", model)
    truth = torch.stack([oracle(model, path) for path in paths_below(IDS)])
    assert (logits_in(tmp_path / "own") - truth).abs().max() < 1e-4


class OldNorm(nn.Module):
    """Mamba-2's gated norm in transformers before 5.23: all channels are one group."""

    def __init__(self, hidden_size, group_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states, gate):
        gated = hidden_states.float() * nn.functional.silu(gate.float())
        normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)


def test_mixers_of_several_groups_have_norms_by_groups_in_every_version_of_transformers(folders, tmp_path, monkeypatch):
    """In both layouts, for the target and for the library model that `dendro certify` compares it with."""
    folder, model = folders("mamba2")
    assert model.config.n_groups > 1
    make_state_spaces(tmp_path / "own", model)
    paths = paths_below(IDS)
    truth = torch.stack([oracle(model, path) for path in paths])
    monkeypatch.setattr(modeling_mamba2, "MambaRMSNormGated", OldNorm)
    for checkpoint in (folder, tmp_path / "own"):
        library = LibraryModel(checkpoint, torch.float32).model
        assert (torch.stack([oracle(library, path) for path in paths]) - truth).abs().max() < 1e-4
        assert (logits_in(checkpoint) - truth).abs().max() < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_workers_read_their_shards_from_torchs_own_files_too(folders, tmp_path, family):
    folder, _ = folders(family)
    found = logits_in(copy_as(folder, tmp_path / "other", "bin-shards"), degree=2)
    assert torch.equal(found, logits_in(folder, degree=2))


@pytest.mark.long
def test_workers_read_their_shards_from_state_spaces_own_layout(folders, tmp_path):
    folder, model = folders("mamba2")
    make_state_spaces(tmp_path / "own", model)
    assert torch.equal(logits_in(tmp_path / "own", degree=2), logits_in(folder, degree=2))


class Planted:
    """Creates a file when an unsafe unpickler loads it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_pickled_code_in_a_weight_file_is_refused_and_not_run(folders, tmp_path, legacy):
    folder = copy_as(folders("llama")[0], tmp_path / "other", "bin")
    planted = {"model.embed_tokens.weight": Planted(tmp_path / "ran")}
    torch.save(planted, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(BadRequest, match=r"checkpoint: .*pytorch_model\.bin"):
        target_in(folder)
    assert not (tmp_path / "ran").exists()


def test_a_weight_file_that_is_cut_short_is_refused(folders, tmp_path):
    folder = copy_as(folders("llama")[0], tmp_path / "other", "bin")
    whole = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadRequest, match=r"checkpoint: .*pytorch_model\.bin"):
        target_in(folder)


def test_safetensors_are_read_where_both_forms_are_there(folders, tmp_path):
    folder, _ = folders("llama")
    shutil.copytree(folder, tmp_path / "both")
    (tmp_path / "both" / "pytorch_model.bin").write_bytes(pickle.dumps({"not": "weights"}))
    assert same_weights(tmp_path / "both", folder)
