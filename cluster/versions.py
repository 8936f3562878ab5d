"""What `dendro --version` prints."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

PACKAGES = ("torch", "transformers", "ray")


def print_version(wanted: bool) -> None:
    """Print the versions of the distribution, Python and PACKAGES, without importing them, and exit."""
    if not wanted:
        return
    found = {name: _version_of(name) for name in ("dendroaspis", *PACKAGES)}
    own, others = found.pop("dendroaspis"), ", ".join(f"{name} {version}" for name, version in found.items())
    print(f"dendroaspis {own} (Python {platform.python_version()}, {others})")
    raise typer.Exit


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
