"""A model's place in a configuration: a folder, or its name on a hub."""

from __future__ import annotations

import re
from pathlib import Path

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def hub_name(path: Path) -> str:
    """The name on the hub that a resolved path is; empty for a folder, whose resolved path is absolute."""
    return "" if path.is_absolute() else path.as_posix()


def resolved_path(path: Path, folder: Path) -> Path:
    """An absolute folder, where a relative path starts at `folder`; or a name on the hub, unchanged."""
    here = (folder / path.expanduser()).resolve()
    return path if HUB_NAME.fullmatch(path.as_posix()) and not here.is_dir() else here
