"""The format of saved states (a fixed header, raw tensors and a checksum), the stores that keep them by name, and the
shelf that saves and finds those of a model, a drafter or a state-space target, under names made of their texts.

A blob is `magic | format version | header length | header (JSON, sorted keys) | tensors, little endian | BLAKE2b-256`.
A state with any fault counts as missing, not as an error: without it a text only takes longer to open. Fields of the
header that a reader does not know are ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dendro.calls import OpenCall
from dendro.failures import described
from dendro.tasks import off_loop
from dendro.text import Tokens, state_name

log = logging.getLogger("dendro.states")

MAGIC = b"DNDR"
FORMAT = 2
_PREFIX = struct.Struct("<4sHI")
_CHECKSUM_BYTES = 32
_DTYPES = {"float32": "<f4", "uint16": "<u2", "int64": "<i8", "uint8": "|u1"}  # bfloat16 is stored as its bits, uint16
MAX_BLOB_BYTES = 512 << 20
"""Most bytes that Redis stores under one key. Engines read and write states in the store themselves, not by gRPC."""
MAX_HEADER_BYTES = 1 << 20
MAX_DIMENSIONS = 8
LOOKUPS = 64
"""The most names that are looked up when a text is opened, the longest text first. Each lookup is a round trip."""

Arrays = Mapping[str, npt.NDArray[np.generic]]


def most_blob_bytes(tensor_bytes: int) -> int:
    """Most bytes of a blob whose tensors have `tensor_bytes`."""
    return _PREFIX.size + MAX_HEADER_BYTES + tensor_bytes + _CHECKSUM_BYTES


class StateStore(Protocol):
    """Keeps blobs by name for a while. Losing blobs only costs time. No call raises."""

    def takes(self, size: int) -> bool:
        """Called before a state whose tensors have `size` bytes is packed. Returns False if it would not be kept."""
        ...

    async def load(self, name: str, most: int) -> bytes | None:
        """Called when a text is opened. Returns the blob of that name; None if there is none, or if it has more than
        `most` bytes, of which no more are read."""
        ...

    async def save(self, name: str, blob: bytes) -> bool: ...


class NoStates:
    """A store that keeps nothing."""

    def takes(self, size: int) -> bool:
        return False

    async def load(self, name: str, most: int) -> bytes | None:
        return None

    async def save(self, name: str, blob: bytes) -> bool:
        return False


class MemoryStates:
    """A store in this process, for one-process runs and tests. Never evicts."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def takes(self, size: int) -> bool:
        return True

    async def load(self, name: str, most: int) -> bytes | None:
        blob = self.blobs.get(name)
        return None if blob is None or len(blob) > most else blob

    async def save(self, name: str, blob: bytes) -> bool:
        self.blobs[name] = blob
        return True


@dataclass(frozen=True, slots=True)
class StateHeader:
    """The identity of a state. A reader refuses a state unless all these fields are as expected."""

    fingerprint: str  # hash of the model's weights and configuration
    tokenizer: str
    layout: str  # names, shapes and dtypes of the tensors, as one word made by the engine
    tokens: int  # the number of tokens that the state has consumed
    digest: int  # chained digest of those tokens


class BadState(ValueError):
    """A blob that is not the expected state. The reader counts it and continues without a state."""


