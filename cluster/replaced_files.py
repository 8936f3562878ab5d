"""Text files that are replaced whole: a reader, a kill or a full disk finds the old text or the new one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from dendro.errors import BadRequest

NEW_MODE = 0o644
"""Permissions of a file that was not there."""


def replace_text(field: str, path: Path, text: str, mode: int | None = None) -> None:
    """Write a file's text at once. The file that a link names is written, and the link stays.

    mode: permissions; None: those of the file that is there
    Raises BadRequest naming `field` where the file cannot be written; what was there is unchanged.
    """
    path, unfinished = path.resolve(), ""
    try:
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if mode is None and path.exists():
            shutil.copymode(path, unfinished)
        else:
            os.chmod(unfinished, NEW_MODE if mode is None else mode)
        os.replace(unfinished, path)
    except OSError as error:
        if unfinished:
            Path(unfinished).unlink(missing_ok=True)
        raise BadRequest(field, f"{path} cannot be written: {error.strerror}") from None
