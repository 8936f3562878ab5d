"""Sessions and states behind Sentinels and in a cluster of Redis: real processes, which fail over."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, asynccontextmanager
from functools import partial

import pytest
from dendro.errors import BadRequest, Conflict, NotFound, PeerLost

from cluster.config import Config
from cluster.policies.prior import Prior, PriorKey
from cluster.redis_address import SeveralNodes, unreadable
from cluster.redis_client import warning_at
from cluster.sessions import Record, RedisSessions
from cluster.state_store import RedisPriors, RedisStates
from tests.support.redis_groups import (
    PASSWORD,
    PLAIN,
    SERVICE,
    Node,
    cluster_of,
    free_ports,
    sentinels,
    until,
    watching,
)

BUDGET_S = 10.0
TARGETS = {"demo": {"checkpoint": "x"}}


def record(version: int) -> Record:
    return Record((1, 2, version), 0, 0, (3,), version, "m", "t", ())


@asynccontextmanager
async def stores(url: str, budget_s: float = BUDGET_S):
    sessions, states = RedisSessions(url, 60, budget_s), RedisStates(url, 60, budget_s)
    try:
        yield sessions, states
    finally:
        await sessions.close()
        await states.close()


async def eventually(call, timeout_s: float = 60.0):
    """The result of a call that is made again while the store does not answer."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await call()
            except PeerLost:
                await asyncio.sleep(0.2)


async def check_all_calls(sessions: RedisSessions, states: RedisStates, count: int = 12) -> list[str]:
    """Sessions and states with keys all over the slots: written, read, of two writers one refused. Returns the
    sessions."""
    tokens = [await sessions.new_token("") for _ in range(count)]
    for number, token in enumerate(tokens):
        await sessions.write(token, "", record(1))
        ends = await asyncio.gather(*(sessions.write(token, "", record(2)) for _ in range(3)), return_exceptions=True)
        assert None in ends and all(each is None or isinstance(each, Conflict) for each in ends)
        assert await sessions.read(token, "") == record(2)
        with pytest.raises(NotFound):
            await sessions.read(token, "another")
        with pytest.raises(Conflict):
            await sessions.write(token, "", record(5))
        assert await states.save(f"s{number}", bytes([number]))
        assert await states.load(f"s{number}", 8) == bytes([number])
    return tokens


async def check_burst(sessions: RedisSessions, states: RedisStates, count: int = 300) -> None:
    """More calls at once than redis-py opens connections for: all succeed."""
    tokens = [await sessions.new_token("") for _ in range(count)]
    await asyncio.gather(*(sessions.write(each, "", record(1)) for each in tokens))
    await asyncio.gather(*(sessions.write(each, "", record(2)) for each in tokens))
    assert await asyncio.gather(*(sessions.read(each, "") for each in tokens)) == [record(2)] * count
    assert all(await asyncio.gather(*(states.save(each, b"x") for each in tokens)))
    assert await asyncio.gather(*(states.load(each, 8) for each in tokens)) == [b"x"] * count
    assert sessions.breaker.counters.failed == states.breaker.counters.failed == 0


@pytest.mark.slow
async def test_a_cluster_of_three_has_sessions_states_and_priors_at_all_of_its_nodes(tmp_path):
    with cluster_of(tmp_path) as (url, nodes):
        async with stores(url) as (sessions, states):
            await check_all_calls(sessions, states)
            await check_burst(sessions, states)
            assert not await sessions.fault()
        priors, key = RedisPriors(url, 60, BUDGET_S), PriorKey("t", ("d",), "0", "x")
        assert await priors.save(key, Prior()) and await priors.load(key) is not None
        await priors.close()
        assert all(node.client.dbsize() for node in nodes), "each node has some of the keys"
        assert "maxmemory-policy" not in await warning_at(url, BUDGET_S)  # noeviction


@pytest.mark.long
async def test_a_session_goes_on_at_the_replica_that_replaces_a_node_of_a_cluster(tmp_path):
    with cluster_of(tmp_path, replicas=1) as (url, nodes):
        async with stores(url, 2.0) as (sessions, states):
            tokens = await check_all_calls(sessions, states, 6)
            nodes[0].client.execute_command("WAIT", 1, 5000)
            nodes[0].kill()
            for token in tokens:
                await written_through_a_failover(sessions, token)


@pytest.mark.slow
async def test_states_of_a_node_of_a_cluster_that_froze_between_calls_are_loaded_from_its_replica(tmp_path):
    names = {f"s{number}" for number in range(12)}
    with cluster_of(tmp_path, replicas=1) as (url, nodes):
        states, loaded = RedisStates(url, 60, 2.0), set()
        for name in names:
            await eventually(partial(saved, states, name))
        nodes[0].client.execute_command("WAIT", 1, 5000)
        nodes[0].freeze()
        until(lambda: nodes[3].client.info("replication")["role"] == "master", "failover")
        for node in nodes[1:]:
            until(lambda node=node: b"cluster_state:ok" in node.client.execute_command("CLUSTER", "INFO"), "cluster")
        async with asyncio.timeout(40):
            while loaded != names:
                loaded |= {name for name in names if await states.load(name, 8) == b"x"}
                await asyncio.sleep(0.1)
        await states.close()


