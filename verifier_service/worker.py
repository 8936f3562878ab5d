"""A worker of a sharded target: connects to its leader, loads its shard, and runs the leader's plans."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from verifier_service.collectives import WorkerLost, join_memory
from verifier_service.messages import packed, receive
from verifier_service.rows import StepPlan
from verifier_service.runners import runner_for
from verifier_service.shards import (
    GROUP_S,
    AcceptedSlots,
    Bounds,
    Invitation,
    MemoryAccess,
    Shard,
    has_ended,
    join_leader,
    load_shard,
)


def start_processes(invitations: Sequence[Invitation]) -> None:
    """Start workers as child processes."""
    context = multiprocessing.get_context("spawn")
    for each in invitations:
        context.Process(target=work, args=(each,), name=f"shard {each.rank}", daemon=True).start()


def work(invitation: Invitation) -> None:
    """Serve a leader until the stream to it ends. Blocks; the shard runs in the calling thread. Raises BadFrame for a
    frame that is no message, AuthenticationError for a leader without the key."""
    with (
        join_leader(invitation) as stream,
        socket.socket(fileno=os.dup(stream.fileno())) as leader,
        contextlib.suppress(EOFError, OSError, WorkerLost),
    ):
        _serve(stream, leader, invitation.rank)


def _serve(stream: Connection, leader: socket.socket, rank: int) -> None:
    """Load a shard and run the leader's plans. leader: a duplicate of the stream's socket, by which the worker sees
    that the other end is gone"""

    def check() -> None:
        if has_ended(leader):
            raise WorkerLost("the leader is gone")

    shard = receive(stream, Shard)
    torch.set_num_threads(shard.threads)
    memory = None if shard.memory is None else join_memory(shard.memory, shard.size)
    stream.send_bytes(packed(MemoryAccess(memory is not None)))
    together = receive(stream, MemoryAccess).opened
    store = dist.TCPStore(*shard.store, shard.size, False, timedelta(seconds=GROUP_S))
    target, report = load_shard(shard, rank, store, memory if together else None, check)
    stream.send_bytes(packed(report))
    if target is None:
        return
    bounds = receive(stream, Bounds)
    runner = runner_for(target, bounds, shard.buckets)
    while True:
        match receive(stream, StepPlan, AcceptedSlots):
            case StepPlan() as plan:
                with torch.inference_mode():
                    runner.forward(plan)
            case AcceptedSlots() as kept:
                runner.keep(kept)
