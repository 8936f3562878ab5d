"""The wheel: all our code and its data, without the demo's weights and the benches that measure these."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from dendro.errors import BadRequest
from typer.testing import CliRunner

from cluster import cli, slow_commands
from tests.test_names import SOURCE_ROOTS, modules

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
MOST_BYTES = 2_000_000
IN_THE_WHEEL = ("certify", "tune", "predict", "demo", "train demo", "train drafter", "bench speed", "bench load")
HELP = """
import sys
# without the finders of a checkout installed as editable, which would find in it what the wheel lacks
sys.meta_path = [each for each in sys.meta_path if "editable" not in getattr(each, "__module__", "")]
from cluster import cli
from typer.testing import CliRunner

assert cli.__file__.startswith(sys.argv[1]), cli.__file__
for command in sys.argv[2:]:
    done = CliRunner().invoke(cli.app, [*command.split(), "--help"])
    print(command, done.exit_code, done.exception, sep="|")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("cluster", "drafter_service", "verifier_service", "protos", "kernels"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


def is_laboratory(module: str) -> bool:
    return f"{module}.".startswith(f"{slow_commands.LABORATORY}.")


@pytest.mark.long  # 7 s
def test_the_wheel_has_every_module_but_the_laboratory_and_no_weights(wheel):
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not [name for name in names if name.endswith((".safetensors", "tokenizer.json"))]
    assert not [name for name in names if name.startswith("cluster/bench/")]
    found = {name: str(path.relative_to(ROOT / SOURCE_ROOTS[name.split(".")[0]])) for name, path in modules().items()}
    ours = {path for name, path in found.items() if not is_laboratory(name)}
    ours |= {"cluster/demo/held_out.json", "dendro/v1/generation.proto", "dendro/v1/generation_pb2_grpc.py"}
    ours |= {f"{name}/py.typed" for name in SOURCE_ROOTS}
    assert not ours - names


@pytest.mark.long  # 15 s
def test_a_package_of_the_wheel_has_what_users_measure_with_and_says_where_the_laboratory_is(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    laboratory = [f"bench {name}" for name in slow_commands.BUNDLED]
    command = [sys.executable, "-c", HELP, str(tmp_path), *IN_THE_WHEEL, *laboratory]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = {
        command: (status, error) for command, status, error in (line.split("|") for line in done.stdout.splitlines())
    }
    assert {command: found[command] for command in IN_THE_WHEEL} == dict.fromkeys(IN_THE_WHEEL, ("0", "None"))
    assert all("clone the repository" in found[command][1] for command in laboratory)


@pytest.mark.parametrize("option", [[], ["--help"]], ids=" ".join)
def test_a_bench_of_the_laboratory_says_without_it_how_to_get_it(option: list[str], monkeypatch):
    monkeypatch.setitem(sys.modules, slow_commands.LABORATORY, None)  # as if there was no such package
    done = CliRunner().invoke(cli.app, ["bench", "kernels", *option])
    assert isinstance(done.exception, BadRequest) and str(done.exception).startswith("bench kernels: ")
    assert "clone the repository, run `make setup` there, then `.venv/bin/dendro bench kernels`" in str(done.exception)


def test_help_names_the_benches_of_ones_own_pair_before_the_others():
    shown = CliRunner().invoke(cli.app, ["bench", "--help"]).stdout
    assert list(slow_commands.OWN) == ["speed", "load"]
    places = [shown.index(f" {name} ") for name in slow_commands.BENCHES]
    assert places == sorted(places)
