"""Write pins-3.11.txt and pins-3.12.txt: one version of every package that `make dev` installs on Linux, x86-64.

A package keeps the version installed beside this Python, or else the one in its file, where that fits pyproject.toml
and the other packages. Otherwise the newest version that fits is taken. Not pinned: setuptools, and the CUDA packages
that torch's own build selects. A local version is left out: 2.13.0+cpu is pinned as 2.13.0.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12")
EXTRAS = ("serve", "cpu", "embedded", "structured", "dev")
NOT_PINNED = re.compile(r"(cuda|nvidia)-.+|setuptools")


def read(file: Path) -> dict[str, str]:
    """Versions by package name; none if the file does not exist."""
    return dict(line.split("==") for line in file.read_text().splitlines()) if file.exists() else {}


def write(file: Path, versions: dict[str, str]) -> None:
    file.write_text("".join(f"{name}=={version}\n" for name, version in sorted(versions.items())))


def installed() -> dict[str, str]:
    found = {re.sub(r"[-_.]+", "-", each.name).lower(): each.version.split("+")[0] for each in distributions()}
    return {name: version for name, version in found.items() if name not in ("dendroaspis", "pip")}


def resolve(uv: Path, python: str, preferred: dict[str, str], scratch: Path) -> dict[str, str]:
    """Versions that fit each other. uv reads the file it will write, and keeps that file's versions where they fit."""
    file = scratch / f"{python}.txt"
    write(file, preferred)
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--output-file", file]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    command += [word for extra in EXTRAS for word in ("--extra", extra)]
    subprocess.run([*command, HERE.parent / "pyproject.toml"], check=True, stdout=subprocess.DEVNULL)
    return read(file)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        subprocess.run([sys.executable, "-m", "venv", scratch / "venv"], check=True)
        subprocess.run([scratch / "venv/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
        for python in PYTHONS:
            file = HERE / f"pins-{python}.txt"
            versions = resolve(scratch / "venv/bin/uv", python, read(file) | installed(), scratch)
            write(file, {name: version for name, version in versions.items() if not NOT_PINNED.fullmatch(name)})
            print(f"{file.relative_to(HERE.parent)}: {len(read(file))} packages")


if __name__ == "__main__":
    main()
