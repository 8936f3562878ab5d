"""The reports of `dendro check` and `dendro --version`."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cluster import cli
from cluster.checking import _size
from cluster.drafter_figures import figures_of, write_figures
from cluster.redis_server import RedisServer
from tests.support import tiny_drafters, tiny_models
from verifier_service.engine import VerifierEngine
from verifier_service.options import VerifierOptions


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target, a drafter of the same tokenizer, and one of another tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.make_checkpoint(folder / "target", "llama")
    tiny_models.make_checkpoint(folder / "drafter", "llama", seed=1, num_hidden_layers=1)
    tiny_drafters.make_drafter(folder / "other", "mamba2")
    return folder


def fields(models: Path, drafter: str = "drafter", **target: object) -> dict:
    own = {"checkpoint": str(models / "target"), "dtype": "float32", "max_length": 256, "max_sessions": 2, **target}
    drafters = {"d": {"checkpoint": str(models / drafter), "dtype": "float32", "max_sessions": 2}}
    return {"targets": {"t": own}, "drafters": drafters, "speculation": {"arms": ["off", "(1,1)", "(3,2,2,1,1)"]}}


def run(tmp_path: Path, config: dict, *options: str, **environment: str):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    words = ["check", str(tmp_path / "c.yaml"), "--json", str(tmp_path / "r.json"), *options]
    done = CliRunner().invoke(cli.app, words, env=environment)
    report = json.loads((tmp_path / "r.json").read_text()) if (tmp_path / "r.json").exists() else None
    return done, report


def test_a_drafters_worth_is_timed_where_models_are_loaded_and_else_from_its_checkpoint_alone(models, tmp_path):
    config = fields(models)
    done, report = run(tmp_path, config)
    assert re.search(r"has no figures of its guesses; a round of \(.*\) needs \d", report["pairs"][0]["worth"])
    copied = tmp_path / "copied"
    shutil.copytree(models / "drafter", copied)
    write_figures(copied, figures_of("t", {0.0: [[0, 0, 5] * 50], 1.0: [[0, 5, 5] * 50]}))
    config["drafters"]["d"]["checkpoint"] = str(copied)
    done, report = run(tmp_path, config)
    assert done.exit_code == 0 and re.search(r"which needs \d+\.\d\d here", report["pairs"][0]["worth"])
    assert "worth of d for t: for t, temperature 0:" in done.stdout
    done, report = run(tmp_path, config, "--no-load")
    assert report["pairs"][0]["worth"].endswith("by its checkpoint alone: nothing was timed")
    (copied / "acceptance.json").write_text("{")
    done, report = run(tmp_path, config, "--no-load")
    assert done.exit_code == 0, "it can be served"
    assert report["pairs"][0]["worth"].startswith("the figures of its guesses cannot be read: acceptance.json")


def test_a_fitting_pair_is_loaded_and_the_reported_memory_is_that_of_the_engines(models, tmp_path):
    done, report = run(tmp_path, fields(models))
    assert done.exit_code == 0 and report["can_be_served"], done.output
    (target,), (drafter,) = report["targets"], report["drafters"]
    assert "loading targets.t, 1 of 2 ..." in done.stderr and "loading drafters.d, 2 of 2 ..." in done.stderr
    stored = load_file(models / "target" / "model.safetensors")
    assert target["weights"] == sum(tensor.nbytes for tensor in stored.values())  # stored in float32
    engine = VerifierEngine.load(
        models / "target", VerifierOptions(name="t", dtype=torch.float32, max_length=256, max_sessions=2)
    )
    assert target["memory"]["pages"] == sum(store.nbytes for store in engine.runner.pages.stores) > 0
    assert target["memory"]["states"] == 0
    assert target["exactness"] == engine._hello.exactness
    assert target["kernels"] == engine.kernels != ""
    assert drafter["kernels"] == "eager: there is no fused form of a llama drafter"
    assert f"kernels of d: {drafter['kernels']}" in done.stdout
    per_token = 2 * 2 * 16 * 4  # of one layer: keys and values of two heads of 16 numbers of 4 bytes
    assert drafter["memory"]["states"] > 2 * 2 * 256 * per_token
    assert report["pairs"][0]["fits"] and "can be served" in done.stdout


def test_a_redis_that_is_reached_is_reported_with_what_it_would_evict(models, tmp_path):
    with RedisServer(memory_mb=16) as server:
        done, report = run(tmp_path, fields(models) | {"redis": {"url": server.url}}, "--no-load")
        assert done.exit_code == 0 and "redis: can be reached" in done.stdout and not report["warnings"]
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory-policy", "volatile-lru")
        done, report = run(tmp_path, fields(models) | {"redis": {"url": server.url}}, "--no-load")
        assert done.exit_code == 0 and "volatile-lru" in report["warnings"][0] and "warning: redis: " in done.stdout


@pytest.mark.parametrize(
    ("url", "password", "reason"),
    [("unix:///nowhere/redis.sock", "", "ConnectionError: .*nowhere"), ("", "wrong", "WRONGPASS")],
    ids=["not there", "wrong password"],
)
def test_a_redis_that_cannot_be_reached_is_a_problem_with_its_reason(models, tmp_path, url, password, reason):
    with RedisServer(memory_mb=16) as server:
        section = {"url": url or server.url}
        if password:
            with redis.Redis.from_url(server.url) as client:
                client.config_set("requirepass", "right")
            section["password_variable"] = "WORD"
        done, report = run(tmp_path, fields(models) | {"redis": section}, "--no-load", WORD=password)
    assert done.exit_code == 2 and report["redis"] == "cannot be reached from here"
    assert re.search(f"redis.url: cannot be reached from here: {reason}", report["problems"][0])


def test_without_an_address_the_embedded_redis_is_reported(models, tmp_path):
    done, _ = run(tmp_path, fields(models), "--no-load")
    assert "redis: embedded" in done.stdout


def test_arms_with_more_than_max_rows_are_named_with_the_limit(models, tmp_path):
    done, report = run(tmp_path, fields(models, max_rows=8), "--no-load")
    (target,) = report["targets"]
    assert target["arms"] == ["off", "(1,1)"] and list(target["left_out"]) == ["(3,2,2,1,1)"]
    assert "max_rows is 8" in target["left_out"]["(3,2,2,1,1)"] and "left out: (3,2,2,1,1)" in done.stdout


def test_a_targets_own_arms_are_listed_in_place_of_the_clusters(models, tmp_path):
    _, report = run(tmp_path, fields(models, arms=["off", "(2,1)"]), "--no-load")
    assert report["targets"][0]["arms"] == ["off", "(2,1)"] and report["targets"][0]["left_out"] == {}


@pytest.mark.parametrize("terminal", ["", "1"], ids=["a pipe", "a terminal"])
def test_no_cell_is_cut_at_80_columns(models, tmp_path, terminal: str):
    config = fields(models, "other")
    names = "a-target-with-a-name-longer-than-any-column", "a-drafter-with-a-name-longer-than-any-column"
    for section, name in zip(("targets", "drafters"), names, strict=True):
        config[section] = {name: next(iter(config[section].values()))}
    config["drafters"][names[1]]["bridge"] = "none"
    done, report = run(tmp_path, config, "--no-load", COLUMNS="80", FORCE_COLOR=terminal, NO_COLOR="1", TERM="xterm")
    shown, (pair,) = table_columns(done.stdout), report["pairs"]
    assert "…" not in done.stdout and not pair["fits"]
    assert {*names, pair["why"].replace(" ", "")} <= shown
    assert f"targets.{names[0]}drafters.{names[1]}" in shown, "the first column of the table of models"
    weights = (_size(report[section][0]["weights"]) for section in ("targets", "drafters"))
    assert "".join(f"weights{size}" for size in weights).replace(" ", "") in shown
    if terminal:
        assert max(len(line) for line in plain(done.stdout).splitlines() if "│" in line) <= 80


def plain(output: str) -> str:
    """Without the codes of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", output)


