"""The header of a GGUF file: names, shapes, types and places of its tensors. No weights are loaded, and no texts but
the name of the architecture.

The libraries that read GGUF files trust their counts and lengths: a file of a hundred bytes can keep one busy for ever.
So a header is read here first, and refused beyond the bounds below; work and memory are in proportion to its bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tree_layers.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 4096
MAX_TENSORS = 65_536
MAX_HEADER_BYTES = 100_000_000
MAX_ELEMENTS = 2_000_000
"""Most elements of all arrays together. A vocabulary of 262,144 tokens has 1.3 million: tokens, scores, types and
merges."""
MAX_DIVIDED_BYTES = 4_000_000_000
"""Most bytes of all ways together to divide the texts of arrays in two: where a vocabulary has no merges, transformers
tries each way of each token. A text of n bytes counts n * n."""
MAX_DIMENSIONS = 4
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by GGUF's number of its type."""
_WHOLE = {0, 2, 4, 10}
"""GGUF's numbers of the unsigned integer types."""
_STRING, _ARRAY = 8, 9
_ARCHITECTURE, _COUNT = "general.architecture", ".block_count"
_LAYERS = (_COUNT, ".nextn_predict_layers")
"""Ends of the keys with numbers of layers. transformers makes lists of this length before it looks at the tensors."""
_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
"""The library's names of the matrices with a row for each token."""


class StoredTensor(NamedTuple):
    """Where a file has a tensor."""

    type_name: str  # the type of its blocks, such as Q4_1
    shape: tuple[int, ...]
    begin: int  # the place of its first byte in the file
    length: int  # bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Facts of a header about the weights. Every tensor lies within the file; together they are no larger than it."""

    architecture: str  # the file's word; empty where it has none
    layers: int
    tensors: dict[str, StoredTensor]  # key: the file's name of the tensor

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors' shapes: embedding and head by the library's names, others by the file's."""
        return {_NAMES.get(name, name): each.shape for name, each in self.tensors.items()}

    @property
    def stored(self) -> Mapping[str, int]:
        """Number of tensors of each type."""
        return dict(Counter(each.type_name for each in self.tensors.values()))


def read_gguf_header(file: Path) -> GgufHeader:
    """Read a file's header. Raises CheckpointError for a damaged file, one that exceeds the bounds, one of several that
    a model was split into, and where the package gguf is missing."""
    try:
        with file.open("rb") as stream:
            return _Reader(file, stream).header()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from error


