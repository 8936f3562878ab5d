"""Names and shapes of a checkpoint's tensors, read from the heads of its files: no weights are loaded.

Standard library alone, as torch is not imported where facts of checkpoints are read.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tree_layers.errors import CheckpointError

MAX_HEAD_BYTES = 100_000_000
"""The longest head of a file that is read; safetensors has the same limit."""
LEGACY_PREAMBLE = 3
"""Objects before the tensors in torch's format from before 1.6: a magic number, a version, sizes of C types."""

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(files: Sequence[Path]) -> Shapes:
    """The shape of every tensor by its name, as stored. Raises CheckpointError for a file that cannot be read."""
    shapes: Shapes = {}
    for file in files:
        shapes |= _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    return shapes


def _safetensors(file: Path) -> Shapes:
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if not 0 < size <= MAX_HEAD_BYTES:
                raise CheckpointError(f"{file} cannot be read: its head has {size} bytes")
            head = json.loads(stream.read(size))
        return {name: tuple(map(int, entry["shape"])) for name, entry in head.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error


def _pickled(file: Path) -> Shapes:
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                entry = next(e for e in archive.infolist() if e.filename.split("/")[-1] == "data.pkl")
                if entry.file_size > MAX_HEAD_BYTES:
                    raise CheckpointError(f"{file} cannot be read: its head has {entry.file_size} bytes")
                with archive.open(entry) as stream:
                    tensors = _ShapeUnpickler(stream).load()
        else:
            with file.open("rb") as stream:
                for _ in range(LEGACY_PREAMBLE):
                    _ShapeUnpickler(stream).load()
                tensors = _ShapeUnpickler(stream).load()
        return {str(name): shape for name, shape in tensors.items() if isinstance(shape, tuple)}
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except Exception as error:  # the unpickler raises whatever a broken file leads to
        raise CheckpointError(f"{file} is not a file of plain weights: {error!r}") from error


class _Inert:
    """Stands for whatever torch class a pickle names. Takes anything and does nothing."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _shape_of(storage: object, offset: object, size: Sequence[int], *rest: object) -> tuple[int, ...]:
    return tuple(map(int, size))


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
    """Makes a shape of every tensor. Nothing that a pickle names is imported or called but what is listed above."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILDERS:
            return _REBUILDERS[module, name]
        if module.partition(".")[0] == "torch":
            return _Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: object) -> None:
        """A storage, whose numbers are elsewhere in the file."""
