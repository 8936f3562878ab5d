"""One suite for session records in memory and in a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import redis.asyncio
from dendro.errors import Conflict, NotFound, PeerLost

from cluster.redis_server import RedisServer
from cluster.sessions import (
    MemorySessions,
    Record,
    RedisSessions,
    Sessions,
    Turn,
    check_token,
    pack_record,
    unpack_record,
)

TURN = Turn("request", start=0, prompt=1, end=3, seed=2**64 - 1, finish="length", target="target")
NAME = "1f" * 16
BUDGET_S = 10.0
"""So long that no call fails because the machine is busy."""
RECORD = Record((1, 2, 4_000_000_000), 2**64 - 1, 3, (3,), 1, "demo", "bytes", (TURN,))


@pytest.fixture(scope="module")
def server():
    with RedisServer(memory_mb=16) as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[int], Sessions]]:
    """Makes a store from a time to live in seconds."""
    stores: list[RedisSessions] = []

    def build(ttl_s: int) -> Sessions:
        if request.param == "memory":
            return MemorySessions(ttl_s)
        stores.append(RedisSessions(request.getfixturevalue("server").url, ttl_s, BUDGET_S))
        return stores[-1]

    yield build
    for store in stores:
        await store.close()


async def test_a_written_record_is_read_back(make):
    store = make(60)
    token = await store.new_token("a")
    await store.write(token, "a", RECORD)
    assert await store.read(token, "a") == RECORD


def test_a_turn_in_the_default_mode_is_stored_as_by_releases_without_modes() -> None:
    packed = pack_record(RECORD, NAME)
    assert b'"mode"' not in packed
    assert unpack_record(packed, NAME) == RECORD and RECORD.turns[0].mode == "coupled"
    other = replace(RECORD, turns=(replace(TURN, mode="naive"),))
    assert unpack_record(pack_record(other, NAME), NAME) == other


async def test_tokens_differ_and_contain_128_random_bits(make):
    store = make(60)
    tokens = {await store.new_token("a") for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token.split(".")[0]) for token in tokens} == {22}


@pytest.mark.parametrize("version", [0, 1, 3], ids=["before", "same", "skipped"])
async def test_only_the_next_version_may_be_written(make, version: int):
    store = make(60)
    token = await store.new_token("")
    await store.write(token, "", RECORD)
    with pytest.raises(Conflict):
        await store.write(token, "", replace(RECORD, version=version))
    await store.write(token, "", replace(RECORD, version=2))


async def test_of_concurrent_writers_exactly_one_succeeds(make):
    store = make(60)
    token = await store.new_token("")
    writes = (store.write(token, "", replace(RECORD, seed=seed)) for seed in range(8))
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(result) for result in results].count(Conflict) == 7
    assert results[(await store.read(token, "")).seed] is None


async def test_another_tenant_can_neither_read_nor_write_a_record(make):
    store = make(60)
    token = await store.new_token("a")
    await store.write(token, "a", RECORD)
    with pytest.raises(NotFound):
        await store.read(token, "b")
    with pytest.raises(NotFound):
        await store.write(token, "b", replace(RECORD, version=2))


async def test_a_forged_token_is_unknown(make):
    store = make(60)
    for token in ("", ".", "a.b.c", "AAAAAAAAAAAAAAAAAAAAAA.AAAAAAAAAAAAAAAAAAAAAA", "\N{SNAKE}.x"):
        with pytest.raises(NotFound):
            await store.read(token, "")


async def test_a_record_expires():
    now = 0.0
    store = MemorySessions(10, clock=lambda: now)
    token = await store.new_token("")
    await store.write(token, "", RECORD)
    now = 9.9
    assert await store.read(token, "")
    now = 10.0
    with pytest.raises(NotFound):
        await store.read(token, "")


async def test_every_write_renews_the_time_to_live_in_redis(server: RedisServer):
    store = RedisSessions(server.url, ttl_s=77)
    token = await store.new_token("")
    await store.write(token, "", RECORD)
    raw = redis.asyncio.Redis.from_url(server.url)
    [key] = [key async for key in raw.scan_iter(f"dendro:session:*:{_name(token)}")]
    await raw.expire(key, 5)
    await store.write(token, "", replace(RECORD, version=2))
    assert 70 < await raw.ttl(key) <= 77
    await raw.aclose()
    await store.close()


def _name(token: str) -> str:
    import base64

    return base64.urlsafe_b64decode(token.split(".")[0] + "==").hex()


async def test_two_routers_accept_each_others_tokens(server: RedisServer):
    one, two = RedisSessions(server.url, 60, BUDGET_S), RedisSessions(server.url, 60, BUDGET_S)
    token = await one.new_token("a")
    await one.write(token, "a", RECORD)
    assert await two.read(token, "a") == RECORD
    await one.close()
    await two.close()


async def test_a_dead_store_raises_peer_lost_and_is_not_called_for_a_while():
    with RedisServer(memory_mb=16) as server:
        store = RedisSessions(server.url, 60, budget_s=0.2)
        token = await store.new_token("")
    for _ in range(5):
        with pytest.raises(PeerLost):
            await store.read(token, "")
    assert not store.breaker.allows()
    await store.close()


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"{}",
        b"[]",
        b"[" * 100_000,
        b"\xff",
        pack_record(RECORD, NAME)[:-9],
        pack_record(RECORD, NAME).replace(b'"format": 3', b'"format": 2'),
    ],
    ids=["nothing", "no-field", "list", "nested", "bytes", "cut", "other-format"],
)
def test_a_record_that_cannot_be_parsed_counts_as_missing(blob: bytes):
    assert unpack_record(pack_record(RECORD, NAME), NAME) == RECORD
    with pytest.raises(NotFound):
        unpack_record(blob, NAME)


def test_a_record_with_any_byte_changed_is_the_same_or_counts_as_missing():
    """A changed format may be that of a later release, whose routers read it."""
    written, missing = pack_record(RECORD, NAME), 0
    for at in range(len(written)):
        for changes in (1, 4, 32):  # another letter or digit, and the other case of a letter
            damaged = bytearray(written)
            damaged[at] ^= changes
            try:
                assert unpack_record(bytes(damaged), NAME) == RECORD, damaged
            except (NotFound, PeerLost):
                missing += 1
    assert missing > 2 * len(written)


async def test_the_record_of_another_session_counts_as_missing(server: RedisServer):
    """As where a connection's answer is that to another command."""
    store, raw = RedisSessions(server.url, 60, BUDGET_S), redis.asyncio.Redis.from_url(server.url)
    mine, other = [await store.new_token("a") for _ in range(2)]
    for token, record in ((mine, RECORD), (other, replace(RECORD, tokens=(5, 6, 7)))):
        await store.write(token, "a", record)
    keys = [store._key("a", check_token(token, "a", await store._secret())) for token in (mine, other)]
    await raw.set(keys[0], await raw.get(keys[1]))
    with pytest.raises(NotFound):
        await store.read(mine, "a")
    assert (await store.read(other, "a")).tokens == (5, 6, 7)
    await store.close()
    await raw.aclose()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the first writes first", "the second writes first"])
