"""A target on several workers: the leader answers calls and plans; the others run the same forwards on their shards.

leader: Crew.start, load, make_runners   each step: broadcast(plan), its own forward, broadcast(kept)
worker: work: connect, load, report, then run what the leader sends until the stream between them ends

A group that loses one worker is lost as a whole: all streams end, and with them the other workers.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from dendro.errors import BadRequest
from tree_kernels.row_slots import Ints
from tree_kernels.tree_attention import PAGE

from verifier_service.collectives import (
    Collectives,
    ProcessGroup,
    SharedMemory,
    WorkerLost,
    can_share_memory,
    new_memory,
)
from verifier_service.messages import BadFrame, packed, receive
from verifier_service.models import LoadedTarget, load_target
from verifier_service.recurrent import Arrangement

JOIN_S = 120.0
"""Seconds that workers may take to connect: processes have to start and to import torch."""
GROUP_S = 600.0
"""Seconds that torch's process group waits for a worker that reads its shard."""
POLL_S = 0.005
"""Seconds between two checks of a worker whether all others have made the group."""
KEY_BYTES = 32
HANDSHAKE_S = 5.0
"""Seconds that one step of a handshake may take."""
MAX_REPORT_BYTES = 1 << 20
"""Most bytes of a worker's message to its leader."""

Report = TypeVar("Report")


@dataclass(frozen=True, slots=True)
class Invitation:
    """Address and key with which a worker connects to its leader. The key proves that both belong to the group; it is
    not sent."""

    rank: int
    host: str
    port: int
    key: bytes


Starter = Callable[[Sequence[Invitation]], None]
"""Starts a worker for each invitation; the worker runs `verifier_service.worker.work`."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Order to a group's workers to load a target; each worker takes its own part."""

    checkpoint: Path
    tokenizer: Path | None  # the folder with the tokenizer, where that is not the checkpoint
    dtype: torch.dtype
    device: str
    buckets: tuple[int, ...]
    threads: int
    size: int
    store: tuple[str, int]  # host and port of the leader's store, for torch's process group
    memory: Path | None  # the group's shared memory, where this kind of machine supports it


@dataclass(frozen=True, slots=True)
class MemoryAccess:
    """Message about the group's shared memory. A worker says whether it opened it, the leader whether all did."""

    opened: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker's report."""

    fault: str = ""  # reason why the shard is not loaded; empty if it is
    alone: bool = False  # True if the shard is not loaded only because another worker failed, which reports the reason
    token_bytes: int = 0
    free_bytes: int = 0
    dependent: tuple[str, ...] = ()  # linear layers whose rows depend on their neighbours
    arithmetic: str = ""  # `LoadedTarget.arithmetic` of the shard


@dataclass(frozen=True, slots=True)
class Bounds:
    """Sizes of a runner's memory, equal at every worker of a group; each worker holds its own heads."""

    near: int  # positions of a near block
    pages: int  # pages that the scheduler allocates, numbered from 1
    own_pages: int  # pages after these for the runner's checks, as many as the longest text has
    max_texts: int  # most texts of a step
    max_depth: int  # most levels of a tree below the root
    arrangement: Arrangement  # layout of the states' memory; unused by a target without states


@dataclass(frozen=True, slots=True, eq=False)
class AcceptedSlots:
    """Source and target slots of accepted guesses' keys, and of all accepted rows' inputs to mixers."""

    source: Ints
    target: Ints
    inputs: Ints
    rings: Ints


