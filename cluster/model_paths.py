"""A model's place in a configuration: a folder, a GGUF file, or the name of either on a hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dendro.arguments import shown
from dendro.errors import BadRequest
from pydantic import ValidationInfo

PACKAGE = "package:"
"""Prefix of the path of a file inside an installed Python package."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILE = re.compile(HUB_NAME.pattern + r"(/\w[\w.-]*)+")


def in_package(path: Path) -> bool:
    """True if a path has the form `package:NAME/path/of/a/file`."""
    return path.as_posix().startswith(PACKAGE)


def is_gguf(path: Path) -> bool:
    """True if a path names a GGUF file, in a package or not."""
    return path.suffix == ".gguf"


def hub_name(path: Path) -> str:
    """The name on the hub that a resolved path is, or of the repository that has its file; empty for a folder or file,
    whose resolved path is absolute, or in a package."""
    if path.is_absolute() or in_package(path):
        return ""
    return "/".join(path.parts[:2])


def hub_file(path: Path) -> str:
    """The GGUF file in its repository on the hub that a resolved path is; empty for any other."""
    return "/".join(path.parts[2:]) if hub_name(path) else ""


def kept_folder(value: Any, info: ValidationInfo) -> Any:
    """A model's place as a file has it, absolute where it begins with `./`, whose folder is the context: a Path drops
    that beginning, and would then be a name on the hub."""
    return info.context / value if info.context is not None and str(value).startswith("./") else value


def resolved_path(field: str, path: Path, folder: Path) -> Path:
    """An absolute folder or GGUF file, where a relative path starts at `folder`; or a name on the hub, with or without
    a file, or a file of a Python package, unchanged. Raises BadRequest naming the field, as `absolute_path` does."""
    if in_package(path):
        return path
    here = absolute_path(field, path, folder)
    named = HUB_FILE if is_gguf(path) else HUB_NAME
    there = here.is_file() if is_gguf(path) else here.is_dir()
    return path if named.fullmatch(path.as_posix()) and not there else here


def absolute_path(field: str, path: Path, folder: Path) -> Path:
    """A path that starts at `folder` where it is relative. Raises BadRequest naming the field for one that this system
    cannot have: its links form a circle, it is of an unknown user, is too long, or has a character that no name has."""
    try:
        found = (folder / path.expanduser()).resolve()
        found.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise BadRequest(field, f"{shown(str(path))} is no usable path: {error}") from None
    return found
