"""The limit on the duration of a request's calls, which has one timer for all of them."""

from __future__ import annotations

import asyncio

import pytest

from cluster.peers.verifier import CallLimit
from tests.support.virtual_time import virtual_time

LIMIT_S = 10.0


@virtual_time
async def test_a_call_that_takes_longer_than_the_limit_is_cancelled_and_raises_timeout_error():
    limit, call = CallLimit(LIMIT_S), asyncio.get_running_loop().create_future()
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await limit.wait(call)
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(LIMIT_S)
    assert call.cancelled()


@virtual_time
async def test_every_call_has_the_whole_limit():
    limit, loop = CallLimit(LIMIT_S), asyncio.get_running_loop()
    for _ in range(5):
        assert await limit.wait(asyncio.sleep(0.9 * LIMIT_S, "answer")) == "answer"
    began_s = loop.time()
    with pytest.raises(TimeoutError):
        await limit.wait(loop.create_future())
    assert loop.time() - began_s == pytest.approx(LIMIT_S)


@virtual_time
async def test_a_call_may_follow_one_that_timed_out():
    limit = CallLimit(LIMIT_S)
    with pytest.raises(TimeoutError):
        await limit.wait(asyncio.get_running_loop().create_future())
    assert await limit.wait(asyncio.sleep(0.5 * LIMIT_S, "answer")) == "answer"


@virtual_time
async def test_a_cancelled_caller_is_cancelled_and_so_is_its_call():
    limit, call = CallLimit(LIMIT_S), asyncio.get_running_loop().create_future()
    caller = asyncio.create_task(limit.wait(call))
    await asyncio.sleep(1.0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert call.cancelled()


@virtual_time
async def test_the_timer_of_a_closed_limit_holds_nothing():
    limit = CallLimit(LIMIT_S)
    await limit.wait(asyncio.sleep(1.0))
    limit.close()
    assert all(timer.cancelled() for timer in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


@virtual_time
async def test_a_caller_that_is_cancelled_as_its_call_times_out_is_cancelled():
    limit, loop = CallLimit(LIMIT_S), asyncio.get_running_loop()
    caller = asyncio.create_task(limit.wait(loop.create_future()))
    loop.call_later(LIMIT_S, caller.cancel)
    with pytest.raises(asyncio.CancelledError):
        await caller


@virtual_time
async def test_a_task_whose_call_ends_with_another_error_at_the_limit_is_not_cancelled():
    async def fails() -> None:
        try:
            await asyncio.sleep(2 * LIMIT_S)
        except asyncio.CancelledError:
            raise ValueError from None

    with pytest.raises(ValueError):
        await CallLimit(LIMIT_S).wait(fails())
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()
