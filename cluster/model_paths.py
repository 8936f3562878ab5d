"""A model's place in a configuration: a folder, a GGUF file, or its name on a hub."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = "package:"
"""Before the path of a file inside an installed Python package."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def in_package(path: Path) -> bool:
    """Whether it is `package:NAME/path/of/a/file`."""
    return path.as_posix().startswith(PACKAGE)


def is_gguf(path: Path) -> bool:
    """Whether it is a GGUF file, of a package or not."""
    return path.suffix == ".gguf"


def hub_name(path: Path) -> str:
    """The name on the hub that a resolved path is; empty for a folder or file, whose resolved path is absolute, or in a
    package."""
    return "" if path.is_absolute() or in_package(path) else path.as_posix()


def resolved_path(path: Path, folder: Path) -> Path:
    """An absolute folder or GGUF file, where a relative path starts at `folder`; or a name on the hub, or a file of a
    Python package, unchanged."""
    if in_package(path) or is_gguf(path):
        return path if in_package(path) else (folder / path.expanduser()).resolve()
    here = (folder / path.expanduser()).resolve()
    return path if HUB_NAME.fullmatch(path.as_posix()) and not here.is_dir() else here
