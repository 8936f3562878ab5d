"""Background tasks live until they end, report unexpected errors, and can be cancelled."""

from __future__ import annotations

import asyncio
import gc
import logging

from dendro.errors import PeerLost
from dendro.tasks import BackgroundTasks, end_task


async def test_a_task_without_any_other_reference_runs_to_its_end():
    tasks, done = BackgroundTasks(), asyncio.Event()

    async def work() -> None:
        await asyncio.get_running_loop().run_in_executor(None, gc.collect)
        done.set()

    tasks.start(work())
    gc.collect()
    async with asyncio.timeout(10):
        await done.wait()


async def test_unexpected_errors_alone_are_logged(caplog):
    async def fail(error: Exception) -> None:
        raise error

    tasks = BackgroundTasks()
    with caplog.at_level(logging.ERROR, "dendro.tasks"):
        await asyncio.wait([tasks.start(fail(error)) for error in (PeerLost("gone"), ValueError("a fault of ours"))])
    (record,) = caplog.records
    assert record.getMessage().endswith("ValueError") and "raise error" in record.getMessage()


async def test_cancelled_tasks_end():
    tasks = BackgroundTasks()
    sleeping = tasks.start(asyncio.sleep(60))
    tasks.cancel()
    await asyncio.wait([sleeping])
    assert sleeping.cancelled()


async def test_ending_a_task_waits_for_it_and_accepts_none_and_ended_ones():
    sleeping = asyncio.create_task(asyncio.sleep(60))
    for task in (sleeping, sleeping, None):
        await end_task(task)
    assert sleeping.cancelled()