class _Reader:
    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._size = file.stat().st_size
        self._limit = min(self._size, MAX_HEADER_BYTES)
        self._elements = self._divided = 0
        self._architecture = ""

    def header(self) -> GgufHeader:
        if self._stream.read(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{self._file} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        version = self._number(4)
        if version not in VERSIONS:
            raise self._refused(f"its version is {version}; those that are read: {', '.join(map(str, VERSIONS))}")
        tensors = self._count(8, MAX_TENSORS, "tensors")
        keys = self._count(8, MAX_KEYS, "keys")
        numbers: dict[str, int | None] = {}
        for _ in range(keys):
            key, number = self._entry()
            if key in numbers:
                raise self._refused(f"it has two keys {key}")
            numbers[key] = number
        if (parts := numbers.get("split.count") or 1) > 1:
            raise self._refused(
                f"it is one of {parts} files that a model was split into; join them, with llama.cpp's "
                "`llama-gguf-split --merge`, and name the joined file"
            )
        for key, number in numbers.items():
            if key.endswith(_LAYERS) and (number is None or number > tensors):
                found = "no unsigned whole number" if number is None else number
                raise self._refused(f"{key} is {found}, and it has {tensors} tensors")
        layers = numbers.get(self._architecture + _COUNT) or 0
        return GgufHeader(self._architecture, layers, self._tensors(tensors, numbers.get("general.alignment") or 32))

    def _tensors(self, count: int, alignment: int) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        sizes = _sizes_by_type(self._file)
        in_all = end = 0
        for _ in range(count):
            name = self._text()
            dimensions = self._count(4, MAX_DIMENSIONS, f"dimensions of {name}")
            shape = tuple(self._number(8) for _ in range(dimensions))[::-1]
            kind, offset = self._number(4), self._number(8)
            if kind not in sizes:
                raise self._refused(f"{name} is of type {kind}, which this version of the package gguf does not know")
            type_name, block, block_bytes = sizes[kind]
            numbers = math.prod(shape)
            if not shape or shape[-1] % block:
                raise self._refused(f"{name} is of type {type_name} and has the shape {list(shape)}")
            if name in found:
                raise self._refused(f"it has two tensors {name}")
            length = numbers // block * block_bytes
            in_all, end = in_all + length, max(end, offset + length)
            found[name] = StoredTensor(type_name, shape, offset, length)
        if not 1 <= alignment <= MAX_HEADER_BYTES:
            raise self._refused(f"general.alignment is {alignment}")
        first = math.ceil(self._stream.tell() / alignment) * alignment
        needed = first + max(in_all, end)
        if needed > self._size:
            raise self._refused(f"it has {self._size} bytes, and its tensors need {needed}: is it complete?")
        return {name: each._replace(begin=first + each.begin) for name, each in found.items()}

    def _entry(self) -> tuple[str, int | None]:
        """A key and its value; None for one that is not a whole number."""
        key = self._text()
        kind = self._number(4)
        if kind in _WHOLE:
            return key, self._number(_SCALARS[kind])
        if kind == _STRING and key == _ARCHITECTURE:
            self._architecture = self._text()
            return key, None
        if kind == _STRING:
            self._skip_text()
            return key, None
        if kind != _ARRAY:
            self._skip_values(key, kind, 1)
            return key, None
        inner = self._number(4)
        count = self._number(8)
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise self._refused(f"its arrays have more than {MAX_ELEMENTS} elements, with those of {key}")
        self._skip_values(key, inner, count)
        return key, None

    def _skip_values(self, key: str, kind: int, count: int) -> None:
        if kind == _STRING:
            for _ in range(count):
                self._divided += self._skip_text() ** 2
                if self._divided > MAX_DIVIDED_BYTES:
                    raise self._refused(f"the texts of its arrays are too long, with those of {key}")
        elif kind in _SCALARS:
            self._skip(count * _SCALARS[kind])
        else:
            raise self._refused(f"{key} has values of type {kind}")

    def _skip_text(self) -> int:
        """Skip a text. Returns its bytes."""
        size = self._number(8)
        self._skip(size)
        return size

    def _count(self, size: int, most: int, what: str) -> int:
        found = self._number(size)
        if found > most:
            raise self._refused(f"it has {found} {what}; at most {most}")
        return found

    def _number(self, size: int) -> int:
        return int.from_bytes(self._read(size), "little")

    def _text(self) -> str:
        try:
            return self._read(self._number(8)).decode()
        except UnicodeDecodeError as error:
            raise self._refused(f"a name in it is not text: {error}") from error

    def _read(self, size: int) -> bytes:
        self._check_rest(size)
        return self._stream.read(size)

    def _skip(self, size: int) -> None:
        self._check_rest(size)
        self._stream.seek(size, 1)

    def _check_rest(self, size: int) -> None:
        if size > self._limit - self._stream.tell():
            whole = self._limit == self._size
            raise self._refused(
                "it ends within its header: is it complete?" if whole else f"its header exceeds {self._limit} bytes"
            )

    def _refused(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._file} cannot be read: {reason}")


def _sizes_by_type(file: Path) -> dict[int, tuple[str, int, int]]:
    """Name, numbers of a block and bytes of a block, by the number of the type."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        raise CheckpointError(
            f"{file}: reading GGUF files needs the package gguf: pip install 'dendroaspis[serve]'"
        ) from None
    sizes: dict[Any, tuple[int, int]] = GGML_QUANT_SIZES
    return {kind.value: (kind.name, *size) for kind, size in sizes.items()}
