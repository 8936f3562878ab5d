"""Folders of Ray and Redis, and the length of the paths of their unix sockets, checked before anything is started: Ray
and Redis find it late."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dendro.errors import BadRequest

MAX_SOCKET_BYTES = 107
"""The longest path of a unix socket on Linux."""
_RAY_SOCKET = "ray/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""Ray's longest, below its folder for temporary files."""


def check_socket(path: Path, variable: str, folder: Path) -> None:
    """Raise BadRequest, naming the environment's variable, where the path of a socket in its folder is too long."""
    excess = len(os.fsencode(path)) - MAX_SOCKET_BYTES
    if excess > 0:
        length = len(os.fsencode(folder))
        raise BadRequest(
            variable,
            f"has {length} bytes, with which the path of a socket has more than {MAX_SOCKET_BYTES}; set it to a folder "
            f"of at most {length - excess} bytes, such as /tmp",
        )


def check_ray_sockets() -> None:
    """Check the paths of the sockets of a Ray that this process starts (`check_socket`)."""
    variable, folder = _ray_parent()
    check_socket(folder / _RAY_SOCKET.format(pid=os.getpid()), variable, folder)


def ray_logs() -> Path:
    """The folder of logs of the last Ray that this process started; if it started none, of the last one started with
    the same environment."""
    folder = _ray_parent()[1] / "ray"
    own = sorted(folder.glob(f"session_*_{os.getpid()}"))  # the date and time precede the process id
    return (own[-1] if own else folder / "session_latest") / "logs"


def _ray_parent() -> tuple[str, Path]:
    """Folder in which Ray's folder `ray` is, and the environment's variable that sets it."""
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    return variable, Path(os.environ.get(variable, "") or tempfile.gettempdir())