@pytest.mark.slow
async def test_a_session_whose_slot_moves_stops_no_call_of_others(tmp_path):
    with cluster_of(tmp_path) as (url, nodes):
        async with stores(url) as (sessions, states):
            names = [f"s{number}" for number in range(12)]
            for name in names:
                await eventually(partial(saved, states, name))
            ids = [node.client.execute_command("CLUSTER", "MYID").decode() for node in nodes]
            moving = (await asyncio.to_thread(nodes[0].client.keys, "*"))[0]
            slot = nodes[0].client.execute_command("CLUSTER", "KEYSLOT", moving)
            nodes[1].client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            nodes[0].client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
            nodes[0].client.execute_command("MIGRATE", "127.0.0.1", nodes[1].port, moving, 0, 5000, "AUTH", PASSWORD)
            moved = moving.decode().removeprefix(states.prefix)
            for _ in range(4):
                await asyncio.gather(*(states.load(moved, 8) for _ in range(8)))
                for name in names:
                    assert name == moved or await states.load(name, 8) == b"x"
            assert states.breaker.counters.failed == 0


async def saved(states: RedisStates, name: str) -> None:
    if not await states.save(name, b"x"):
        raise PeerLost(name)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", pytest.param("freeze", marks=pytest.mark.long)])
async def test_a_session_goes_on_at_the_server_that_sentinels_make_the_primary(tmp_path, end):
    with sentinels(tmp_path) as (url, primary, _, _):
        async with stores(url, 2.0) as (sessions, states):
            await check_burst(sessions, states)
            tokens = await check_all_calls(sessions, states, 2)
            primary.client.execute_command("WAIT", 1, 5000)
            getattr(primary, end)()
            for token in tokens:
                await written_through_a_failover(sessions, token)
            assert await states.save("later", b"x") and await states.load("later", 8) == b"x"


async def written_through_a_failover(sessions: RedisSessions, token: str) -> None:
    """The next turn's write ends, or its outcome is unknown (PeerLost): never a conflict with itself, nor an unknown
    session. Repeated as a client repeats a request, it is written once."""
    await eventually(lambda: sessions.write(token, "", record(3)))
    assert await eventually(lambda: sessions.read(token, "")) == record(3)
    await eventually(lambda: sessions.write(token, "", record(4)))
    with pytest.raises(Conflict):
        await eventually(lambda: sessions.write(token, "", record(3)))


@pytest.mark.parametrize("gone", ["silent", "closed"])
async def test_a_sentinel_that_is_gone_takes_no_time_from_a_call(tmp_path, gone):
    first, second, port = free_ports(3)
    with ExitStack() as stack:
        if gone == "silent":
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # accepts nothing
            port = silent.getsockname()[1]
        for node in (Node(tmp_path, first, PLAIN), Node(tmp_path, second, watching(first, 1), sentinel=True)):
            stack.callback(node.stop)
            node.ready()
        url = f"redis+sentinel://:{PASSWORD}@127.0.0.1:{port},127.0.0.1:{second}/{SERVICE}"
        async with stores(url) as (sessions, states):
            assert await states.save("a", b"x") and await states.load("a", 8) == b"x"
            assert not await sessions.fault()


async def test_the_fault_of_sentinels_that_are_all_gone_says_why(tmp_path):
    first, second = free_ports(2)
    async with stores(f"redis+sentinel://127.0.0.1:{first},127.0.0.1:{second}/{SERVICE}") as (sessions, _):
        assert "Connect call failed" in await sessions.fault()


def test_an_address_of_several_nodes_is_read_with_its_credentials_and_options():
    found = SeveralNodes.read("rediss+sentinel://u:a%2Fb@h:1,[::1]:2,k/main/3?ssl_ca_certs=/ca&sentinel_password=s%20t")
    assert found.nodes == (("h", 1), ("::1", 2), ("k", 26379)) and found.service == "main" and found.tls
    assert found.sentinel_password == "s t"
    assert dict(found.options) == {"username": "u", "password": "a/b", "db": 3, "ssl_ca_certs": "/ca"}
    cluster = SeveralNodes.read("redis+cluster://h,k:7000")
    assert (cluster.nodes, cluster.service, cluster.tls) == ((("h", 6379), ("k", 7000)), "", False)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://h:1", "names no service"),
        ("redis+sentinel://h:1/a/b", "the database is not a number"),
        ("redis+cluster://h:1/0", "has a path"),
        ("redis+cluster://h:99999", "has no host with a port"),
        ("redis+cluster://", "has no host with a port"),
        ("redis+cluster://:p/q@[::1", "has no host with a port"),
        ("redis+cluster://:p/q\u2100@h", "has no host with a port"),
        ("redis+sentinel://:p/q@h:1/a", "has no host with a port"),
    ],
)
def test_an_address_of_several_nodes_that_cannot_be_read_says_why_without_its_password(url, reason, tmp_path):
    assert reason in unreadable(url) and "p/q" not in unreadable(url)
    with pytest.raises(BadRequest, match=r"redis\.url"):
        Config.of({"targets": TARGETS, "redis": {"url": url}}, tmp_path)


def test_sentinels_have_a_password_of_their_own(tmp_path):
    section = {"url": f"redis+sentinel://h:1/{SERVICE}", "password_variable": "A", "sentinel_password_variable": "B"}
    made = Config.of({"targets": TARGETS, "redis": section}, tmp_path)
    found = SeveralNodes.read(made.redis.address({"A": "x&y", "B": "z/&"}))
    assert (found.options["password"], found.sentinel_password) == ("x&y", "z/&")
    with pytest.raises(BadRequest, match="sentinel_password_variable"):
        made.redis.address({"A": "a"})
    with pytest.raises(BadRequest, match="sentinel_password_variable"):
        Config.of({"targets": TARGETS, "redis": section | {"url": "redis://h:1"}}, tmp_path)
