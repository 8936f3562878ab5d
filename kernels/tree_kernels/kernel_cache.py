"""Kernels as machine code: compiled by numba once on a machine, then loaded from a file without numba.

Importing numba and reading its own cache costs each process about a second of processor time; loading machine code with
llvmlite, which numba builds on, a few hundredths. A kernel is called through ctypes, holds no interpreter lock while it
runs, and takes only int64 and float32 arguments; an address is an int64.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import stat
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from tree_kernels.processor import lanes, processor, why_not_vectors

if TYPE_CHECKING:
    from tree_kernels.machine_code import Code, Kernels

log = logging.getLogger("dendro.kernels")

FOLDER = "DENDRO_KERNEL_CACHE"
"""The environment variable with the folder for machine code. Without it: dendroaspis/kernels in the user's cache."""


class NoKernelsError(Exception):
    """Kernels cannot be compiled here; the message says why."""


_loading = threading.Lock()


def load_kernels(module: str, sources: tuple[str, ...] = ()) -> Kernels:
    """The kernels of a module. Raises NoKernelsError.

    module: has a table KERNELS of functions and their arguments; imported only if they must be compiled
    sources: the other modules whose functions are compiled into its kernels
    """
    with _loading:
        return _loaded(module, sources)


@cache
def _loaded(module: str, sources: tuple[str, ...]) -> Kernels:
    key = _key((module, *sources))
    from tree_kernels.machine_code import link

    folder = _folder()
    if folder is None:
        return link(_compiled(module))
    file = folder / f"{module}-{key}.zip"
    if (code := _read(file)) is None:
        with _locked(folder / f"{module}.lock"):
            if (code := _read(file)) is None:  # another process may have compiled them meanwhile
                code = _compiled(module)
                _write(file, code)
    return link(code)


def _key(modules: Sequence[str]) -> str:
    """A digest of everything that the machine code depends on."""
    try:
        versions = [version("numba"), version("llvmlite")]
    except PackageNotFoundError as error:
        raise NoKernelsError(f"{error.name} is not installed; the extra `cpu` has it") from error
    if reason := why_not_vectors():
        raise NoKernelsError(reason)
    digest = hashlib.sha256(json.dumps([*versions, *processor(), lanes()]).encode())
    for module in (__name__, "tree_kernels.compiling", "tree_kernels.machine_code", "tree_kernels.processor", *modules):
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin is not None, module
        digest.update(Path(found.origin).read_bytes())
    return digest.hexdigest()[:32]


def _folder() -> Path | None:
    """The folder for machine code; None where there is none that only this user can write to."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(FOLDER) or root / "dendroaspis" / "kernels")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        log.warning("kernels are compiled anew in every process: %s (%s sets another folder)", error, FOLDER)
        return None
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or not os.access(folder, os.W_OK):
        log.warning(
            "kernels are compiled anew in every process: others may write to %s, or this user may not (%s sets another "
            "folder)",
            folder,
            FOLDER,
        )
        return None
    return folder


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds a lock between processes; it ends with the process."""
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _compiled(module: str) -> Code:
    try:
        from tree_kernels.compiling import machine_code

        log.info("compiling the kernels of %s", module)
        return machine_code(module)
    except Exception as error:  # numba and LLVM raise many kinds; without kernels torch's operations are used
        raise NoKernelsError(f"numba cannot compile {module}: {type(error).__name__}: {error}") from error


def _write(file: Path, code: Code) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
        code.write(part)
    Path(part.name).replace(file)


def _read(file: Path) -> Code | None:
    """The file's code; None where there is no such file, or a damaged one."""
    from tree_kernels.machine_code import Code

    try:
        return Code.read(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        log.warning("%s is compiled again: %s", file, error)
        return None
