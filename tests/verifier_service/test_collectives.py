"""Sums and gathers of a group: in the order of ranks, the same bits at every worker, WorkerLost when one dies."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from verifier_service import collectives
from verifier_service.collectives import (
    SLOT_BYTES,
    ProcessGroup,
    SharedMemory,
    WorkerLost,
    join_memory,
    new_memory,
    shard_of,
)

SIZE = 3
SHAPES = ((1, 1, 5), (1, 33, 17), (1, 3, SLOT_BYTES // 4), (0, 4))  # one takes several exchanges
WIDTHS = (1, 2, 7, 264)


def part(rank, shape, dtype):
    """Numbers whose sum differs if it is taken in another order or rounded on the way."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
    return (values * (1e4 if rank < SIZE - 1 else 1.0) * (-1) ** rank).to(dtype)


def ordered(parts):
    total = parts[0].float()
    for each in parts[1:]:
        total = total + each.float()
    return total.to(parts[0].dtype)


def everything(group):
    """A group's results for all cases."""
    answers = []
    for dtype in (torch.float32, torch.bfloat16):
        answers += [group.sum(part(group.rank, shape, dtype)) for shape in SHAPES]
        for width in WIDTHS:
            first, end = shard_of(width, group.rank, group.size)
            answers.append(group.gather(whole(width, dtype)[..., first:end], width))
    return answers


def whole(width, dtype):
    return torch.arange(4 * width).view(1, 4, width).to(dtype)


def expected():
    answers = []
    for dtype in (torch.float32, torch.bfloat16):
        answers += [ordered([part(rank, shape, dtype) for rank in range(SIZE)]) for shape in SHAPES]
        answers += [whole(width, dtype) for width in WIDTHS]
    return answers


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def in_shared_memory(work, size=SIZE, check=lambda: None):
    """Run `work` once for each rank, in threads of this process."""
    with new_memory(size) as (memory, path):
        memories = [memory, *(join_memory(path, size) for _ in range(size - 1))]
    assert not path.exists()
    with ThreadPoolExecutor(size) as threads:
        groups = [SharedMemory(rank, size, each, check) for rank, each in enumerate(memories)]
        return list(threads.map(work, groups))


def test_shared_memory_adds_in_the_order_of_ranks_and_rounds_once():
    for answers in in_shared_memory(everything):
        assert same(answers, expected())


def test_a_part_is_not_overwritten_while_others_still_read_it():
    """Thousands of exchanges back to back, whose parts contain the number of their exchange."""

    def count(group):
        return [group.sum(torch.full((4,), float(turn))).tolist() for turn in range(2000)]

    for answers in in_shared_memory(count):
        assert answers == [[float(SIZE * turn)] * 4 for turn in range(2000)]


def test_waiting_for_a_dead_worker_raises_worker_lost():
    def alone(group):
        if group.rank == 0:
            with pytest.raises(WorkerLost, match="gone"):
                group.sum(torch.ones(3))

    def gone():
        raise WorkerLost("gone")

    in_shared_memory(alone, 2, gone)


def test_waiting_for_a_frozen_worker_raises_worker_lost(monkeypatch):
    monkeypatch.setattr(collectives, "FROZEN_S", 0.01)

    def alone(group):
        if group.rank == 0:
            with pytest.raises(WorkerLost, match="worker 1 has not answered for"):
                group.sum(torch.ones(3))

    in_shared_memory(alone, 2)


def test_memory_of_another_machine_is_not_found(tmp_path):
    assert join_memory(tmp_path / "elsewhere", 2) is None


def run_rank(rank, url, answers):
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=SIZE, timeout=timedelta(seconds=60))
    answers.put((rank, same(everything(ProcessGroup()), expected())))
    dist.destroy_process_group()


def test_a_process_group_gives_the_same_bits(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    url = f"file://{tmp_path / 'meet'}"
    processes = [context.Process(target=run_rank, args=(rank, url, answers)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    assert sorted(answers.get(timeout=60) for _ in processes) == [(rank, True) for rank in range(SIZE)]
    for process in processes:
        process.join()
