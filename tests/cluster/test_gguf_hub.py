"""GGUF files on a hub: pinned once, and nothing else of their repositories is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
from dendro.errors import BadRequest

from cluster.checkpoints import check_checkpoints
from cluster.config import Config
from cluster.hub import fetched, pinned
from tests.support.small_hub import small_hub, use
from tests.support.tiny_gguf import write_llama

pytest.importorskip("gguf")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A tiny Llama with its byte tokenizer, in a GGUF file; and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_llama(tmp_path, monkeypatch)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with small_hub() as hub:
        use(monkeypatch, hub.url, tmp_path / "hub cache")
        yield hub


NAME = "people/model"


@pytest.mark.parametrize("inner", ["tiny.gguf", "quantised/tiny.gguf"])
def test_a_file_on_the_hub_is_pinned_and_nothing_else_is_fetched(file, hub, inner, tmp_path, monkeypatch):
    files = {inner: file.read_bytes(), "other.gguf": b"other", "model.safetensors": b"w", "config.json": b"{}"}
    commit = hub.commit(NAME, files, branch="stable")
    config = Config.of({"targets": {"tiny": {"checkpoint": f"{NAME}/{inner}", "revision": "stable"}}}, tmp_path)
    config = pinned(config)
    assert config.targets["tiny"].revision == commit
    hub.commit(NAME, {inner: b"new"}, branch="stable")
    travels = Config.of(config.model_dump(mode="json", exclude_unset=True), Path("/"))
    target = fetched(pinned(travels)).targets["tiny"]
    assert (target.checkpoint / "model.gguf").read_bytes() == file.read_bytes()
    assert hub.asked_for() == {inner} and target.revision == "" == target.checkpoint_name
    hub.requests.clear()
    use(monkeypatch, hub.url, tmp_path / "hub cache", offline=True)
    assert fetched(pinned(travels)).targets["tiny"] == target and hub.requests == []


def test_a_tokenizer_may_be_that_of_a_file_on_the_hub(file, hub, tmp_path):
    commit = hub.commit(NAME, {"tiny.gguf": file.read_bytes()})
    fields = {"checkpoint": str(tmp_path / "source"), "tokenizer": f"{NAME}/tiny.gguf"}
    config = pinned(Config.of({"targets": {"tiny": fields}}, tmp_path))
    assert config.targets["tiny"].tokenizer_revision == commit
    assert (fetched(config).targets["tiny"].tokenizer_folder / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("checkpoint", "revision", "field", "reason"),
    [
        (f"{NAME}/none.gguf", "", "checkpoint", f"{NAME} has no file none.gguf at [0-9a-f]+; it has a.gguf, b.gguf"),
        (f"{NAME}/a.gguf", "v9", "revision", f"{NAME} has no revision 'v9'"),
        ("people/none/a.gguf", "", "checkpoint", "there is no file people/none/a.gguf here, and as a name on the hub"),
        (f"{NAME}/a.gguf", "", "checkpoint", "is not a GGUF file"),
    ],
)
def test_a_file_that_the_hub_lacks_is_refused_by_its_field(checkpoint, revision, field, reason, hub, tmp_path):
    hub.commit(NAME, {"a.gguf": b"no header", "b.gguf": b"", "c.txt": b""})
    entry = {"checkpoint": checkpoint, **({"revision": revision} if revision else {})}
    with pytest.raises(BadRequest, match=reason) as refused:
        check_checkpoints(pinned(Config.of({"targets": {"tiny": entry}}, tmp_path)))
    assert refused.value.field == f"targets.tiny.{field}"


def test_a_file_that_exists_here_takes_precedence_over_the_hub(file, hub, tmp_path):
    here = tmp_path / NAME / "tiny.gguf"
    here.parent.mkdir(parents=True)
    file.rename(here)
    config = Config.of({"targets": {"tiny": {"checkpoint": f"{NAME}/tiny.gguf"}}}, tmp_path)
    assert pinned(config).targets["tiny"].checkpoint == here and hub.requests == []
