"""Checkpoints on a hub: pinned once, only needed files fetched on every node, errors explained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dendro.errors import BadRequest, PeerLost
from huggingface_hub import errors
from huggingface_hub.utils import disable_progress_bars

from cluster.checkpoints import check_checkpoints
from cluster.config import Config
from cluster.engines import Worker
from cluster.hub import _explained, fetched, pinned
from cluster.serve_config import serve_config
from tests.support import tiny_models
from tests.support.small_hub import TOKEN, SmallHub, small_hub, use

NAME = "people/model"
SMALL = {"config.json": b'{"vocab_size": 8}', "tokenizer.json": b"{}", "generation_config.json": b"{ }"}
UNWANTED = {
    "modeling_own.py": b"raise SystemExit",
    "onnx/model.onnx": b"1",
    "onnx/config.json": b"3",
    "original/model.safetensors": b"2",
    "README.md": b"#",
}
SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 9 for n in (1, 2)}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with small_hub() as hub:
        use(monkeypatch, hub.url, tmp_path / "cache")
        yield hub


def config_of(folder: Path, **entry: str) -> Config:
    return Config.of({"targets": {"t": {"checkpoint": NAME, **entry}}}, folder)


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ({"model.safetensors": b"w", "pytorch_model.bin": b"p", **INDEX, **SHARDS}, {"model.safetensors"}),
        ({"pytorch_model.bin": b"p", **INDEX, **SHARDS}, {*INDEX, *SHARDS}),
        ({"pytorch_model.bin": b"p"}, {"pytorch_model.bin"}),
    ],
    ids=["single", "shards", "bin"],
)
def test_only_needed_files_are_requested(hub: SmallHub, tmp_path: Path, weights, wanted):
    commit = hub.commit(NAME, SMALL | UNWANTED | weights)
    target = fetched(config_of(tmp_path)).targets["t"]
    assert hub.asked_for() == {*SMALL, *wanted}
    assert target.checkpoint.name == commit
    assert {path.name for path in target.checkpoint.iterdir()} == {*SMALL, *wanted}
    assert (target.checkpoint_name, target.revision) == ("", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_only_for_weights_on_a_terminal(hub, tmp_path, monkeypatch, capsys, terminal):
    hub.commit(NAME, SMALL | {"model.safetensors": b"w"})
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    disable_progress_bars()  # as loading a model does
    fetched(config_of(tmp_path), weights=False)
    assert "Fetching" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    fetched(config_of(tmp_path))
    assert ("Fetching" in capsys.readouterr().err) is terminal


def test_a_router_requests_no_weights(hub: SmallHub, tmp_path: Path):
    hub.commit(NAME, SMALL | {"model.safetensors": b"w"})
    fetched(config_of(tmp_path), weights=False)
    assert hub.asked_for() == {*SMALL}


def test_a_router_requests_a_drafters_vocabulary_on_which_its_facts_depend(hub: SmallHub, tmp_path: Path):
    hub.commit(NAME, SMALL | {"model.safetensors": b"w", "draft_vocabulary.safetensors": b"d"})
    fetched(config_of(tmp_path), weights=False)
    assert hub.asked_for() == {*SMALL, "draft_vocabulary.safetensors"}


def test_a_branch_that_moves_after_the_start_changes_no_replica(hub: SmallHub, tmp_path: Path, monkeypatch):
    first = hub.commit(NAME, SMALL | {"model.safetensors": b"old"}, branch="stable")
    config = pinned(config_of(tmp_path, revision="stable"))
    assert config.targets["t"].revision == first
    travels = json.loads(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    hub.commit(NAME, SMALL | {"model.safetensors": b"new"}, branch="stable")
    use(monkeypatch, hub.url, tmp_path / "another node")
    replicas = fetched(pinned(Config.of(travels, Path.cwd())))
    assert (replicas.targets["t"].checkpoint / "model.safetensors").read_bytes() == b"old"
    assert replicas.targets["t"].checkpoint.is_relative_to(tmp_path / "another node")


def test_serves_file_contains_the_commit(hub: SmallHub, tmp_path: Path):
    commit = hub.commit(NAME, SMALL)
    fields = {"targets": {"t": {"checkpoint": NAME}}, "redis": {"url": "redis://r"}, "grpc": {"port": 1}}
    args = serve_config(pinned(Config.of(fields, tmp_path)))["applications"][0]["args"]
    assert args["targets"]["t"] == {"checkpoint": NAME, "revision": commit}


def test_a_second_start_downloads_nothing_and_a_warm_cache_needs_no_network(hub: SmallHub, tmp_path: Path, monkeypatch):
    hub.commit(NAME, SMALL | INDEX | SHARDS)
    first = fetched(pinned(config_of(tmp_path)))
    hub.requests.clear()
    assert fetched(pinned(config_of(tmp_path))) == first
    assert hub.asked_for() == set()
    hub.requests.clear()
    use(monkeypatch, hub.url, tmp_path / "cache", offline=True)
    assert fetched(pinned(config_of(tmp_path))) == first
    assert hub.requests == []


def test_an_interrupted_download_is_completed_by_the_next_start(hub: SmallHub, tmp_path: Path):
    """A router reads the facts while another process of its node downloads the weights."""
    model = {"config.json": b'{"model_type": "llama", "vocab_size": 8}'}
    model |= {"tokenizer.json": b'{"model": {"vocab": {"a": 0}}}'}
    hub.commit(NAME, model | INDEX | SHARDS)
    config = pinned(config_of(tmp_path))
    folder = fetched(config).targets["t"].checkpoint
    lost = folder / sorted(SHARDS)[1]
    lost.resolve().unlink()
    lost.unlink()
    hub.requests.clear()
    check_checkpoints(config)
    assert hub.asked_for() == set()
    fetched(config)
    assert hub.asked_for() == {lost.name} and lost.read_bytes() == SHARDS[lost.name]


def test_the_token_is_sent_and_without_it_the_error_of_a_gated_model_explains_what_to_do(
    hub: SmallHub, tmp_path: Path, monkeypatch
):
    hub.commit(NAME, SMALL | {"model.safetensors": b"w"}, gated=True)
    with pytest.raises(BadRequest, match=f"{NAME} is gated: accept its terms at .*{NAME}, and set HF_TOKEN") as refused:
        pinned(config_of(tmp_path))
    assert refused.value.field == "targets.t.checkpoint"
    use(monkeypatch, hub.url, tmp_path / "cache", token=TOKEN)
    fetched(pinned(config_of(tmp_path)))
    assert {token for _, path, token in hub.requests[1:] if NAME in path} == {TOKEN}


def test_a_checkpoint_found_neither_as_a_folder_nor_on_the_hub_is_refused_with_both_reasons(
    hub: SmallHub, tmp_path: Path
):
    message = f"there is no folder {NAME} here, and as a name on the hub {hub.url} it is not there, or is private"
    with pytest.raises(BadRequest, match=message) as refused:
        pinned(config_of(tmp_path))
    assert refused.value.field == "targets.t.checkpoint"


def test_an_unknown_revision_is_refused_by_its_field(hub: SmallHub, tmp_path: Path):
    hub.commit(NAME, SMALL)
    with pytest.raises(BadRequest, match="has no revision 'v9'") as refused:
        pinned(config_of(tmp_path, revision="v9"))
    assert refused.value.field == "targets.t.revision"


def test_an_offline_start_with_a_cold_cache_is_explained(hub: SmallHub, tmp_path: Path, monkeypatch):
    use(monkeypatch, hub.url, tmp_path / "cache", offline=True)
    with pytest.raises(BadRequest, match="not complete in the cache .*, and HF_HUB_OFFLINE is set"):
        pinned(config_of(tmp_path))


def test_a_hub_that_does_not_answer_is_explained(tmp_path: Path, monkeypatch):
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    with pytest.raises(BadRequest, match="there is no folder people/model here.*the hub does not answer"):
        pinned(config_of(tmp_path))


def test_a_model_without_readable_weights_is_refused_with_its_files(hub: SmallHub, tmp_path: Path):
    hub.commit(NAME, SMALL | UNWANTED)
    with pytest.raises(BadRequest, match=r"no weights in .*; what it has ends in \.onnx$") as refused:
        fetched(config_of(tmp_path))
    assert refused.value.field == "targets.t.checkpoint"


def test_a_model_with_gguf_files_alone_is_refused_with_the_name_of_one(hub: SmallHub, tmp_path: Path):
    hub.commit(NAME, SMALL | {"b.gguf": b"2", "a.gguf": b"1"})
    with pytest.raises(BadRequest, match=f"name one of its 2, such as {NAME}/a.gguf, {NAME}/b.gguf") as refused:
        fetched(config_of(tmp_path))
    assert refused.value.field == "targets.t.checkpoint"


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_errors_are_explained_with_httpx_and_with_httpx2(monkeypatch, library: str):
    """huggingface_hub 1 uses httpx, 2 uses httpx2; neither is our dependency."""
    assert errors.HTTPError.__module__.partition(".")[0] in ("httpx", "httpx2")
    monkeypatch.setitem(sys.modules, library, None)  # as if not installed
    message = "targets.t.checkpoint: the hub .* failed while people/model was fetched: cut"
    with pytest.raises(PeerLost, match=message), _explained("targets.t.checkpoint", Path(NAME), "main"):
        raise errors.HTTPError("cut")


def test_an_index_cannot_name_files_outside_its_folder(hub: SmallHub, tmp_path: Path):
    index = {"model.safetensors.index.json": b'{"weight_map": {"a": "../../escape.safetensors"}}'}
    hub.commit(NAME, SMALL | index)
    with pytest.raises(BadRequest, match="names files that are not in its folder"):
        fetched(config_of(tmp_path))


def test_an_existing_folder_takes_precedence_over_the_hub(hub: SmallHub, tmp_path: Path):
    hub.commit(NAME, SMALL)
    (tmp_path / NAME).mkdir(parents=True)
    config = pinned(config_of(tmp_path))
    assert config.targets["t"].checkpoint == tmp_path / NAME and hub.requests == []
    with pytest.raises(BadRequest, match=r"targets\.t\.revision: belongs to a name on the hub"):
        config_of(tmp_path, revision="main")


@pytest.mark.parametrize("text", ["model", "a/b/c", "/a/b", "~/a", "a/b.gguf", "../a/b.gguf", "/a/b/c.gguf"])
def test_a_checkpoint_without_exactly_one_slash_is_a_folder(tmp_path: Path, text: str):
    assert Config.of({"targets": {"t": {"checkpoint": text}}}, tmp_path).targets["t"].checkpoint.is_absolute()


def test_a_tokenizer_on_the_hub_is_pinned_and_fetched_without_its_model(hub: SmallHub, tmp_path: Path):
    hub.commit(NAME, {"config.json": b"{}", "pytorch_model.bin": b"p"})
    commit = hub.commit("people/words", SMALL | {"model.safetensors": b"w"})
    config = pinned(config_of(tmp_path, tokenizer="people/words"))
    assert config.targets["t"].tokenizer_revision == commit
    target = fetched(config).targets["t"]
    assert (target.tokenizer_folder / "tokenizer.json").read_bytes() == b"{}"
    assert "model.safetensors" not in hub.asked_for()


def test_a_worker_of_a_sharded_target_fetches_a_tokenizer_on_the_hub_for_a_checkpoint_in_a_folder(hub, tmp_path):
    commit = hub.commit("people/words", SMALL)
    (tmp_path / "model").mkdir()
    entry = {"checkpoint": "model", "tokenizer": "people/words", "tensor_parallel": 2}
    target = pinned(Config.of({"targets": {"t": entry}}, tmp_path)).targets["t"]
    assert target.on_hub
    checkpoint, tokenizer = Worker().fetch("t", target)
    assert (checkpoint, tokenizer.name) == (tmp_path / "model", commit)
    assert (tokenizer / "tokenizer.json").is_file()


@pytest.mark.slow
def test_a_pair_on_the_hub_is_served_with_the_usual_hf_environment_variables(tmp_path: Path):
    """In a separate process: `huggingface_hub` reads them when it is imported."""
    with small_hub() as hub:
        tiny_models.make_checkpoint(tmp_path / "made", "llama")
        hub.commit(NAME, tmp_path / "made", gated=True)
        (tmp_path / "c.yaml").write_text(
            f"targets: {{t: {{checkpoint: {NAME}, dtype: float32, max_length: 64, max_sessions: 1}}}}"
        )
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
        command = [sys.executable, "-m", "cluster.cli", "generate", "ab", "--local", "--json", "--max-new-tokens", "4"]
        command += ["--config", str(tmp_path / "c.yaml")]
        first = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert first.returncode == 0, first.stderr
        assert len(json.loads(first.stdout)["token_ids"]) == 4
        hub.requests.clear()
        offline = {**environment, "HF_HUB_OFFLINE": "1", "HF_TOKEN": ""}
        second = subprocess.run(command, env=offline, capture_output=True, text=True)
        assert json.loads(second.stdout)["token_ids"] == json.loads(first.stdout)["token_ids"]
        assert hub.requests == []
