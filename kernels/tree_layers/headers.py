"""Names and shapes of a checkpoint's tensors, read from the headers of its files. No weights are loaded.

Imports only the standard library: routers read checkpoints' facts without torch.
"""

from __future__ import annotations

import json
import pickle
import reprlib
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tree_layers.errors import CheckpointError
from tree_layers.gguf_header import read_gguf_header

MAX_HEADER_BYTES = 100_000_000
"""Most bytes of a header; a longer one is refused. safetensors has the same limit."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""The beginning of what Git LFS leaves in place of a file that it has not downloaded."""
LEGACY_PREAMBLE = 3
"""Objects before the tensors in the format of torch before 1.6: a magic number, a version, sizes of C types."""

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(files: Sequence[Path]) -> Shapes:
    """The shape of every tensor by its stored name. Raises CheckpointError for a file that cannot be read."""
    shapes: Shapes = {}
    for file in files:
        with _explained(file, "cannot be read"), file.open("rb") as stream:
            refuse_pointer(file, stream.read(len(LFS_POINTER)))
        if file.suffix == ".gguf":
            shapes |= read_gguf_header(file).shapes
        else:
            shapes |= _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    return shapes


def refuse_pointer(file: Path, content: bytes) -> None:
    """Raise CheckpointError for a file of Git LFS that was not downloaded. content: its first bytes or more"""
    if content.startswith(LFS_POINTER):
        raise CheckpointError(f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")


def _safetensors(file: Path) -> Shapes:
    with _explained(file, "cannot be read"), file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        _check_size(file, size)
        header = json.loads(stream.read(size))
        return {name: _shape(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _pickled(file: Path) -> Shapes:
    with _explained(file, "is not a file of plain weights"):
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                entry = next(e for e in archive.infolist() if e.filename.split("/")[-1] == "data.pkl")
                _check_size(file, entry.file_size)
                with archive.open(entry) as stream:
                    tensors = _ShapeUnpickler(stream).load()
        else:
            with file.open("rb") as stream:
                for _ in range(LEGACY_PREAMBLE):
                    _ShapeUnpickler(stream).load()
                tensors = _ShapeUnpickler(stream).load()
        return {str(name): shape for name, shape in tensors.items() if isinstance(shape, tuple)}


@contextmanager
def _explained(file: Path, fault: str) -> Iterator[None]:
    """Raise CheckpointError for any exception of a parser."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except Exception as error:
        raise CheckpointError(f"{file} {fault}: {error!r}") from error


def _check_size(file: Path, size: int) -> None:
    if not 0 < size <= MAX_HEADER_BYTES:
        raise CheckpointError(f"{file} cannot be read: its header has {size} bytes; at most {MAX_HEADER_BYTES}")


def _shape(sizes: Sequence[object]) -> tuple[int, ...]:
    found = tuple(size for size in sizes if type(size) is int and size >= 0)
    if len(found) != len(sizes):
        raise ValueError(f"a tensor has the shape {reprlib.repr(sizes)}")  # lists of a pickle may share others: no repr
    return found


class _Inert:
    """Replaces torch classes of a pickle that are not in `_REBUILDERS`. Takes any arguments and does nothing."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _shape_of(storage: object, offset: object, size: Sequence[int], *rest: object) -> tuple[int, ...]:
    return _shape(size)


def _parameter(data: Any, *rest: object) -> Any:
    return data


def _from_type(rebuild: Callable[..., Any], kind: object, args: Sequence[Any], state: object) -> Any:
    return rebuild(*args)


_REBUILDERS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor"): _shape_of,
    ("torch._utils", "_rebuild_tensor_v2"): _shape_of,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
}


class _ShapeUnpickler(pickle.Unpickler):
    """Loads shapes instead of tensors. Calls only `_REBUILDERS` of the functions that a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILDERS:
            return _REBUILDERS[module, name]
        if module.partition(".")[0] == "torch":
            return _Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: object) -> None:
        """Return a placeholder for a tensor's storage: the numbers are elsewhere in the file and are not read."""
