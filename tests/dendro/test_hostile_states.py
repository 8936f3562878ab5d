"""A state with a changed header and a valid checksum counts as missing. The shelf does not raise."""

from __future__ import annotations

import hashlib
import json
import struct

import numpy as np
import pytest
from dendro.calls import OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.state import (
    Arrays,
    BadState,
    ClosedMemory,
    MemoryStates,
    Shelf,
    StateHeader,
    most_blob_bytes,
    pack_state,
    unpack_state,
)
from dendro.text import Limits, Sampling, Tokens
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT = Tokens()
TEXT.extend([1, 2, 3])
HEADER = StateHeader("f", "t", "l", 2, TEXT.digest(2))
TENSORS: dict[str, np.ndarray] = {
    "recurrent.0": np.arange(6, dtype=np.float32).reshape(2, 3),
    "conv.0": np.arange(4, dtype=np.uint16),
}
GOOD = pack_state(HEADER, TENSORS)
_HEAD = struct.unpack_from("<4sHI", GOOD)[2]
FIELDS = json.loads(GOOD[10 : 10 + _HEAD])
BODY = GOOD[10 + _HEAD : -32]


def signed(blob: bytes) -> bytes:
    return blob + hashlib.blake2b(blob, digest_size=32).digest()


def with_header(head: bytes, length: int | None = None) -> bytes:
    return signed(struct.pack("<4sHI", b"DNDR", 1, len(head) if length is None else length) + head + BODY)


def with_fields(**changed) -> bytes:
    return with_header(json.dumps({**FIELDS, **changed}).encode())