def table_columns(output: str) -> set[str]:
    """The columns of printed tables from border to border, without spaces and line breaks."""
    found, parts = set(), list[str]()
    for line in plain(output).splitlines():
        if line.startswith("│"):
            cells = [cell.replace(" ", "") for cell in line.strip("│").split("│")]
            parts = [before + cell for before, cell in zip(parts or [""] * len(cells), cells, strict=True)]
        else:
            found |= set(parts)
            parts = []
    return found


def test_no_load_counts_the_weights_and_loads_no_model(models, tmp_path):
    done, report = run(tmp_path, fields(models, dtype="bfloat16"), "--no-load")
    assert done.exit_code == 0 and "loading" not in done.stderr
    (target,) = report["targets"]
    stored = load_file(models / "target" / "model.safetensors")
    assert target["weights"] == 2 * sum(tensor.numel() for tensor in stored.values())
    assert target["memory"] is None and target["exactness"] == ""


def test_a_drafter_that_does_not_fit_is_reported_with_its_reason_and_status_2(models, tmp_path):
    done, report = run(tmp_path, fields(models, "other"), "--no-load")
    assert done.exit_code == 2 and not report["can_be_served"]
    assert not report["pairs"][0]["fits"]
    assert report["problems"][0].startswith("drafters.d.checkpoint: does not fit target t: ")