class Crew:
    """A leader's workers. `broadcast`, and the forwards that follow it, belong to one thread at a time."""

    def __init__(self, streams: Sequence[Connection]) -> None:
        self.size = len(streams) + 1
        self.memory_is_shared = False  # all workers are on this machine and share memory
        self.reports: list[Loaded] = []
        self._made_group = False  # torch's process group, which exchanges what no shared memory does
        self._streams = list(streams)
        self._sockets = [socket.socket(fileno=os.dup(stream.fileno())) for stream in streams]
        self._wake, self._sleep = multiprocessing.Pipe()
        self._watch: threading.Thread | None = None

    @classmethod
    def start(cls, size: int, start_workers: Starter, host: str = "127.0.0.1") -> Crew:
        """Start `size - 1` workers and wait until they have connected. Raises WorkerLost where one does not."""
        key = secrets.token_bytes(KEY_BYTES)
        streams: dict[int, Connection] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=size) as server:
            start_workers([Invitation(rank, host, server.getsockname()[1], key) for rank in range(1, size)])
            deadline = time.monotonic() + JOIN_S
            while len(streams) < size - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    stream, _ = server.accept()
                except TimeoutError:
                    raise WorkerLost(f"{len(streams)} of {size - 1} workers connected in {JOIN_S:g} s") from None
                joined = _joined(stream, key)
                if joined is not None:
                    rank, connection = joined
                    streams[rank] = connection
        return cls([streams[rank] for rank in sorted(streams)])

    def load(
        self,
        checkpoint: Path,
        dtype: torch.dtype,
        device: torch.device,
        buckets: tuple[int, ...],
        threads: int,
        host: str = "127.0.0.1",
        tokenizer: Path | None = None,
    ) -> LoadedTarget:
        """Load this worker's shard while the others load theirs. Raises BadRequest for a checkpoint that cannot be
        sharded over this many workers, WorkerLost where a worker dies meanwhile."""
        # The store binds its own port: a free port that is only looked up may be taken by then.
        store = dist.TCPStore(host, 0, self.size, True, timedelta(seconds=GROUP_S), wait_for_workers=False)
        with new_memory(self.size) as (memory, path):
            shared = path if can_share_memory(device) else None
            shard = Shard(
                checkpoint, tokenizer, dtype, device.type, buckets, threads, self.size, (host, store.port), shared
            )
            self.broadcast(shard)
            self.memory_is_shared = all([self._receive(stream, MemoryAccess).opened for stream in self._streams])
            self.broadcast(MemoryAccess(self.memory_is_shared))
        self._made_group = not self.memory_is_shared and not dist.is_initialized()
        target, report = load_shard(shard, 0, store, memory if self.memory_is_shared else None, self.check)
        self.reports = [self._receive(stream, Loaded) for stream in self._streams]
        reports = [report, *self.reports]
        for fault in (each.fault for each in reports if each.fault):
            raise BadRequest("checkpoint", fault)
        if target is None or any(each.alone for each in reports):
            raise WorkerLost("a worker failed while it loaded its shard")
        return target

    def pages(self, fraction: float, own: int, states: int) -> int:
        """Pages that fit at every worker into `fraction` of its free memory, beside `states` bytes of states.

        own: pages that fit at this worker
        """
        if self.memory_is_shared:  # all workers use this machine's memory
            return own // self.size
        rooms = [(int(fraction * report.free_bytes) - states) // (report.token_bytes * PAGE) for report in self.reports]
        return min(own, *rooms)

    def make_runners(self, bounds: Bounds) -> None:
        """Let the workers make their runners; from now on they run the plans that are broadcast."""
        self.broadcast(bounds)

    def watch(self, lost: Callable[[str], None]) -> None:
        """Call `lost` once, in its own thread, when a worker dies."""
        self._watch = threading.Thread(target=self._wait_for_end, args=(lost,), name="shards", daemon=True)
        self._watch.start()

    def broadcast(self, message: object) -> None:
        """Send a message, a dataclass as in `messages`, to all workers. Raises WorkerLost."""
        frame = packed(message)
        try:
            for stream in self._streams:
                stream.send_bytes(frame)
        except OSError as error:
            raise WorkerLost(f"a worker is gone: {error}") from error

    def check(self) -> None:
        """Raise WorkerLost where a worker is gone."""
        for rank, stream in enumerate(self._sockets, 1):
            if has_ended(stream):
                raise WorkerLost(f"worker {rank} of {self.size} is gone")

    def stop(self) -> None:
        """Close the streams, which ends the workers. May be called twice."""
        self._wake.close()
        if self._watch is not None:
            self._watch.join()
        for stream in self._streams:
            stream.close()
        for peeked in self._sockets:
            peeked.close()
        made, self._made_group = self._made_group, False
        if made:
            _leave_group()

    def _receive(self, stream: Connection, kind: type[Report]) -> Report:
        rank = 1 + self._streams.index(stream)
        try:
            return receive(stream, kind, limit=MAX_REPORT_BYTES)
        except BadFrame as error:
            raise WorkerLost(f"worker {rank} of {self.size} sends {error}") from error
        except (EOFError, OSError) as error:
            raise WorkerLost(f"worker {rank} of {self.size} died while it loaded its shard") from error

    def _wait_for_end(self, lost: Callable[[str], None]) -> None:
        ready = wait([*self._streams, self._sleep])  # workers send nothing more: a readable stream has ended
        if self._sleep not in ready:
            rank = 1 + self._streams.index(ready[0])  # type: ignore[arg-type]  # `wait` returns what it is given: streams
            lost(f"worker {rank} of {self.size} is gone")


def load_shard(
    shard: Shard, rank: int, store: dist.Store, memory: mmap.mmap | None, check: Callable[[], None]
) -> tuple[LoadedTarget | None, Loaded]:
    """Load a worker's part of a target; returns it, or None where that failed, and the report.

    store: for torch's process group   check: raises WorkerLost where another worker is gone

    Raises WorkerLost where one is gone before all have joined the group.
    """
    device = torch.device(shard.device)
    if device.type == "cuda":
        # Ranks count on from one machine to the next; a worker may see all devices of its machine, or its own alone.
        device = torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
        os.environ["LOCAL_RANK"] = str(device.index)  # read by transformers
    elif torch.cuda.is_available():
        return None, Loaded("shards on CPUs need an empty CUDA_VISIBLE_DEVICES")
    if dist.is_initialized():
        return None, Loaded("this process has a shard of another target")
    _make_group("nccl" if device.type == "cuda" else "gloo", rank, shard.size, store, check)
    group: Collectives = ProcessGroup() if memory is None else SharedMemory(rank, shard.size, memory, check)
    target = None
    try:
        target = load_target(
            shard.checkpoint, shard.dtype, device, shard.buckets, shard.threads, group, shard.tokenizer
        )
        free = free_bytes(device)
        return target, Loaded("", False, target.token_bytes, free, target.linear.failed, target.arithmetic)
    except BadRequest as error:
        return None, Loaded(str(error).removeprefix("checkpoint: "))
    except (WorkerLost, dist.DistError):
        return None, Loaded(alone=True)
    finally:
        # A group with shared memory needs torch's process group for loading alone. A worker that failed to load leaves,
        # too, or the others would wait GROUP_S for it.
        if memory is not None or target is None:
            _leave_group()
        _clear_sharding_caches()


def _make_group(backend: str, rank: int, size: int, store: dist.Store, check: Callable[[], None]) -> None:
    """Make torch's process group. Returns once all workers have made it: one that refuses its shard leaves the group at
    once, and those that still connected to it would fail. Raises WorkerLost where a worker does not make it."""
    made, deadline = [f"made by {each}" for each in range(size)], time.monotonic() + GROUP_S
    try:
        limit = timedelta(seconds=GROUP_S)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        store.set(made[rank], "")
        while not store.check(made):
            check()
            if time.monotonic() > deadline:
                raise WorkerLost(f"a worker does not answer within {GROUP_S:g} s")
            time.sleep(POLL_S)
    except RuntimeError as error:  # torch's DistError is one, too
        if not dist.is_initialized():
            # torch numbers the groups that a process has begun, and finds the others by that number, which only
            # destroying a group restores.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        _leave_group()
        raise WorkerLost(f"torch's process group cannot be made: {error}") from error


def _leave_group() -> None:
    """Destroy torch's process group, where there is one. NCCL's ends with its process: it may wait for other workers,
    which may be gone."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _clear_sharding_caches() -> None:
    """Clear DTensor's caches of sharding propagation, which torch keeps for each thread. Their entries hold the process
    group and its threads until this thread ends. If another thread forks, as Ray does to start its processes, the child
    clears this thread's state: the group is destroyed there, joins threads that the child does not have, and crashes.
    """
    from torch.distributed.tensor import debug  # takes a second, and only shards need it

    # torch has no public function for this; a version without it keeps the group.
    clear: Callable[[], None] = getattr(debug, "_clear_sharding_prop_cache", lambda: None)
    clear()


def has_ended(stream: socket.socket) -> bool:
    """True if the other end of a stream is gone; reads nothing."""
    try:
        return not stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def join_leader(invitation: Invitation) -> Connection:
    """Connect to the leader, both proving that they have the key. Raises OSError, EOFError or AuthenticationError."""
    stream = Connection(_without_delay(socket.create_connection((invitation.host, invitation.port))).detach())
    try:
        answer_challenge(stream, invitation.key)
        deliver_challenge(stream, invitation.key)
        stream.send_bytes(bytes([invitation.rank]))
    except BaseException:
        stream.close()
        raise
    return stream


def _joined(stream: socket.socket, key: bytes) -> tuple[int, Connection] | None:
    """A worker's rank and its connection; None for a stranger, who is disconnected. The other end must prove that it
    has the key (HMAC of a challenge, as `multiprocessing.connection` does it)."""
    _without_delay(stream)
    _limit_reads(stream, HANDSHAKE_S)
    connection = Connection(os.dup(stream.fileno()))
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        (rank,) = connection.recv_bytes(1)
        _limit_reads(stream, 0)
        return rank, connection
    except (OSError, EOFError, ValueError, AuthenticationError):
        connection.close()
        return None
    finally:
        stream.close()


def _without_delay(stream: socket.socket) -> socket.socket:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _limit_reads(stream: socket.socket, seconds: float) -> None:
    """Let reads of a socket, also by its file descriptor, end with an OSError after `seconds`; 0: never."""
    stream.settimeout(None)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(1e6 * (seconds % 1))))


def free_bytes(device: torch.device) -> int:
    """Free memory of a device: an accelerator's own, or this machine's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
