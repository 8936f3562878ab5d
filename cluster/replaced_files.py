"""Text files that are replaced whole: a reader, a kill or a full disk finds the old text or the new one."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from pathlib import Path

from dendro.errors import BadRequest

NOT_REPLACED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors where a folder takes no new file, or where the file is a mount of its own, as in containers."""


def text_with_its_line_ends(path: Path) -> str:
    """A file's text, whose line ends are those of the file."""
    return path.read_bytes().decode()


def replace_text(field: str, path: Path, text: str, mode: int | None = None) -> None:
    """Write a file's text at once. The file that a link names is written, and the link stays. A device or pipe, and a
    file that can be written but not replaced, are written in place.

    mode: permissions, for a file that must be replaced; None: those of the file that is there
    Raises BadRequest naming `field` where the file cannot be written; on a full disk what was there is unchanged.
    """
    try:
        if mode is None and path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
        try:
            _replace(path, text, mode)
        except OSError as error:
            if mode is not None or error.errno not in NOT_REPLACED or not path.exists():
                raise
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadRequest(field, f"{path} cannot be written: {error.strerror}") from None


def _replace(path: Path, text: str, mode: int | None) -> None:
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if mode is None and path.exists():
            shutil.copymode(path, unfinished)
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
