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

from tree_layers.checkpoint import CONFIG, GGUF
from tree_layers.errors import CheckpointError

from cluster.model_paths import PACKAGE, in_package

MAGIC = b"GGUF"
LAYOUT = 1
"""Raised when the folders' contents change."""


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
    """The folder of a GGUF file, which may be in a package; it is made where there is none yet.

    Raises CheckpointError for a file that cannot be read.
    """
    file = file_of_package(path.as_posix()) if in_package(path) else path
    try:
        facts = file.stat()
        with file.open("rb") as stream:
            magic = stream.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from error
    if magic != MAGIC:
        raise CheckpointError(f"{file} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    key = [LAYOUT, str(file.resolve()), facts.st_size, facts.st_mtime_ns, version("transformers")]
    root = _cache()
    folder = root / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    if (folder / CONFIG).is_file():
        return folder
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root))
    try:
        _write(file.resolve(), made)
        with suppress(OSError):  # another process has made it
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _write(file: Path, folder: Path) -> None:
    try:
        importlib.import_module("gguf")
    except ImportError:
        raise CheckpointError(
            f"{file}: reading GGUF files needs the package gguf: pip install 'dendroaspis[serve]'"
        ) from None
    from transformers import AutoConfig, AutoTokenizer

    (folder / GGUF).symlink_to(file)
    try:
        with redirect_stderr(StringIO()):  # progress bars
            config = AutoConfig.from_pretrained(folder, gguf_file=GGUF, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF, local_files_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(f"{file}: transformers cannot read it: {type(error).__name__}: {error}"[:400]) from error
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)  # last: a folder with it is complete


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "dendroaspis" / "gguf"