def test_a_drafter_whose_logits_are_not_finite_is_a_problem_and_status_2(models, tmp_path):
    shutil.copytree(models / "drafter", tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    broken = {name: torch.full_like(each, torch.nan) for name, each in weights.items()}
    save_file(broken, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    done, report = run(tmp_path, fields(models, str(tmp_path / "broken")))
    assert done.exit_code == 2 and not report["can_be_served"]
    (problem,) = report["problems"]
    assert problem.startswith("drafters.d.checkpoint: the model's logits are not finite")


def test_all_problems_are_reported(models, tmp_path):
    shutil.copytree(models / "target", tmp_path / "encoder")
    config = json.loads((tmp_path / "encoder" / "config.json").read_text()) | {"is_encoder_decoder": True}
    (tmp_path / "encoder" / "config.json").write_text(json.dumps(config))
    wrong = fields(models, "other", checkpoint=str(tmp_path / "encoder"), max_length=9999)
    done, report = run(tmp_path, wrong)
    assert done.exit_code == 2
    starts = ["targets.t.max_length: 9999", "drafters.d.checkpoint: does not fit", "targets.t.checkpoint: "]
    for problem, start in zip(report["problems"], starts, strict=True):
        assert problem.startswith(start)


def test_a_problem_found_in_facts_and_again_in_loading_is_reported_once(models, tmp_path):
    done, report = run(tmp_path, fields(models, max_length=9999))
    assert done.exit_code == 2
    assert [problem.split(";")[0] for problem in report["problems"]] == ["targets.t.max_length: 9999"]


@pytest.mark.parametrize(
    ("resources", "reason"),
    [
        ({"gpu": 1}, "targets.t.resources.gpu: 1 in all, and Ray on this machine has 0 left of 0; "),
        ({"custom": {"verifier": 1}}, "targets.t.resources.custom.verifier: 1 in all, "),
        ({"custom": {"accelerator_type:H100": 0.001}}, ""),
    ],
)
def test_resources_that_this_machine_lacks_are_a_problem_except_with_ray(
    models, tmp_path, monkeypatch, resources, reason
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = fields(models, resources=resources)
    done, report = run(tmp_path, config, "--no-load")
    assert [each.startswith(reason) for each in report["problems"]] == [True] * bool(reason), report["problems"]
    assert run(tmp_path, config, "--no-load", "--ray", "auto")[0].exit_code == 0


def test_a_port_that_is_taken_is_a_warning_except_with_ray(models, tmp_path):
    """The cluster whose new configuration is checked may be running."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = fields(models) | {"http": {"port": port}}
        done, report = run(tmp_path, config, "--no-load")
        taken = f"http.port: routers cannot listen at 127.0.0.1:{port}: "
        assert done.exit_code == 0 and [each.startswith(taken) for each in report["warnings"]].count(True) == 1
        _, report = run(tmp_path, config, "--no-load", "--ray", "auto")
        assert not any(each.startswith(taken) for each in report["warnings"])


def test_missing_weights_are_reported_with_no_load(models, tmp_path):
    shutil.copytree(models / "target", tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").unlink()
    done, report = run(tmp_path, fields(models, checkpoint=str(tmp_path / "empty")), "--no-load")
    assert done.exit_code == 2 and not report["can_be_served"]
    (problem,) = report["problems"]
    assert problem.startswith("targets.t.checkpoint: ") and "no weights" in problem


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "cannot be read: .*No such file"), ("{% if %}", "is no template of Jinja: line 1: ")],
    ids=["missing", "no template"],
)
def test_a_chat_template_that_a_router_would_refuse_is_a_problem_with_its_field(models, tmp_path, text, reason):
    if text is not None:
        (tmp_path / "chat.jinja").write_text(text)
    done, report = run(tmp_path, fields(models, chat_template="chat.jinja"), "--no-load")
    assert done.exit_code == 2
    (problem,) = report["problems"]
    assert re.match(rf"targets\.t\.chat_template: {tmp_path}/chat\.jinja {reason}", problem)


def test_a_tokenizer_that_a_router_cannot_load_is_a_problem_with_its_field(models, tmp_path):
    shutil.copytree(models / "target", tmp_path / "broken")
    tokenizer = json.loads((tmp_path / "broken" / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {"type": "Unknown"}
    (tmp_path / "broken" / "tokenizer.json").write_text(json.dumps(tokenizer))
    done, report = run(tmp_path, fields(models, checkpoint=str(tmp_path / "broken")), "--no-load")
    assert done.exit_code == 2
    assert any("targets.t.checkpoint: " in each and "tokenizer cannot be loaded" in each for each in report["problems"])


def test_a_tokenizer_that_loads_with_more_tokens_than_its_files_name_is_a_problem_with_its_field(models, tmp_path):
    """transformers' class of GPT-2 adds the tokens that it names itself."""
    shutil.copytree(models / "target", tmp_path / "more")
    (tmp_path / "more" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    done, report = run(tmp_path, fields(models, checkpoint=str(tmp_path / "more")), "--no-load")
    assert done.exit_code == 2
    (problem,) = report["problems"]
    assert re.match(
        r"targets\.t\.checkpoint: .*/more: its tokenizer, .* has 258 token ids; its files name 257", problem
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"repetition_penalty": 1.8}, "repetition_penalty of generation_config.json is"),
        (
            {"min_length": 3, "suppress_tokens": [4], "forced_bos_token_id": 0, "no_repeat_ngram_size": 0},
            "suppress_tokens, min_length, forced_bos_token_id of generation_config.json are",
        ),
        ({"repetition_penalty": 1, "bad_words_ids": None, "sequence_bias": {}, "temperature": 0.6}, ""),
    ],
    ids=str,
)
def test_generation_fields_that_change_greedy_answers_are_warned_of(models, tmp_path, given, named):
    shutil.copytree(models / "target", tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps({"eos_token_id": 256} | given))
    done, report = run(tmp_path, fields(models, checkpoint=str(tmp_path / "own")), "--no-load")
    warning = f"targets.t.checkpoint: {named} not applied; requests give their own parameters"
    assert done.exit_code == 0 and report["warnings"] == ([warning] if named else [])


def test_an_end_token_outside_the_vocabulary_is_warned_of(models, tmp_path):
    shutil.copytree(models / "target", tmp_path / "past")
    (tmp_path / "past" / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 900]}))
    done, report = run(tmp_path, fields(models, checkpoint=str(tmp_path / "past")), "--no-load")
    assert done.exit_code == 0
    assert report["warnings"] == ["targets.t.checkpoint: no answer ends with the ids [900]: the vocabulary has 257"]