def pack_state(header: StateHeader, tensors: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Write a state as bytes."""
    table, body = [], []
    for name, tensor in tensors.items():
        kind = str(tensor.dtype)
        if kind not in _DTYPES:
            raise ValueError(f"state: tensor {name} has dtype {kind}; only {sorted(_DTYPES)} are kept")
        table.append([name, kind, list(tensor.shape)])
        body.append(np.ascontiguousarray(tensor).astype(_DTYPES[kind], copy=False).tobytes())
    head = json.dumps(asdict(header) | {"tensors": table}, sort_keys=True).encode()
    blob = b"".join((_PREFIX.pack(MAGIC, FORMAT, len(head)), head, *body))
    return blob + hashlib.blake2b(blob, digest_size=_CHECKSUM_BYTES).digest()


def unpack_state(blob: bytes, expected: StateHeader) -> dict[str, npt.NDArray[np.generic]]:
    """Read the tensors of a blob that is the expected state. Raises BadState, with the reason, for any other blob."""
    if not _PREFIX.size + _CHECKSUM_BYTES <= len(blob) <= MAX_BLOB_BYTES:
        raise BadState(f"has {len(blob)} bytes; a state has {_PREFIX.size + _CHECKSUM_BYTES} to {MAX_BLOB_BYTES}")
    magic, version, length = _PREFIX.unpack_from(blob)
    if magic != MAGIC or version != FORMAT:
        raise BadState(f"format {magic!r} {version}; this is {MAGIC!r} {FORMAT}")
    body, checksum = memoryview(blob)[:-_CHECKSUM_BYTES], blob[-_CHECKSUM_BYTES:]
    if hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest() != checksum:
        raise BadState("checksum differs")
    if length > MAX_HEADER_BYTES:
        raise BadState(f"a header of {length} bytes; at most {MAX_HEADER_BYTES}")
    try:
        stored = json.loads(bytes(body[_PREFIX.size : _PREFIX.size + length]))
        table = stored["tensors"]
        header = StateHeader(**{each.name: stored[each.name] for each in fields(StateHeader)})
        if header != expected:
            raise BadState("is another state than its name requires")
        return _tensors(table, body, _PREFIX.size + length)
    except BadState:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadState(f"header is unreadable: {type(error).__name__}") from error


def _tensors(table: Any, body: memoryview, offset: int) -> dict[str, npt.NDArray[np.generic]]:
    """The tensors of a header's table. They must fill the body from `offset` to its last byte; else raises BadState."""
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    for name, kind, shape in table:
        if not isinstance(name, str) or name in tensors or kind not in _DTYPES:
            raise BadState(f"tensor {len(tensors)} has no name, the name of another, or an unknown dtype")
        if len(shape) > MAX_DIMENSIONS or not all(type(size) is int and 0 <= size <= len(body) for size in shape):
            raise BadState(f"tensor {len(tensors)} has an impossible shape")
        dtype, count = np.dtype(_DTYPES[kind]), prod(shape)
        if offset + count * dtype.itemsize > len(body):
            raise BadState(f"tensor {len(tensors)} runs past the end")
        tensors[name] = np.frombuffer(body, dtype, count, offset).reshape(shape).copy()
        offset += count * dtype.itemsize
    if offset != len(body):
        raise BadState(f"{len(body) - offset} bytes are left over")
    return tensors


@dataclass(frozen=True, slots=True, eq=False)
class ClosedMemory:
    """A copy of a closed text's memory."""

    tenant: str
    ids: Sequence[int]  # tokens that the memory has consumed
    digest: int  # chained digest of those tokens
    arrays: Arrays


@dataclass(slots=True)
class ShelfCounters:
    """Counters since the start."""

    states_restored: int = 0
    states_missed: int = 0  # openings for which no valid state was found
    states_refused: int = 0  # blobs that were not the expected state
    states_saved: int = 0


class Shelf:
    """The states of one model in one layout."""

    def __init__(
        self,
        store: StateStore,
        fingerprint: str,
        tokenizer: str,
        layout: str,
        check: Callable[[Arrays, int], None],
        most_bytes: Callable[[int], int],
    ) -> None:
        """check: raises ValueError or TypeError unless the engine can load these arrays for this number of tokens
        most_bytes: most bytes of the arrays for a number of tokens; no more are read of a blob in the store"""
        self.counters = ShelfCounters()
        self._store = store
        self._fingerprint = fingerprint
        self._tokenizer = tokenizer
        self._layout = layout
        self._check = check
        self._most_bytes = most_bytes

    async def find(self, call: OpenCall) -> tuple[int, Arrays | None]:
        """The longest saved state of this text, after the number of tokens that it covers; (0, None) if there is none.

        A turn that ended at a mark may have saved the state before its last token, so both lengths are looked up.
        """
        ids, longest = call.update.tokens, call.update.base - 1
        lengths = {longest, *call.parameters.marks, *(mark - 1 for mark in call.parameters.marks)}
        tokens = Tokens(ids)
        for length in sorted((length for length in lengths if 1 <= length <= longest), reverse=True)[:LOOKUPS]:
            name = await self._name(call.parameters.tenant, ids[:length])
            blob = await self._store.load(name, most_blob_bytes(self._most_bytes(length)))
            if blob is not None and (arrays := await self._read(blob, tokens, length)) is not None:
                self.counters.states_restored += 1
                return length, arrays
        self.counters.states_missed += 1
        return 0, None

    async def put(self, closed: ClosedMemory) -> int:
        """Save a closed text's state. Returns the number of its tokens, 0 if the store did not keep it."""
        if not self._store.takes(sum(each.nbytes for each in closed.arrays.values())):
            return 0
        # Packing hashes megabytes, so it runs off the event loop.
        tokens = len(closed.ids)
        blob = await asyncio.to_thread(pack_state, self._header(tokens, closed.digest), closed.arrays)
        kept = await self._store.save(await self._name(closed.tenant, closed.ids), blob)
        self.counters.states_saved += kept
        return tokens if kept else 0

    async def _read(self, blob: bytes, tokens: Tokens, length: int) -> Arrays | None:
        """The arrays of a stored state of these tokens; None, which is counted, if it is another state or damaged."""
        try:
            arrays = await asyncio.to_thread(lambda: unpack_state(blob, self._header(length, tokens.digest(length))))
            self._check(arrays, length)
        except (ValueError, TypeError, LookupError) as error:
            self.counters.states_refused += 1
            log.warning("a saved state of %d tokens is refused: %s", length, described(error))
            return None
        return arrays

    async def _name(self, tenant: str, ids: Sequence[int]) -> str:
        return await off_loop(len(ids), lambda: state_name(tenant, self._fingerprint, self._layout, ids))

    def _header(self, tokens: int, digest: int) -> StateHeader:
        return StateHeader(self._fingerprint, self._tokenizer, self._layout, tokens, digest)
