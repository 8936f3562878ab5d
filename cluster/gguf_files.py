"""Checkpoints in GGUF files: a folder of this machine's cache with the configuration, the tokenizer and the chat
template that transformers reads from the file, and a link to the file for its weights.

The folder is made once for a file; whatever reads checkpoints then reads it like any other. Weights are unpacked when
they are loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from contextlib import redirect_stderr, suppress
from importlib.metadata import version
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import Any

from tree_layers.checkpoint import CONFIG, GGUF
from tree_layers.errors import CheckpointError
from tree_layers.gguf_header import read_gguf_header

from cluster.model_paths import PACKAGE, in_package

LAYOUT = 2
"""Raised when the folders' contents change."""
KEY = "made_of.json"
"""What a folder was made of: the layout, the file, its size, its time of change, and the version of transformers."""


def file_of_package(text: str) -> Path:
    """The file of `package:NAME/path/in/it`. The package is found, not imported. Raises CheckpointError."""
    name, _, rest = text.removeprefix(PACKAGE).partition("/")
    if not name.isidentifier():
        raise CheckpointError(f"{text}: {name!r} is not the name of a Python package")
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        raise CheckpointError(f"{text}: there is no installed package {name}")
    inner = PurePosixPath(rest)
    if inner.is_absolute() or ".." in inner.parts or not inner.parts:
        raise CheckpointError(f"{text}: must name a file inside the package")
    for root in found.submodule_search_locations:
        file = Path(root).joinpath(*inner.parts).resolve()
        if file.is_file() and file.is_relative_to(Path(root).resolve()):
            return file
    raise CheckpointError(f"{text}: the package {name} has no such file")


def folder_of(path: Path) -> Path:
    """The folder of a GGUF file, which may be in a package; it is made where there is none yet, and those of the file's
    former contents are removed.

    Raises CheckpointError for a file that cannot be read.
    """
    file = (file_of_package(path.as_posix()) if in_package(path) else path).resolve()
    try:
        facts = file.stat()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    key = [LAYOUT, str(file), facts.st_size, facts.st_mtime_ns, version("transformers")]
    root = _cache()
    folder = root / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    if (folder / CONFIG).is_file():
        return folder
    read_gguf_header(file)  # bounds what transformers will do
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root))
    except OSError as error:
        raise CheckpointError(
            f"{root}, for what is read from {file}: {error.strerror or error}; XDG_CACHE_HOME sets another place"
        ) from error
    try:
        _write(file, made)
        (made / KEY).write_text(json.dumps(key))
        with suppress(OSError):  # another process has made the file
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    _remove_former(root, key)
    return folder


def _write(file: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    (folder / GGUF).symlink_to(file)
    try:
        with redirect_stderr(StringIO()):  # progress bars
            config = AutoConfig.from_pretrained(folder, gguf_file=GGUF, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF, local_files_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(f"{file}: transformers cannot read it: {type(error).__name__}: {error}"[:400]) from error
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)  # written last: a folder with a config is complete


def _remove_former(root: Path, key: list[Any]) -> None:
    """Remove the folders of files that are gone, and those that this version of transformers made of the same file's
    former contents."""
    for found in root.glob(f"*/{KEY}"):
        try:
            layout, file, *contents, by = json.loads(found.read_text())
        except (OSError, ValueError):  # another process removes the file
            continue
        if not Path(file).is_file() or ([layout, file, by] == [key[0], key[1], key[-1]] and contents != key[2:-1]):
            shutil.rmtree(found.parent, ignore_errors=True)


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "dendroaspis" / "gguf"