@pytest.mark.parametrize("options", [("--no-load",), ()], ids=["no load", "load"])
def test_a_missing_head_is_one_problem_with_its_field_also_without_loading(models, tmp_path, options):
    config = fields(models)
    config["drafters"]["d"]["head"] = "nowhere.safetensors"
    done, report = run(tmp_path, config, *options)
    missing = tmp_path / "nowhere.safetensors"
    assert done.exit_code == 2
    assert report["problems"] == [f"drafters.d.head: there is no file {missing}; `dendro train head` makes one"]


def test_a_report_is_written_into_a_new_folder_and_a_full_disk_is_refused_by_the_option(models, tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(fields(models)))
    words, report = ["check", str(tmp_path / "c.yaml"), "--no-load", "--json"], tmp_path / "new" / "r.json"
    assert CliRunner().invoke(cli.app, [*words, str(report)]).exit_code == 0
    assert json.loads(report.read_text())["can_be_served"]
    done = CliRunner().invoke(cli.app, [*words, "/dev/full"])
    assert str(done.exception) == "--json: /dev/full cannot be written: No space left on device"


def test_a_missing_file_ends_with_status_2_and_its_field(models, tmp_path):
    wrong = fields(models, checkpoint=str(tmp_path / "nowhere"))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(wrong))
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "check", str(tmp_path / "c.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "targets.t.checkpoint: " in done.stderr


def test_a_missing_configuration_is_refused_before_torch_is_imported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cluster.checking", None)  # imports torch; its import fails now
    done = CliRunner().invoke(cli.app, ["check", str(tmp_path / "no.yaml")])
    assert str(done.exception) == f"config: there is no file {tmp_path / 'no.yaml'}"


def test_version_lists_the_numeric_libraries_without_importing_them():
    code = "import sys; from cluster import cli; cli.app(['--version'], standalone_mode=False); "
    code += "assert not {'torch', 'transformers', 'ray', 'scipy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dendroaspis ")
    for part in (f"Python {sys.version_info.major}.{sys.version_info.minor}", f"torch {torch.__version__}", "ray 2."):
        assert part in done.stdout