TABLE = FIELDS["tensors"]
MUTATIONS = {
    "unknown dtype": with_fields(tensors=[["recurrent.0", "float64", [2, 3]], TABLE[1]]),
    "dtype that is a list": with_fields(tensors=[["recurrent.0", ["float32"], [2, 3]], TABLE[1]]),
    "dtype that is a number": with_fields(tensors=[["recurrent.0", 7, [2, 3]], TABLE[1]]),
    "no dtype": with_fields(tensors=[["recurrent.0", [2, 3]], TABLE[1]]),
    "name that is a list": with_fields(tensors=[[["recurrent.0"], "float32", [2, 3]], TABLE[1]]),
    "a name twice": with_fields(tensors=[["conv.0", "float32", [2, 3]], TABLE[1]]),
    "shape below zero": with_fields(tensors=[["recurrent.0", "float32", [-2, -3]], TABLE[1]]),
    "shape with -1": with_fields(tensors=[["recurrent.0", "float32", [-1, 3]], TABLE[1]]),
    "shape that overflows": with_fields(tensors=[["recurrent.0", "float32", [2**62, 2**62, 16]], TABLE[1]]),
    "shape of a huge number": with_fields(tensors=[["recurrent.0", "float32", [10**30]], TABLE[1]]),
    "shape of a fraction": with_fields(tensors=[["recurrent.0", "float32", [2.5, 3]], TABLE[1]]),
    "shape of a text": with_fields(tensors=[["recurrent.0", "float32", "23"], TABLE[1]]),
    "shape of nothing": with_fields(tensors=[["recurrent.0", "float32", None], TABLE[1]]),
    "33 dimensions": with_fields(tensors=[["recurrent.0", "float32", [2, 3] + [1] * 65], TABLE[1]]),
    "empty dimensions without end": with_fields(tensors=[["recurrent.0", "float32", [0] * 100_000], TABLE[1]]),
    "table that is a number": with_fields(tensors=7),
    "table that is nothing": with_fields(tensors=None),
    "table that is a mapping": with_fields(tensors={"abc": 1}),
    "no table": with_header(json.dumps({k: v for k, v in FIELDS.items() if k != "tensors"}).encode()),
    "a field more": with_fields(more=1),
    "a list for a header": with_header(b"[]"),
    "a number for a header": with_header(b"7"),
    "nested without end": with_header(b"[" * 200_000 + b"]" * 200_000),
    "no JSON": with_header(b"\xff\xfe"),
    "digits without end": with_header(b'{"tensors": ' + b"9" * 5000 + b"}"),
    "a header past the end": with_header(b"{}", 2**32 - 1),
    "tokens of another type": with_fields(tokens="2"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_state_with_a_changed_header_is_refused(name):
    with pytest.raises(BadState):
        unpack_state(MUTATIONS[name], HEADER)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["float32", "uint16", "recurrent.0"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def _replaced(value, path, new):
    """`value` with the part at `path` replaced. path: an index per level of nesting; indices wrap around."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    parts = dict(value) if isinstance(value, dict) else list(value)
    key = sorted(parts)[path[0] % len(parts)] if isinstance(parts, dict) else path[0] % len(parts)
    parts[key] = _replaced(parts[key], path[1:], new)
    return parts


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.integers(0, 20), max_size=4), json_values)
def test_a_random_change_of_the_header_is_refused_or_gives_tensors_of_the_body(path, new):
    blob = with_header(json.dumps(_replaced(FIELDS, path, new)).encode())
    try:
        tensors = unpack_state(blob, HEADER)
    except BadState:
        return
    assert sum(array.nbytes for array in tensors.values()) == len(BODY)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(0, len(GOOD) - 33), st.integers(1, 255))
def test_a_changed_byte_under_the_right_checksum_is_refused_or_gives_tensors(place, flip):
    blob = bytearray(GOOD[:-32])
    blob[place] ^= flip
    try:
        unpack_state(signed(bytes(blob)), HEADER)
    except BadState:
        return


def closed(arrays: Arrays) -> ClosedMemory:
    return ClosedMemory("", [1, 2], TEXT.digest(2), arrays)


@pytest.mark.parametrize("name", MUTATIONS)
async def test_a_changed_state_in_the_store_is_counted_and_missing_for_its_text(name):
    store = MemoryStates()
    shelf = Shelf(store, "f", "t", "l", lambda arrays, tokens: None, lambda tokens: 1 << 30)
    update = TextUpdate.of(new_opening(), TEXT, 0)
    call = OpenCall(update, RequestParameters(Sampling(), Limits(9), "", ()))
    await shelf.put(closed(TENSORS))
    (key,) = store.blobs
    assert (await shelf.find(call))[0] == 2
    store.blobs[key] = MUTATIONS[name]
    assert await shelf.find(call) == (0, None)
    assert shelf.counters.states_refused == 1


async def test_a_state_that_its_store_would_not_keep_is_not_packed(monkeypatch):
    class SmallStates(MemoryStates):
        def takes(self, size: int) -> bool:
            return size <= 12

    packed = []
    monkeypatch.setattr("dendro.state.pack_state", lambda header, arrays: packed.append(header) or b"state")
    shelf = Shelf(SmallStates(), "f", "t", "l", lambda arrays, tokens: None, lambda tokens: 1 << 30)
    for numbers, kept in ((3, 2), (4, 0)):
        closed = ClosedMemory("", [5, 6], 0, {"a": np.zeros(numbers, np.float32)})
        assert await shelf.put(closed) == kept
    assert len(packed) == 1


class CountingStates(MemoryStates):
    """Keeps the limits of its loads."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int] = []

    async def load(self, name: str, most: int) -> bytes | None:
        self.limits.append(most)
        return await super().load(name, most)


async def test_the_store_is_asked_for_no_more_bytes_than_a_state_of_so_many_tokens_can_have():
    store = CountingStates()
    shelf = Shelf(store, "f", "t", "l", lambda arrays, tokens: None, lambda tokens: 1000 * tokens)
    call = OpenCall(TextUpdate.of(new_opening(), TEXT, 0), RequestParameters(Sampling(), Limits(9), "", ()))
    await shelf.put(closed({"a": np.zeros(2000, np.uint8)}))
    assert (await shelf.find(call))[0] == 2 and store.limits == [most_blob_bytes(2000)]
    await shelf.put(closed({"a": np.zeros(most_blob_bytes(2000), np.uint8)}))
    assert await shelf.find(call) == (0, None)
    assert (shelf.counters.states_missed, shelf.counters.states_refused) == (1, 0)
