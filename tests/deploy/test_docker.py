"""deploy/docker: one Dockerfile with two targets, and a compose file that starts the same cluster."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import ray
import yaml
from packaging.requirements import Requirement
from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S

from cluster import serve_config
from cluster.app import DRAIN_MARGIN_S
from cluster.config import Config
from tests.support.chart import ROOT, values_of

DOCKER = ROOT / "deploy" / "docker"
TEXT = (DOCKER / "Dockerfile").read_text()
GPU = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]


def compose():
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_hadolint_reports_nothing():
    linter = shutil.which("hadolint") or str(Path(sys.executable).parent / "hadolint")
    done = subprocess.run([linter, str(DOCKER / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_both_targets_have_our_ray_and_run_as_the_charts_user():
    assert f"ARG RAY_VERSION={ray.__version__}" in TEXT
    stages = re.split(r"^FROM ", TEXT, flags=re.M)[1:]
    assert [stage.split(" AS ")[1].split()[0] for stage in stages] == ["source", "cpu", "gpu"]
    for stage in stages[1:]:
        assert re.findall(r"^USER (.+)$", stage, flags=re.M)[-1] == str(
            values_of("values.yaml")["podSecurity"]["runAsUser"]
        )


def test_images_carry_no_weights_and_freshly_generated_code():
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*" and "cluster/demo/models" in ignored
    assert "python protos/generate.py" in TEXT


def test_images_install_the_pinned_versions_of_their_python():
    assert "requirements" in re.findall(r"^COPY .+ (.+)$", TEXT, flags=re.M)
    assert "!requirements" in (ROOT / ".dockerignore").read_text().split()
    commands = re.findall(r"pip install (.+?)(?:&&|\n[A-Z])", TEXT.replace("\\\n", ""), flags=re.S)
    assert len(commands) == 3
    for command in commands:
        assert re.search(r"--constraint (/home/ray/dendroaspis/)?requirements/pins\.txt ", command)
        assert not re.search(r"[<>=]=", command)
    copied = re.search(r'cp "(.+)" requirements/pins\.txt ', TEXT).group(1)
    own_python = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    command = ["bash", "-c", f'echo "{copied}"']
    file = subprocess.run(command, env=own_python, capture_output=True, text=True, check=True).stdout.strip()
    assert file == f"requirements/pins-{sys.version_info.major}.{sys.version_info.minor}.txt"
    digits = re.search(r"^ARG PYTHON=py(\d+)$", TEXT, flags=re.M).group(1)
    pinned = (ROOT / "requirements" / f"pins-{digits[0]}.{digits[1:]}.txt").read_text().split()
    triton, of_gpu = (next(line for line in lines if line.startswith("triton")) for lines in (pinned, GPU))
    assert Requirement(of_gpu).specifier.contains(triton.split("==")[1])


def test_both_images_can_send_traces_and_serve_structures():
    extras = [each.split(",") for each in re.findall(r"dendroaspis\[([\w,]+)\]", TEXT)]
    assert len(extras) == 2 and all({"serve", "structured", "trace"} <= set(each) for each in extras)


def test_the_compose_file_starts_a_redis_a_head_a_drafter_and_a_verifier():
    content = compose()
    assert set(content["services"]) == {"redis", "head", "drafter", "verifier"}
    config = Config.of(yaml.safe_load(content["configs"]["cluster"]["content"]), ROOT)
    assert set(serve_config.serve_config(config))
    offered = {}
    for name in ("head", "drafter", "verifier"):
        words = " ".join(content["services"][name]["command"])
        offered |= json.loads(re.search(r"--resources='?(\{[^}]*\})", words).group(1))
    required = [each.resources.custom for each in (*config.targets.values(), *config.drafters.values())]
    required.append(config.router.resources.custom)
    assert offered == {key: value for each in required for key, value in each.items()}
    for name in ("head", "drafter", "verifier"):
        environment = dict(content["services"][name]["environment"])
        environment.pop("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", None)
        assert environment.pop("RAY_AUTH_MODE") == "disabled" and environment == serve_config.ENVIRONMENT


def test_the_compose_files_routers_have_no_keys_and_are_reached_from_this_machine_alone():
    config = Config.of(yaml.safe_load(compose()["configs"]["cluster"]["content"]), ROOT)
    assert config.auth.open and compose()["services"]["head"]["ports"] == [
        "127.0.0.1:9000:9000",
        "127.0.0.1:8080:8080",
    ]


def test_the_compose_files_redis_evicts_the_keys_that_expire_first():
    command = compose()["services"]["redis"]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "volatile-ttl"


def test_containers_have_the_time_to_finish_the_longest_request():
    config = Config.of(yaml.safe_load(compose()["configs"]["cluster"]["content"]), ROOT)
    for name in ("head", "drafter", "verifier"):
        grace = compose()["services"][name]["stop_grace_period"]
        assert int(grace.removesuffix("s")) >= config.router.request_timeout_s + 60


def test_the_heads_ray_gets_its_containers_signals_and_the_configuration_is_deployed_until_it_is_taken(tmp_path):
    """The head's command, run here with programs that note their calls: Ray in the shell's own process, and Serve,
    which refuses twice."""
    notes = tmp_path / "notes"
    for name, text in {
        "ray": 'echo "ray $PPID $$ $*" >> $NOTES; while [ ! -e $NOTES.deployed ]; do sleep 0.05; done',
        "dendro": 'echo "dendro $*" >> $NOTES',
        "serve": 'echo "serve $*" >> $NOTES; [ $(grep -c ^serve $NOTES) -ge 3 ] && touch $NOTES.deployed',
        "sleep": "exec /bin/sleep 0.05",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = [each.replace("$$", "$") for each in compose()["services"]["head"]["command"]]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NOTES": str(notes)}
    shell = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    assert shell.wait(30) == 0
    lines = notes.read_text().splitlines()
    (ray_line,) = (each for each in lines if each.startswith("ray "))
    _, parent, own, *given = ray_line.split()
    assert (int(parent), int(own)) == (os.getpid(), shell.pid)
    assert given[:2] == ["start", "--head"] and given[-1] == "--block"
    assert lines.count("serve deploy /tmp/serve.yaml") == 3
    assert lines.index("dendro config /home/ray/cluster.yaml --output /tmp/serve.yaml") < lines.index(
        "serve deploy /tmp/serve.yaml"
    )


def test_nodes_drain_for_the_longest_request_and_the_head_for_its_router_alone():
    """Serve's controller never leaves the head, which therefore lasts as long as it may drain: Ray's default."""
    services = compose()["services"]
    config = Config.of(yaml.safe_load(compose()["configs"]["cluster"]["content"]), ROOT)
    for name in ("drafter", "verifier"):
        drain = services[name]["environment"]["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        assert config.router.request_timeout_s + DRAIN_MARGIN_S < int(drain) == 660 - 15
        assert services[name]["stop_grace_period"] == "660s"
    assert "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" not in services["head"]["environment"]
    assert config.router.drain_s < RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
