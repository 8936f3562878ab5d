"""Sums and gathers over the workers of one sharded target inside a forward, in the order of ranks.

The fixed order makes a row's bits independent of the other rows: libraries add in an order that depends on the number
of rows. Every worker gets the same bits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

SLOT_BYTES = 1 << 20
"""Bytes of a worker's part of an exchange; a longer tensor takes several exchanges."""
LINE_BYTES = 64
"""Bytes of a cache line; each flag has one of its own."""
SHARED_FOLDER = Path("/dev/shm")

EAGER_TURNS = 200
"""Polls of another worker's flag before the first yield of the CPU: a few tens of microseconds."""
PATIENT_S, PAUSE_S = 0.002, 0.0001
"""Seconds of polling before a wait begins to sleep, and seconds of each sleep. After a sleep the wait checks that the
other workers are alive."""
FROZEN_S = 60.0
"""Seconds without an answer within a step after which a worker counts as lost."""


class WorkerLost(RuntimeError):
    """A worker of the group died or no longer answers; the group cannot go on without it."""


class Collectives(Protocol):
    """A group of workers that run one forward together. All of them make the same calls in the same order."""

    rank: int
    size: int

    def sum(self, part: Tensor) -> Tensor:
        """Called with tensors of one shape. Returns their sum over all workers, added in float32 in the order of ranks
        and rounded once."""
        ...

    def gather(self, part: Tensor, width: int) -> Tensor:
        """Called with each worker's columns (`shard_of`). Returns all columns side by side, in the order of ranks:
        [..., width]."""
        ...


def shard_width(width: int, size: int) -> int:
    """Number of columns of a shard. The last shards may have fewer, or none."""
    return -(-width // size)


def shard_of(width: int, rank: int, size: int) -> tuple[int, int]:
    """First and end column of a worker's shard.

    >>> [shard_of(10, rank, size=4) for rank in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    each = shard_width(width, size)
    return min(rank * each, width), min((rank + 1) * each, width)


def _added(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def _padded(part: Tensor, width: int, size: int) -> Tensor:
    return F.pad(part, (0, shard_width(width, size) - part.shape[-1])).contiguous()


class SharedMemory:
    """Workers on one machine exchange parts in shared memory, by polling.

    In an exchange a worker writes its part, sets its flag to the number of the exchange, and waits for all flags. Two
    sets of parts alternate: a worker that sets its flag for the next exchange has read the parts of the last, so a set
    is free when its turn comes again. This relies on x86, where stores become visible in program order; other machines
    use `ProcessGroup`.
    """

    def __init__(self, rank: int, size: int, memory: mmap.mmap, check: Callable[[], None]) -> None:
        """check: called while waiting; raises WorkerLost if another worker of the group is gone"""
        self.rank = rank
        self.size = size
        self._check = check
        self._flags = memoryview(memory)[: size * LINE_BYTES].cast("q")
        self._stride = LINE_BYTES // self._flags.itemsize
        parts = torch.frombuffer(memory, dtype=torch.uint8, offset=size * LINE_BYTES)
        self._parts = parts.view(2, size, SLOT_BYTES)
        self._turn = 0

    @staticmethod
    def bytes_for(size: int) -> int:
        return size * LINE_BYTES + 2 * size * SLOT_BYTES

    def sum(self, part: Tensor) -> Tensor:
        flat = part.contiguous().view(-1)
        sums = [_added(self._exchange(piece)) for piece in flat.split(SLOT_BYTES // part.element_size())]
        return (sums[0] if len(sums) == 1 else torch.cat(sums)).view(part.shape)

    def gather(self, part: Tensor, width: int) -> Tensor:
        mine = _padded(part, width, self.size)
        pieces = mine.view(-1).split(SLOT_BYTES // part.element_size())
        columns: list[list[Tensor]] = [[] for _ in range(self.size)]
        for piece in pieces:
            for column, theirs in zip(columns, self._exchange(piece), strict=True):
                column.append(theirs.clone())
        return torch.cat([torch.cat(column).view(mine.shape) for column in columns], -1)[..., :width]

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        """Exchange flat tensors of one length. Returns views of all workers' tensors, valid until the exchange after
        the next."""
        self._turn += 1
        places = self._parts[self._turn & 1, :, : mine.numel() * mine.element_size()]
        views = [place.view(mine.dtype) for place in places]
        views[self.rank].copy_(mine)
        self._flags[self.rank * self._stride] = self._turn
        for rank in range(self.size):
            self._await(rank)
        return views

    def _await(self, rank: int) -> None:
        flags, place, turn = self._flags, rank * self._stride, self._turn
        for _ in range(EAGER_TURNS):
            if flags[place] >= turn:
                return
        started = time.perf_counter()
        while flags[place] < turn:
            waited = time.perf_counter() - started
            if waited < PATIENT_S:
                os.sched_yield()
                time.sleep(0)  # releases the GIL, too
                continue
            self._check()
            if waited > FROZEN_S:
                raise WorkerLost(f"worker {rank} has not answered for {FROZEN_S:g} s")
            time.sleep(PAUSE_S)


def can_share_memory(device: torch.device) -> bool:
    """True if workers on this machine may exchange parts in shared memory."""
    return device.type == "cpu" and SHARED_FOLDER.is_dir() and platform.machine() in ("x86_64", "AMD64")


@contextlib.contextmanager
def new_memory(size: int) -> Iterator[tuple[mmap.mmap, Path]]:
    """Create a group's memory. Yields it and its path, by which other processes on this machine open it until the
    context ends."""
    path = SHARED_FOLDER / f"dendro-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, SharedMemory.bytes_for(size))
        yield mmap.mmap(descriptor, SharedMemory.bytes_for(size)), path
    finally:
        os.close(descriptor)
        path.unlink()


def join_memory(path: Path, size: int) -> mmap.mmap | None:
    """Open a group's memory; None if this worker is on another machine."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return mmap.mmap(descriptor, SharedMemory.bytes_for(size))
    finally:
        os.close(descriptor)


_gather: Callable[[Tensor, Tensor], object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Gathers equal parts of all processes. torch 2.13 renamed the function, and warns at the old name."""


class ProcessGroup:
    """Workers on any machines: torch's process group gathers all parts, and each worker adds them in order."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def sum(self, part: Tensor) -> Tensor:
        return _added(self._exchange(part.contiguous()))

    def gather(self, part: Tensor, width: int) -> Tensor:
        return torch.cat(self._exchange(_padded(part, width, self.size)), -1)[..., :width]

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        parts = mine.new_empty(self.size * mine.numel())
        try:
            _gather(parts, mine.view(-1))
        except RuntimeError as error:
            raise WorkerLost(f"the process group broke: {error}") from error
        return list(parts.view(self.size, *mine.shape))
