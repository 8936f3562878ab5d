"""Targets whose weights, tokenizer and chat template are in one GGUF file."""

from __future__ import annotations

import os
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from dendro.errors import BadRequest
from dendro.tree import DraftTree
from rich.console import Console
from tree_layers.checkpoint import read_facts
from tree_layers.errors import CheckpointError

from cluster.checking import examine, show
from cluster.checkpoints import check_checkpoints
from cluster.config import Config
from cluster.gguf_files import folder_of
from cluster.hub import fetched
from cluster.router.tokenizer import CheckpointTokenizer
from tests.support import tiny_models
from tests.support.tiny_gguf import END, FAMILIES, TEMPLATE, write_family, write_llama
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions

pytest.importorskip("gguf")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A tiny Llama with its byte tokenizer, in a GGUF file; and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_llama(tmp_path, monkeypatch)


def config_of(checkpoint, folder: Path = Path("/")) -> Config:
    return Config.of({"targets": {"tiny": {"checkpoint": str(checkpoint), "max_length": 64}}}, folder)


def logits_of(folder: Path) -> torch.Tensor:
    options = VerifierOptions(name="tiny", dtype=torch.float32, max_length=64, max_sessions=1)
    tree = DraftTree.of([7, 8, 9], [-1, 0, 0])
    return VerifierEngine.load(folder, options).logits_of([5, 6, 7], tree).as_subclass(torch.Tensor)


def test_a_target_of_a_gguf_file_has_the_logits_the_tokens_and_the_end_of_its_source(file, tmp_path):
    config = config_of("models/tiny.gguf", tmp_path)  # relative to the configuration
    check_checkpoints(config)
    folder = fetched(config).targets["tiny"].checkpoint
    assert torch.allclose(logits_of(folder), logits_of(tmp_path / "source"), atol=1e-5)
    facts = read_facts(folder)
    assert facts.vocabulary == tiny_models.VOCABULARY and facts.end_ids == {END}
    tokenizer = CheckpointTokenizer(folder, "")
    assert tokenizer.decode(tokenizer.encode("né", begins=True)) == "né"
    assert "[user]hello" in (folder / "chat_template.jinja").read_text() or TEMPLATE in "".join(
        each.read_text() for each in folder.glob("*template*")
    )


def test_a_folder_is_made_once_for_a_file_and_anew_for_a_changed_one(file, monkeypatch):
    first = folder_of(file)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)  # not read again
        assert folder_of(file) == first
    os.utime(file, ns=(0, 0))
    assert folder_of(file) != first and not first.exists()


def test_folders_of_files_that_are_gone_are_removed_and_those_of_other_files_stay(file, tmp_path):
    other = file.with_name("other.gguf")
    other.write_bytes(file.read_bytes())
    first, second = folder_of(file), folder_of(other)
    third = file.with_name("third.gguf")
    file.rename(third)
    assert {folder_of(third), second} == set((tmp_path / "cache" / "dendroaspis" / "gguf").iterdir())
    assert first != second and (second / "config.json").is_file()


def test_a_cache_that_cannot_be_written_is_named_with_the_variable_that_moves_it(file, tmp_path, monkeypatch):
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(BadRequest, match=r"taken/dendroaspis/gguf, for .*tiny\.gguf: .*XDG_CACHE_HOME") as refused:
        check_checkpoints(config_of(file))
    assert refused.value.field == "targets.tiny.checkpoint"


def test_the_check_counts_parameters_and_names_the_types_without_loading_weights(file):
    report = examine(config_of(file), load=False, show_line=print)
    (target,) = report.targets
    source = tiny_models.make_model("llama", vocab_size=tiny_models.VOCABULARY)
    assert target.weights == 2 * source.num_parameters() and target.kind == "llama"
    assert target.stored == f"{len(list(source.parameters()))} F32"
    show(Console(file=(shown := StringIO()), width=200), report)
    assert f"tensors of tiny: {target.stored}, unpacked into bfloat16" in shown.getvalue()


def test_an_architecture_that_the_library_does_not_read_is_named(file):
    file.write_bytes(file.read_bytes().replace(b"llama", b"lemma"))
    with pytest.raises(BadRequest, match="architecture lemma is not supported") as refused:
        check_checkpoints(config_of(file))
    assert refused.value.field == "targets.tiny.checkpoint"


def test_a_file_of_a_package_is_found_without_importing_it(file, tmp_path, monkeypatch):
    package = tmp_path / "site" / "some_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    file.rename(package / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    config = config_of("package:some_weights/tiny.gguf")
    assert config.targets["tiny"].checkpoint_name == ""
    check_checkpoints(config)
    assert (fetched(config).targets["tiny"].checkpoint / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    "text, reason",
    [
        ("package:some_weights/../../secret.gguf", "must name a file inside the package"),
        ("package:some_weights//etc/secret.gguf", "has no such file"),
        ("package:some_weights/link.gguf", "has no such file"),
        ("package:some_weights/none.gguf", "has no such file"),
        ("package:no_such_package/a.gguf", "there is no installed package no_such_package"),
        ("package:../up/a.gguf", "'..' is not the name of a Python package"),
    ],
)
def test_a_path_that_leaves_its_package_is_refused(text, reason, tmp_path, monkeypatch):
    package = tmp_path / "site" / "some_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "secret.gguf").write_bytes(b"GGUF")
    (package / "link.gguf").symlink_to(tmp_path / "secret.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(BadRequest, match=reason) as refused:
        check_checkpoints(config_of(text))
    assert refused.value.field == "targets.tiny.checkpoint"


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + bytes(64), b"not a model"], ids=["empty", "magic", "zeros", "text"]
)
def test_a_damaged_file_is_refused_and_leaves_no_folder(content, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(BadRequest, match=r"bad\.gguf"):
        check_checkpoints(config_of(tmp_path / "bad.gguf"))
    assert not list((tmp_path / "cache").glob("dendroaspis/gguf/*"))


def test_a_truncated_file_is_refused(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises((BadRequest, CheckpointError)):
        logits_of(fetched(config_of(file)).targets["tiny"].checkpoint)


def test_a_missing_file_is_refused_by_its_path(tmp_path):
    with pytest.raises(BadRequest, match=r"none\.gguf: No such file"):
        check_checkpoints(config_of(tmp_path / "none.gguf"))


def test_a_drafter_of_a_gguf_file_is_refused(file):
    config = Config.of(
        {
            "targets": {"tiny": {"checkpoint": str(file), "max_length": 64}},
            "drafters": {"small": {"checkpoint": str(file)}},
        },
        Path("/"),
    )
    with pytest.raises(BadRequest, match="a drafter's weights cannot be in a GGUF file") as refused:
        check_checkpoints(config)
    assert refused.value.field == "drafters.small.checkpoint"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_other_families_have_the_logits_of_their_source(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "a.gguf"
    write_family(file, architecture, tmp_path / "source")
    folder = folder_of(file)
    assert read_facts(folder).numbers == read_facts(tmp_path / "source").numbers
    assert torch.allclose(logits_of(folder), logits_of(tmp_path / "source"), atol=1e-4)
