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
    assert extras == {"serve", "embedded", "dev"}
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
    assert sorted(FILES.values()) == sorted((ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize("target, extras", [("setup", "serve,embedded"), ("dev", "serve,embedded,dev")])
def test_the_makefile_installs_all_in_one_resolution_by_the_pins_of_its_python(target, extras, tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "--dry-run", target, f"PYTHON={sys.executable}"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    file = f"requirements/pins-{sys.version_info.major}.{sys.version_info.minor}.txt"
    assert re.findall(r"-m pip install (?:--[a-z-]+ )*?(--constraint .+|[^-].*)", printed) == [
        f"--constraint {file} \"$(grep '^torch==' {file})\" --editable '.[{extras}]'"
    ]