async def test_routers_accept_each_others_tokens_after_the_store_lost_its_data(order: tuple[int, int]):
    """As after a restart of redis-server without its data. A third router, started later, accepts them too."""
    with RedisServer(memory_mb=16) as server:
        routers = [RedisSessions(server.url, 60, BUDGET_S) for _ in range(2)]
        for router in routers:
            await router.new_token("a")  # both have the old secret
        raw = redis.asyncio.Redis.from_url(server.url)
        await raw.flushall()
        fresh = RedisSessions(server.url, 60, BUDGET_S)
        await fresh.new_token("a")  # and writes a new secret
        for index in order:
            token = await routers[index].new_token("a")
            await routers[index].write(token, "a", RECORD)
            for reader in (*routers, fresh):
                assert await reader.read(token, "a") == RECORD
        await raw.aclose()
        for router in (*routers, fresh):
            await router.close()


async def test_a_record_that_was_lost_is_written_whole(make):
    store = make(60)
    token = await store.new_token("")
    await store.write(token, "", replace(RECORD, version=7))
    assert (await store.read(token, "")).version == 7
    with pytest.raises(Conflict):
        await store.write(token, "", replace(RECORD, version=7))


def test_a_record_finds_the_turn_of_a_request_id():
    other = replace(TURN, request="other", start=3, prompt=4, end=6)
    record = replace(RECORD, turns=(TURN, other))
    assert unpack_record(pack_record(record, NAME), NAME) == record
    assert (record.turn_of("request"), record.turn_of("other"), record.turn_of("third")) == (TURN, other, None)
