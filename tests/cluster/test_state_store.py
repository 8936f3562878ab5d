"""Saved states in a real Redis: full, frozen or killed, it gives misses and no errors."""

from __future__ import annotations

import os
import signal

import pytest
import redis.asyncio

from cluster.redis_server import RedisServer
from cluster.state_store import MAX_STATE_BYTES, PREFIX, CircuitBreaker, RedisStates


@pytest.fixture
def server():
    with RedisServer(memory_mb=16) as server:
        yield server


@pytest.fixture
async def states(server: RedisServer):
    store = RedisStates(server.url, ttl_s=30, budget_s=0.5)
    yield store
    await store.close()


async def test_a_saved_state_is_loaded_and_counted(states: RedisStates):
    blob = os.urandom(100_000)
    assert await states.load("a") is None
    assert await states.save("a", blob)
    assert await states.load("a") == blob
    assert (states.counters.hits, states.counters.misses, states.counters.saved) == (1, 1, 1)


async def test_a_state_has_a_time_to_live(states: RedisStates, server: RedisServer):
    await states.save("a", b"x")
    raw = redis.asyncio.Redis.from_url(server.url)
    assert 0 < await raw.ttl(PREFIX + "a") <= 30
    await raw.aclose()


async def test_a_state_that_is_too_large_is_refused(states: RedisStates):
    assert not await states.save("a", bytes(MAX_STATE_BYTES + 1))
    assert states.counters.refused == 1


async def test_a_full_server_evicts_keys_that_expire_first_and_the_store_still_works(states: RedisStates):
    for index in range(40):
        await states.save(f"{index}", bytes(1 << 20))
    assert await states.save("last", b"x")
    assert await states.load("last") == b"x"
    assert await states.load("0") is None


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_server_is_a_miss_and_then_not_called(fault: signal.Signals):
    now = 0.0
    with RedisServer(memory_mb=16) as server:
        store = RedisStates(server.url, 30, budget_s=5.0, breaker=CircuitBreaker(3, 5.0, clock=lambda: now))
        assert await store.save("a", b"x")  # connects, which takes longer than 0.05 s on a busy machine
        store.budget_s = 0.05
        os.kill(server.pid, fault)
        for _ in range(3):
            assert await store.load("a") is None
        assert not await store.save("b", b"x")
        assert (store.counters.errors, store.counters.skipped) == (3, 1)
        os.kill(server.pid, signal.SIGCONT)
        now = 5.0
        if fault is signal.SIGSTOP:
            store.budget_s = 5.0
            assert await store.load("a") == b"x"
        await store.close()


def test_an_open_circuit_allows_one_probe_and_closes_when_it_succeeds():
    now = 0.0
    breaker = CircuitBreaker(2, 5.0, clock=lambda: now)
    breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    now = 5.0
    assert breaker.allows() and not breaker.allows()
    breaker.succeeded()
    assert breaker.allows() and breaker.allows()
