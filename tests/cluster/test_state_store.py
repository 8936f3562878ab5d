"""Saved states in a real Redis: full, frozen or killed, it gives misses and no errors."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import redis.asyncio
import torch
from dendro.calls import CloseCall, OpenCall, RequestParameters, TextUpdate, new_opening
from dendro.text import Limits, Sampling, Text

from cluster import redis_server
from cluster.config import Redis
from cluster.redis_server import RedisServer
from cluster.state_store import PART_BYTES, PREFIX, CircuitBreaker, RedisStates
from drafter_service.engine import DrafterEngine
from drafter_service.options import DrafterOptions
from tests.support import tiny_hybrids

MOST = 1 << 20


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
    assert await states.load("a", MOST) is None
    assert await states.save("a", blob)
    assert await states.load("a", MOST) == blob
    assert (states.counters.hits, states.counters.misses, states.counters.saved) == (1, 1, 1)


async def test_a_state_has_a_time_to_live(states: RedisStates, server: RedisServer):
    await states.save("a", b"x")
    raw = redis.asyncio.Redis.from_url(server.url)
    assert 0 < await raw.ttl(PREFIX + "a") <= 30
    await raw.aclose()


async def test_a_state_of_more_bytes_than_the_configuration_allows_is_not_stored(server: RedisServer):
    states = RedisStates(server.url, ttl_s=30, budget_s=5.0, max_bytes=1000)
    assert await states.save("a", bytes(1000)) and not await states.save("b", bytes(1001))
    assert states.counters.refused == 1 and await states.load("b", MOST) is None
    await states.close()


@pytest.fixture
async def roomy():
    """A store that holds large states, and its server's url."""
    with RedisServer(memory_mb=256) as server:
        store = RedisStates(server.url, ttl_s=30, budget_s=5.0)
        yield store, server.url
        await store.close()


@pytest.mark.parametrize("more", [-1, 0, 1, PART_BYTES], ids=["a part but one", "a part", "and a byte", "two parts"])
async def test_a_state_is_read_whole_whatever_its_number_of_parts(roomy, more: int):
    states, _ = roomy
    blob = os.urandom(PART_BYTES + more)
    assert await states.save("a", blob)
    assert await states.load("a", len(blob)) == blob and await states.load("a", len(blob) + MOST) == blob
    assert await states.load("a", len(blob) - 1) is None
    assert (states.counters.hits, states.counters.refused, states.counters.misses) == (2, 1, 0)


async def test_of_a_value_that_is_larger_than_the_state_no_more_is_read_than_the_state_can_have(roomy):
    states, url = roomy
    raw = redis.asyncio.Redis.from_url(url)
    await raw.set(PREFIX + "a", bytes(64 << 20))
    before = (await raw.info("stats"))["total_net_output_bytes"]
    assert await states.load("a", 6 << 20) is None
    sent = (await raw.info("stats"))["total_net_output_bytes"] - before
    assert 6 << 20 < sent < 7 << 20 and states.counters.refused == 1
    await raw.aclose()


GRANITE_H_350M = {
    "head_dim": 64,
    "layer_types": (["mamba"] * 7 + ["attention"]) * 4,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_n_heads": 48,
    "num_attention_heads": 12,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
"""What the sizes of its saved states depend on, as published: 28 mixers with states of 48 x 32 x 128 numbers, and four
layers that attend, with keys and values of 4 x 64 numbers."""
NARROW = {"hidden_size": 24, "mamba_expand": 64, "attention_multiplier": 0.125, "shared_intermediate_size": 8}
"""Its layers' inputs have 768 numbers. States do not depend on that."""


def granite(folder: Path, states: RedisStates) -> DrafterEngine:
    return DrafterEngine.load(folder, DrafterOptions(name="d", dtype=torch.bfloat16, max_sessions=1), states=states)


async def saved_and_restored(folder: Path, states: RedisStates, tokens: int) -> tuple[int, int]:
    """The tokens that one engine saves of a text when it is closed, and that another one restores."""
    text = Text(range(1, 1 + tokens), Sampling(), Limits(tokens + 8))
    answers = []
    for _ in range(2):
        engine, opening = granite(folder, states), new_opening()
        await engine.start()
        try:
            parameters = RequestParameters(text.sampling, text.limits, "", ())
            opened = await engine.open(OpenCall(TextUpdate.of(opening, text, 0), parameters))
            closed = await engine.close(CloseCall(TextUpdate.of(opening, text, tokens)))
        finally:
            await engine.stop()
        answers.append((opened.restored, closed.saved))
    (none, saved), (restored, _) = answers
    assert none == 0
    return saved, restored


@pytest.mark.slow
async def test_the_states_of_granite_4_h_350m_are_kept_and_restored_by_another_replica(roomy, tmp_path: Path):
    states, _ = roomy
    states.max_bytes = Redis().max_state_mb << 20
    tiny_hybrids.make_published(tmp_path, "granite-4.0-h-350m", **GRANITE_H_350M | NARROW)
    assert await saved_and_restored(tmp_path, states, 90) == (89, 89)
    (key,) = await states._redis.keys()
    mixers, keys = 28 * (4 * 48 * 32 * 128 + 2 * 3 * (48 * 32 + 2 * 128)), 4 * 2 * 2 * 4 * 64 * 89
    assert 21 << 20 < mixers < await states._redis.strlen(key) - keys < mixers + (16 << 10)
    assert states.counters.refused == 0


@pytest.mark.slow
async def test_a_state_above_the_configured_size_is_processed_again(roomy, tmp_path: Path):
    states, _ = roomy
    states.max_bytes = 16 << 20
    tiny_hybrids.make_published(tmp_path, "granite-4.0-h-350m", **GRANITE_H_350M | NARROW)
    assert await saved_and_restored(tmp_path, states, 90) == (0, 0)
    assert states.counters.refused == 2


async def test_a_full_server_evicts_keys_that_expire_first_and_the_store_still_works(states: RedisStates):
    for index in range(40):
        await states.save(f"{index}", bytes(1 << 20))
    assert await states.save("last", b"x")
    assert await states.load("last", MOST) == b"x"
    assert await states.load("0", MOST) is None


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_or_frozen_server_is_a_miss_and_then_not_called(fault, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_server, "RESTART_S", 60.0)
    now = 0.0
    with RedisServer(memory_mb=16) as server:
        store = RedisStates(server.url, 30, budget_s=5.0, breaker=CircuitBreaker(3, 5.0, clock=lambda: now))
        assert await store.save("a", b"x")  # connects, which takes longer than 0.05 s on a busy machine
        store.budget_s = 0.05
        os.kill(server.pid, fault)
        for _ in range(3):
            assert await store.load("a", MOST) is None
        assert not await store.save("b", b"x")
        assert (store.counters.errors, store.counters.skipped) == (3, 1)
        now = 5.0
        if fault is signal.SIGSTOP:
            os.kill(server.pid, signal.SIGCONT)
            store.budget_s = 5.0
            assert await store.load("a", MOST) == b"x"
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
