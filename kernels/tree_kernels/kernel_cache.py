"""Kernels as machine code: compiled by numba once on a machine, then loaded from a file without numba.

Importing numba and reading its own cache costs each process about a second of processor time; loading machine code with
llvmlite, which numba builds on, a few hundredths. A kernel is called through ctypes, holds no interpreter lock while it
runs, and takes only int64 and float32 arguments; an address is an int64.
"""

from __future__ import annotations

import fcntl
import grp
import hashlib
import importlib.util
import io
import json
import logging
import os
import pwd
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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


DIGEST_BYTES = 32
KEPT_S = 30 * 24 * 3600.0


class NoKernelsError(Exception):
    """Kernels cannot be compiled here; the message says why."""


_loading = threading.Lock()


def _in_child() -> None:
    """Make a new lock in a forked process: a thread of the parent may have held the old one when it forked."""
    global _loading
    _loading = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def load_kernels(module: str) -> Kernels:
    """The kernels of a module. Raises NoKernelsError.

    module: has a table KERNELS of functions and their arguments; imported only if they must be compiled
    """
    with _loading:
        return _loaded(module)


@cache
def why_missing(*modules: str) -> str:
    """Reason why the kernels of these modules cannot be had here; empty if they can."""
    try:
        for module in modules:
            load_kernels(module)
    except NoKernelsError as error:
        return str(error)
    return ""


@cache
def _loaded(module: str) -> Kernels:
    key = _key(module)
    from tree_kernels.machine_code import link

    folder = _folder()
    if folder is None:
        return link(_compiled(module))
    file = folder / f"{module}-{key}.zip"
    if (code := _read(file)) is None:
        with _locked(folder / f"{module}.lock"):
            if (code := _read(file)) is None:  # another process may have compiled the kernels meanwhile
                code = _compiled(module)
                _write(file, module, code)
    return link(code)


def _key(module: str) -> str:
    """A digest of everything that the machine code depends on."""
    try:
        versions = [version("numba"), version("llvmlite")]
    except PackageNotFoundError as error:
        raise NoKernelsError(f"{error.name} is not installed; the extra `cpu` has it") from error
    if reason := why_not_vectors():
        raise NoKernelsError(reason)
    digest = hashlib.sha256(json.dumps([*versions, *processor(), lanes()]).encode())
    for source in sorted(_sources(module)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def kept(module: str) -> bool:
    """True if the cache's folder has a file of the module that is not older than its sources: mostly the one that
    `load_kernels` would load. Imports neither torch nor numba."""
    folder = _folder()
    if folder is None:
        return False
    newest = max(path.stat().st_mtime for path in _sources(module))
    return any(file.stat().st_mtime >= newest for file in folder.glob(f"{module}-*.zip"))


def _sources(module: str) -> set[Path]:
    """The files that a module's machine code depends on."""
    return sources_of(__name__, "tree_kernels.compiling", module)


def sources_of(*modules: str) -> set[Path]:
    """The files of these modules and of all modules of this package that they import, directly or not."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found or (path := _source(name)) is None:
            continue
        found[name] = path
        for package, names in _IMPORT.findall(path.read_text()):
            waiting += [package, *(f"{package}.{each.strip()}" for each in names.strip("()").split(","))]
    return set(found.values())


_IMPORT = re.compile(r"^ *from (tree_kernels[\w.]*) import ([\w, ]+|\([\w,\s]+\))", re.MULTILINE)


def _source(name: str) -> Path | None:
    """The file of a module; None for a package of ours, and for a name that is no module. Imports nothing: the modules
    of kernels import numba."""
    package, _, rest = name.partition(".")
    if package == __package__:
        file = Path(__file__).parent.joinpath(*rest.split(".")).with_suffix(".py")
        return file if rest and file.is_file() else None
    found = importlib.util.find_spec(name)
    return Path(found.origin) if found is not None and found.origin is not None else None


def _folder() -> Path | None:
    """The folder for machine code; None where there is none whose contents this user alone, or root, can change.

    Its path has no links: another user may own one of the given path, and could point it elsewhere after the check.
    """
    try:
        given = os.environ.get(FOLDER)
        root = os.environ.get("XDG_CACHE_HOME")
        folder = Path(given) if given else (Path(root) if root else Path.home() / ".cache") / "dendroaspis" / "kernels"
        for each in (*reversed(folder.parents), folder):
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)  # another process may make the folder, too
        place = folder.resolve()
        why = _why_not_safe(place)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        why = str(error)
    if why:
        log.warning("kernels are compiled anew in every process: %s (%s sets another folder)", why, FOLDER)
        return None
    return place


def _why_not_safe(place: Path) -> str:
    """Reason why machine code in this folder may be another user's; empty if it cannot be. A user who may rename the
    folder, or one above it, may put another in its place.

    place: without links
    """
    if place.stat().st_uid != os.geteuid() or not os.access(place, os.W_OK):
        return f"{place} is not this user's, or this user may not write to it"
    for each in (place, *place.parents):
        found = each.stat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to another user"
        sticky = each != place and found.st_mode & stat.S_ISVTX  # only the owner renames a folder in /tmp
        by_group = found.st_mode & stat.S_IWGRP and not _own_group(found.st_gid)
        if (by_group or found.st_mode & stat.S_IWOTH) and not sticky:
            return f"others may write to {each}"
    return ""


def _own_group(group: int) -> bool:
    """True if a group is root's, or has this user alone, as many systems make one for every user."""
    if group == 0:
        return True
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds a lock between processes, where the file system has locks; it ends with the process."""
    with ExitStack() as held:
        try:
            fcntl.flock(held.enter_context(file.open("w")), fcntl.LOCK_EX)
        except OSError as error:
            log.warning("several processes may compile the same kernels: %s", error)
        yield


def _compiled(module: str) -> Code:
    try:
        from tree_kernels.compiling import machine_code

        log.info("compiling the kernels of %s", module)
        return machine_code(module)
    except Exception as error:  # numba and LLVM raise many kinds; without kernels torch's operations are used
        raise NoKernelsError(f"numba cannot compile {module}: {type(error).__name__}: {error}") from error


def _write(file: Path, module: str, code: Code) -> None:
    """Keep the code for later processes, if the file system takes it, after its digest. Removes the module's files that
    no process has read or written for KEPT_S: earlier releases'."""
    content = io.BytesIO()
    code.write(content)
    data = content.getvalue()
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_bytes(hashlib.sha256(data).digest() + data)
        part.replace(file)
    except OSError as error:
        log.warning("compiled kernels are not kept: %s", error)
        part.unlink(missing_ok=True)
        return
    for other in file.parent.glob(f"{module}-*"):
        with suppress(OSError):  # another process may have removed the file
            if other.stat().st_mtime < file.stat().st_mtime - KEPT_S:
                other.unlink()


def _read(file: Path) -> Code | None:
    """The file's code; None where there is no such file, or a damaged one."""
    from tree_kernels.machine_code import Code

    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("compiled kernels cannot be read: %s", error)
        return None
    if hashlib.sha256(data[DIGEST_BYTES:]).digest() != data[:DIGEST_BYTES]:
        log.warning("%s is damaged; its kernels are compiled again", file)
        return None
    with suppress(OSError):
        os.utime(file)  # marks the file as in use
    return Code.read(io.BytesIO(data[DIGEST_BYTES:]))
