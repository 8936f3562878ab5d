"""Background tasks live until they end, report unexpected errors, and can be cancelled."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading

import pytest
from dendro.errors import PeerLost
from dendro.tasks import AT_ONCE, LONG, BackgroundTasks, TenantLock, TenantTurns, end_task, off_loop

from tests.support.sockets import until


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


class BlockedWork:
    """Long work of one tenant, which waits until it is let go."""

    def __init__(self, turns: TenantTurns, tenant: str) -> None:
        self.begun = 0
        self.go = threading.Event()
        self._turns, self._tenant = turns, tenant

    def _work(self) -> None:
        self.begun += 1
        self.go.wait()

    def start(self) -> asyncio.Task[None]:
        async def run() -> None:
            self._turns.enter(self._tenant)
            await off_loop(LONG, self._work)

        return asyncio.create_task(run())


async def test_however_much_long_work_one_tenant_has_anothers_finds_a_thread():
    turns = TenantTurns()
    many = BlockedWork(turns, "many")
    running = [many.start() for _ in range(100)]
    try:
        await until(lambda: many.begun == AT_ONCE)
        turns.enter("another")
        async with asyncio.timeout(30):
            assert await off_loop(LONG, lambda: "done") == "done"
        assert many.begun == AT_ONCE
    finally:
        many.go.set()
    await asyncio.gather(*running)
    assert many.begun == 100


async def test_work_whose_caller_has_left_keeps_its_turn_until_its_thread_is_free():
    many = BlockedWork(TenantTurns(), "many")
    try:
        for _ in range(3):
            started = [many.start() for _ in range(AT_ONCE)]
            await until(lambda: many.begun == AT_ONCE)
            await asyncio.sleep(0)
            for each in started:
                each.cancel()
            await asyncio.wait(started)
        assert many.begun == AT_ONCE
    finally:
        many.go.set()


async def test_an_error_of_long_work_is_raised_and_its_turn_goes_to_the_next():
    turns = TenantTurns()
    turns.enter("one")
    for _ in range(2 * AT_ONCE):
        with pytest.raises(ZeroDivisionError):
            await off_loop(LONG, lambda: 1 // 0)


async def test_a_lock_goes_to_tenants_in_turns_however_many_tasks_of_one_wait():
    lock, order = TenantLock(), list[str]()

    async def hold(tenant: str) -> None:
        async with lock.of(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(hold(tenant) for tenant in ["many"] * 50 + ["one", "two", "one"]))
    assert sorted(order) == ["many"] * 50 + ["one"] * 2 + ["two"]
    assert max(place for place, tenant in enumerate(order) if tenant != "many") < 8
