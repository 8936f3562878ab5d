"""What workers of a sharded target send each other: read back as it was, and refused where it is anything else."""

from __future__ import annotations

import json
import os
import struct
import threading
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tree_kernels.tree_attention import FarRows

from verifier_service import shards
from verifier_service.collectives import WorkerLost
from verifier_service.messages import HEAD_BYTES, MAX_FRAME_BYTES, BadFrame, packed, unpacked
from verifier_service.recurrent import Arrangement
from verifier_service.rows import FoldOf, RecurrentRows, StepPlan
from verifier_service.shards import (
    AcceptedSlots,
    Bounds,
    Crew,
    Loaded,
    MemoryAccess,
    Shard,
    join_leader,
)
from verifier_service.worker import work


def ints(*shape):
    return np.random.default_rng(len(shape)).integers(-(2**63), 2**63 - 1, shape)


def plan(**more):
    arrays = dict.fromkeys(("tokens", "positions", "slots", "homes"), ints(3)) | {"near": ints(3, 64)}
    return StepPlan(**arrays, **{"far": (), "wanted": ints(0), "draws": ()} | more)


FOLDS = (FoldOf(5, ints(16), -1), FoldOf(-1, ints(16), 7))
MESSAGES = [
    Shard(Path("/models/a"), Path("t"), torch.bfloat16, "cpu", (8, 16), 2, 4, ("::1", 29500), Path("/dev/shm/d")),
    Shard(Path("b"), None, torch.float32, "cuda", (), 1, 2, ("", 0), None),
    MemoryAccess(True),
    Loaded("it has 4 heads: \N{SNOWMAN}\n", True, 1 << 40, 0, ("layers.0", "layers.1")),
    Bounds(32, 5, 6, 7, 8, Arrangement.of(3, 32, 8, 64)),
    AcceptedSlots(ints(2), ints(2), ints(0), ints(0)),
    plan(),
    plan(far=(FarRows(0, 2, (), 0), FarRows(2, 3, tuple(range(2000)), 4))),
    plan(recurrent=RecurrentRows(ints(3, 32), ints(3), ints(3), ints(3), FOLDS)),
]
KINDS = tuple(dict.fromkeys(type(message) for message in MESSAGES))


def same(one, other):
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype == np.int64 and other.flags.writeable
        return np.array_equal(one, other)
    if is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_sent(message):
    assert same(message, unpacked(packed(message), *KINDS))


def framed(head, arrays=b""):
    head = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(head).to_bytes(HEAD_BYTES, "little") + head + arrays


SLOTS = [[1], [1], [0], [0]]
HOSTILE = {
    "nothing": b"",
    "half a length": b"\1\0",
    "zeros": bytes(64),
    "no json": framed(b"\xff\xfe{"),
    "a head past the frame": (1 << 31).to_bytes(HEAD_BYTES, "little") + b"[]",
    "nested": framed(b"[" * 100_000),
    "a long number": framed(b'["MemoryAccess", [' + b"9" * 5000 + b"]]"),
    "no class": framed(7),
    "an unknown class": framed(["Path", ["/etc"]]),
    "a class that is not expected": packed(Loaded()),
    "a name that is no text": framed([["Shard"], []]),
    "too few fields": framed(["MemoryAccess", []]),
    "fields by name": framed(["MemoryAccess", {"opened": True}]),
    "a number for a truth": framed(["MemoryAccess", [1]]),
    "an unknown dtype": framed(["Shard", ["a", None, "object", "cpu", [], 1, 2, ["", 0], None]]),
    "an array past the frame": framed(["AcceptedSlots", SLOTS], bytes(8)),
    "an array of too many numbers": framed(["AcceptedSlots", [[1 << 62, 1 << 62], *SLOTS[1:]]], bytes(64)),
    "an empty array of too many": framed(["AcceptedSlots", [[0, 1 << 80], [0], [0], [0]]]),
    "a negative shape": framed(["AcceptedSlots", [[-1], *SLOTS[1:]]], bytes(16)),
    "a shape that is no list": framed(["AcceptedSlots", [7, *SLOTS[1:]]], bytes(16)),
    "a float": framed(["AcceptedSlots", [[1.0], *SLOTS[1:]]], bytes(16)),
    "bytes too many": framed(["AcceptedSlots", SLOTS], bytes(17)),
    "draws": packed(plan(draws=((1.0,),))),
}


@pytest.mark.parametrize("frame", HOSTILE.values(), ids=HOSTILE)
def test_anything_else_is_refused_by_name(frame):
    with pytest.raises(BadFrame, match=f"a frame of {len(frame)} bytes is no "):
        unpacked(frame, Shard, MemoryAccess, Bounds, StepPlan, AcceptedSlots)


class Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def too_long(stream, limit):
    os.write(stream.fileno(), struct.pack("!i", limit + 1))  # the length alone: the body is never read


SENT_TO_LEADER = {
    "a pickle": (lambda stream, path: stream.send(Touches(path)), "is no MemoryAccess"),
    "a frame too long": (lambda stream, path: too_long(stream, shards.MAX_REPORT_BYTES), "more than 1048576 bytes"),
}


@pytest.mark.parametrize("send, complaint", SENT_TO_LEADER.values(), ids=SENT_TO_LEADER)
def test_a_worker_with_the_key_cannot_run_code_at_the_leader(tmp_path, send, complaint):
    path = tmp_path / "touched"

    def start(invitations):
        def come():
            streams.append(join_leader(invitations[0]))
            send(streams[0], path)

        threads.append(threading.Thread(target=come))
        threads[0].start()

    streams, threads = [], []
    crew = Crew.start(2, start)
    try:
        with pytest.raises(WorkerLost, match=f"worker 1 of 2 sends a frame .*{complaint}"):
            crew.load(tmp_path, torch.float32, torch.device("cpu"), (8,), 1)
    finally:
        crew.stop()
        threads[0].join()
        streams[0].close()
    assert not path.exists()


SENT_TO_WORKER = {
    "a pickle": (lambda stream, path: stream.send(Touches(path)), "is no Shard"),
    "a frame too long": (lambda stream, path: too_long(stream, MAX_FRAME_BYTES), "more than 67108864 bytes"),
}


@pytest.mark.parametrize("send, complaint", SENT_TO_WORKER.values(), ids=SENT_TO_WORKER)
def test_a_leader_with_the_key_cannot_run_code_at_a_worker(tmp_path, send, complaint):
    path = tmp_path / "touched"

    def start(invitations):
        def serve():
            with pytest.raises(BadFrame, match=complaint):
                work(invitations[0])
            refused.set()

        threads.append(threading.Thread(target=serve))
        threads[0].start()

    threads, refused = [], threading.Event()
    crew = Crew.start(2, start)
    try:
        (stream,) = crew._streams
        send(stream, path)
        threads[0].join(30)
        assert refused.is_set()
    finally:
        crew.stop()
    assert not path.exists()
