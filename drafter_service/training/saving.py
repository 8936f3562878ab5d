"""Files that are whole or absent, also after a kill and on a full disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dendro.errors import DendroError
from safetensors import SafetensorError

FULL_BYTES = 1 << 20
"""Free bytes below which a disk counts as full after a write has failed, since not every writer names the reason."""


class NotSaved(DendroError):
    """A file or folder of a training run cannot be written; what it was to replace is unchanged."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write a file or a folder to. It becomes `path` if the block ends normally.

    Raises NotSaved if writing fails, for example on a full disk. A kill leaves the old `path`; the next call removes
    the rest.
    """
    partial = path.with_name(f"{path.name}.partial")
    _remove(partial)
    try:
        yield partial
        if partial.is_dir():
            _remove(path)  # a folder cannot replace another folder
        os.replace(partial, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # the last two where torch and safetensors write
        full = shutil.disk_usage(path.parent).free < FULL_BYTES
        _remove(partial)
        kept = "the previous one is kept" if path.exists() else "nothing of it is kept"
        reason = "the disk is full" if full else getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise NotSaved(f"{path} cannot be written: {reason}; {kept}. Run the same command again to resume") from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
