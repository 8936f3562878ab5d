"""Faults of Redis and of the way to it, each with a real server: lost connections are renewed, reasons are reported."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
import redis.asyncio
import yaml
from dendro.errors import Conflict, NotFound, PeerLost

from cluster.redis_client import eviction_warning
from cluster.redis_server import RedisServer, find_redis_server
from cluster.sessions import SECRET_KEY, Record, RedisSessions
from cluster.state_store import RedisStates
from tests.support.chart import ROOT, rendered
from tests.support.sockets import until

BUDGET_S = 10.0
"""So long that no call fails because the machine is busy; a dropped connection costs half of it."""
RECORD = Record((1, 2), 0, 0, (2,), 1, "m", "t", ())
MOST = 1 << 20


@pytest.fixture
def server():
    with RedisServer(memory_mb=16) as server:
        yield server


@contextmanager
def admin(server: RedisServer):
    """A client for commands that a test gives the server; its connection stays in use."""
    with redis.Redis.from_url(server.url, single_connection_client=True) as client:
        yield client


@asynccontextmanager
async def stores(url: str, budget_s: float = BUDGET_S) -> AsyncIterator[tuple[RedisSessions, RedisStates, str]]:
    """Both stores after their first calls, and the token of a session with a record."""
    sessions, states = RedisSessions(url, 60, budget_s), RedisStates(url, 60, budget_s)
    token = await sessions.new_token("")
    await sessions.write(token, "", RECORD)
    assert await states.save("a", b"x")
    yield sessions, states, token
    await sessions.close()
    await states.close()


class Proxy:
    """A TCP port before a server's socket: what a load balancer does with connections."""

    def __init__(self, server: RedisServer) -> None:
        self.target = server
        self._stalled: set[int] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.accepted = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    def drop_silently(self) -> None:
        """Forward nothing more over the connections that there are, and close none."""
        self._stalled.update(range(self.accepted))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.accepted = self.accepted, self.accepted + 1
        there, back = await asyncio.open_unix_connection(urlsplit(self.target.url).path)
        self._writers += (writer, back)
        await asyncio.gather(
            self._forward(reader, back, number), self._forward(there, writer, number), return_exceptions=True
        )
        writer.close()
        back.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while data := await reader.read(1 << 16):
            if number not in self._stalled:
                writer.write(data)
        writer.close()


async def check_first_calls(sessions: RedisSessions, states: RedisStates, token: str) -> None:
    """A read, a write and a state's read, each the first call over its connection."""
    assert await sessions.read(token, "") == RECORD
    assert await states.load("a", MOST) == b"x"
    assert states.counters.errors == 0 and states.breaker.allows()


async def test_a_secret_of_another_length_makes_no_token_and_is_not_written_again(server: RedisServer):
    """Whoever can write one key, or an answer to another command, would else decide what makes tokens."""
    async with stores(server.url) as (sessions, _, token):
        for wrong in (b"", b"hello", bytes(33)):
            with admin(server) as client:
                own = client.getset(SECRET_KEY, wrong)
                with pytest.raises(PeerLost, match=f"session-secret has {len(wrong)} bytes, not 32"):
                    await sessions.new_token("")
                client.delete(SECRET_KEY)
                assert await sessions.read(token, "") == RECORD
                assert client.get(SECRET_KEY) == own


def are_closed(server: RedisServer) -> bool:
    """True if the server has closed all connections but the one that asks, which it may close too."""
    with contextlib.suppress(redis.ConnectionError), admin(server) as client:
        return len(client.client_list()) == 1
    return False


async def test_the_first_call_after_the_server_closed_idle_connections_succeeds(server: RedisServer):
    async with stores(server.url) as (sessions, states, token):
        with admin(server) as client:
            client.config_set("timeout", 1)  # the server closes those that are idle for a second
        await until(lambda: are_closed(server))
        await check_first_calls(sessions, states, token)


@pytest.mark.parametrize("call", ["read", "write", "new_token", "load", "save"])
async def test_a_call_whose_connection_was_closed_is_made_over_a_new_one(server: RedisServer, call: str):
    async with stores(server.url) as (sessions, states, token):
        with admin(server) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        if call == "write":
            await sessions.write(token, "", Record((1, 2, 3), 0, 0, (2, 3), 2, "m", "t", ()))
        elif call == "new_token":
            assert await sessions.new_token("")
        elif call == "save":
            assert await states.save("b", b"y")
        else:
            await check_first_calls(sessions, states, token)
        assert states.counters.errors == 0


@pytest.mark.parametrize("call", ["read", "write", "save"])
async def test_a_connection_that_a_load_balancer_dropped_silently_costs_half_a_budget_and_no_error(
    server: RedisServer, call: str
):
    proxy = Proxy(server)
    async with proxy as url, stores(url) as (sessions, states, token):
        proxy.drop_silently()
        sessions.budget_s = states.budget_s = 2.0
        if call == "write":
            await sessions.write(token, "", Record((1, 2, 3), 0, 0, (2, 3), 2, "m", "t", ()))
        elif call == "save":
            assert await states.save("b", b"y")
        else:
            await check_first_calls(sessions, states, token)
        assert states.counters.errors == 0 and sessions.breaker.allows()


@pytest.mark.parametrize(
    "answer", [b"$x\r\n", b":x\r\n", b"*x\r\n", b",x\r\n", b"$-5\r\n", b":5\r\n", b"*0\r\n", b"HTTP/1.1\r\n"]
)
async def test_what_answers_as_no_redis_does_is_a_miss_and_the_reason_of_an_error(answer: bytes):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        sessions, states = RedisSessions(url, 60, BUDGET_S), RedisStates(url, 60, BUDGET_S)
        assert await states.load("a", MOST) is None and not await states.save("a", b"x")
        with pytest.raises(PeerLost, match="session: the store (fails|answers)"):
            await sessions.read("a.b", "")
        await sessions.fault()
        await sessions.warning()
        await sessions.close()
        await states.close()


async def test_after_a_failover_the_old_primary_is_left(server: RedisServer):
    """The address leads to the new primary; the connections that there are still lead to the old one, which refuses
    writes from now on."""
    proxy = Proxy(server)
    with RedisServer(memory_mb=16) as promoted:
        async with proxy as url, stores(url) as (sessions, states, token):
            with admin(server) as old, admin(promoted) as new:
                for key in old.scan_iter():
                    new.restore(key, 0, old.dump(key))
                old.replicaof("127.0.0.1", 1)
                proxy.target = promoted
                later = Record((1, 2, 3), 0, 0, (2, 3), 2, "m", "t", ())
                await sessions.write(token, "", later)
                assert await states.save("b", b"y") and states.counters.errors == 0
                assert await sessions.read(token, "") == later
                assert new.exists("dendro:state:b") and not old.exists("dendro:state:b")


async def test_a_write_whose_answer_is_lost_is_read_back_and_is_no_conflict(server: RedisServer):
    """The server has executed it, and the connection that would bring the answer is dropped."""
    proxy = Proxy(server)
    async with proxy as url, stores(url) as (sessions, _, token):
        forward = proxy._forward

        async def losing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
            while data := await reader.read(1 << 16):
                if number not in proxy._stalled:
                    writer.write(data)  # the server executes it
                if b"EXEC" in data:
                    proxy._stalled.add(number)

        proxy._forward = losing
        await sessions._redis.connection_pool.disconnect()
        sessions.budget_s = 2.0
        later = Record((1, 2, 3), 0, 0, (2, 3), 2, "m", "t", ())
        await sessions.write(token, "", later)
        assert proxy._stalled, "no answer was lost"
        proxy._forward = forward
        proxy._stalled.clear()
        await sessions._redis.connection_pool.disconnect()
        assert await sessions.read(token, "") == later


def later_record(tokens: int) -> Record:
    return Record(tuple(range(tokens)), 0, 0, (tokens,), 2, "m", "t", ())


async def test_a_full_server_is_named_as_the_reason_and_is_still_read(server: RedisServer, caplog):
    async with stores(server.url) as (sessions, states, token):
        with admin(server) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
        for _ in range(4):
            with pytest.raises(PeerLost, match="the store fails: OOM: command not allowed") as failed:
                await sessions.write(token, "", later_record(9))
            assert "dendro:session" not in str(failed.value)
            assert not await states.save("b", b"y")
        await check_reads(sessions, states, token)
        warnings = [each.message for each in caplog.records if each.levelno == logging.WARNING]
        assert len(warnings) == 2 and all("OOM" in each for each in warnings), "one for each store, however many calls"


async def test_a_server_that_is_read_only_is_named_as_the_reason_and_is_no_conflict(server: RedisServer):
    """A replica that Sentinels or a load balancer still take for the primary. redis-py reports it, and each connection
    that breaks within a transaction, as a change of the key."""
    async with stores(server.url) as (sessions, states, token):
        with admin(server) as client:
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(PeerLost, match="the store fails: READONLY: You can't write"):
                await sessions.write(token, "", later_record(9))
            await check_reads(sessions, states, token)
            client.replicaof("NO", "ONE")
        await sessions.write(token, "", later_record(9))


async def test_a_write_whose_connection_breaks_each_time_is_no_conflict(server: RedisServer):
    proxy = Proxy(server)
    async with proxy as url, stores(url) as (sessions, _, token):
        forward, broken = proxy._forward, 0

        async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
            nonlocal broken
            while (data := await reader.read(1 << 16)) and b"EXEC" not in data:
                writer.write(data)
            broken += bool(data)
            writer.close()

        proxy._forward = breaking
        await sessions._redis.connection_pool.disconnect()
        with pytest.raises(PeerLost, match="the store fails"):
            await sessions.write(token, "", later_record(9))
        assert broken > 1
        proxy._forward = forward
        await sessions._redis.connection_pool.disconnect()
        assert await sessions.read(token, "") == RECORD


async def check_reads(sessions: RedisSessions, states: RedisStates, token: str) -> None:
    assert await sessions.read(token, "") == RECORD
    assert await states.load("a", MOST) == b"x"


@pytest.mark.parametrize(("given", "reason"), [(":wrong@", "WRONGPASS"), ("", "NOAUTH")])
async def test_a_wrong_or_missing_password_is_named_as_the_reason(server: RedisServer, caplog, given: str, reason: str):
    with admin(server) as client:
        client.config_set("requirepass", "right")
    url = server.url.replace("unix://", f"unix://{given}")
    sessions, states = RedisSessions(url, 60, BUDGET_S), RedisStates(url, 60, BUDGET_S)
    with pytest.raises(PeerLost, match=f"the store fails: {reason}"):
        await sessions.new_token("")
    assert await states.load("a", MOST) is None
    warnings = [each.message for each in caplog.records if reason in each.message]
    assert len(warnings) == 2 and ":wrong@" not in "".join(warnings)
    await sessions.close()
    await states.close()


@contextmanager
def cluster_node():
    """A server in cluster mode without slots."""
    folder = Path(tempfile.mkdtemp(prefix="dendro-test-"))
    where = folder / "redis.sock"
    words = ["--port", "0", "--unixsocket", str(where), "--dir", str(folder), "--save", "", "--cluster-enabled", "yes"]
    process = subprocess.Popen([str(find_redis_server()), *words], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(unix_socket_path=str(where))
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert process.poll() is None
        yield f"unix://{where}", client
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


async def test_a_cluster_that_is_down_is_named_as_the_reason():
    with cluster_node() as (url, _):
        sessions = RedisSessions(url, 60, BUDGET_S)
        with pytest.raises(PeerLost, match="the store fails: CLUSTERDOWN"):
            await sessions.new_token("")
        await sessions.close()


async def test_a_cluster_that_has_the_key_at_another_node_is_named_as_the_reason():
    """A server of the test's own: every command is answered with MOVED."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                commands = data.count(b"\r\n*") + data.startswith(b"*")
                writer.write(b"-MOVED 3999 10.0.0.7:6381\r\n" * commands)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sessions = RedisSessions(f"redis://127.0.0.1:{port}/0?protocol=2", 60, BUDGET_S)
    with pytest.raises(PeerLost, match="the store fails: MOVED: 3999 10.0.0.7:6381"):
        await sessions.new_token("")
    await sessions.close()
    server.close()


async def test_a_server_that_is_not_there_is_named_as_the_reason():
    sessions = RedisSessions("unix:///nowhere/redis.sock", 60, BUDGET_S)
    with pytest.raises(PeerLost, match="the store fails: ConnectionError: .*nowhere"):
        await sessions.new_token("")
    await sessions.close()


@pytest.mark.parametrize(
    ("policy", "warns"),
    [("volatile-ttl", False), ("noeviction", False), ("volatile-lru", True), ("allkeys-lru", True)],
)
async def test_a_policy_that_evicts_sessions_before_states_is_warned_of(server: RedisServer, policy: str, warns: bool):
    with admin(server) as client:
        client.config_set("maxmemory-policy", policy)
    sessions = RedisSessions(server.url, 60, BUDGET_S)
    assert (policy in await sessions.warning()) == warns
    await sessions.close()


async def test_a_server_that_does_not_tell_its_policy_is_not_warned_of(server: RedisServer):
    with admin(server) as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">word", "~*", "+@all", "-config")
    url = server.url.replace("unix://", "unix://app:word@")
    client = redis.asyncio.Redis.from_url(url)
    assert await eviction_warning(client) == ""
    await client.aclose()


WEEK_S, DAY_S = 7 * 24 * 3600, 24 * 3600
SESSIONS = 50


async def sessions_left(server: RedisServer, policy: str, samples: str) -> int:
    """How many of one tenant's sessions are left once another's states have filled the server several times over."""
    with admin(server) as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory-samples", samples)
    sessions, states = RedisSessions(server.url, WEEK_S, BUDGET_S), RedisStates(server.url, DAY_S, BUDGET_S)
    tokens = [await sessions.new_token("one") for _ in range(SESSIONS)]
    for token in tokens:
        await sessions.write(token, "one", RECORD)
    for number in range(60):
        assert await states.save(f"{number}", bytes(1 << 20))
    left = 0
    for token in tokens:
        with contextlib.suppress(NotFound):
            left += await sessions.read(token, "one") == RECORD
    with admin(server) as client:
        assert client.info("stats")["evicted_keys"] > 40
    await sessions.close()
    await states.close()
    return left


def deployed() -> set[tuple[str, str]]:
    """The maxmemory-policies of the chart's and the compose file's Redis, each with its number of samples."""
    command = yaml.safe_load((ROOT / "deploy" / "docker" / "compose.yaml").read_text())["services"]["redis"]["command"]
    _, stateful = rendered()["redis.yaml"]
    words = stateful["spec"]["template"]["spec"]["containers"][0]["args"]
    options = ("--maxmemory-policy", "--maxmemory-samples")
    return {(policy, samples) for policy, samples in (map(partial(_after, each), options) for each in (command, words))}


def _after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


async def test_in_a_full_server_that_we_deploy_sessions_of_a_week_outlive_the_states_of_another_tenant(
    server: RedisServer,
):
    with admin(server) as client:
        embedded = tuple(client.config_get("maxmemory-*")[each] for each in ("maxmemory-policy", "maxmemory-samples"))
    assert deployed() == {embedded}
    assert await sessions_left(server, *embedded) == SESSIONS
    assert await eviction_warning_of(server) == ""


async def test_with_a_policy_that_is_warned_of_sessions_go_for_states(server: RedisServer):
    assert await sessions_left(server, "volatile-lru", "64") < SESSIONS
    assert "volatile-lru" in await eviction_warning_of(server)


async def eviction_warning_of(server: RedisServer) -> str:
    sessions = RedisSessions(server.url, WEEK_S, BUDGET_S)
    warning = await sessions.warning()
    await sessions.close()
    return warning


async def test_three_hundred_reads_and_writes_at_once_succeed(server: RedisServer):
    async with stores(server.url) as (sessions, states, token):
        tokens = [await sessions.new_token("") for _ in range(300)]
        await asyncio.gather(*(sessions.write(each, "", RECORD) for each in tokens))
        assert await asyncio.gather(*(sessions.read(each, "") for each in tokens)) == [RECORD] * 300
        assert all(await asyncio.gather(*(states.save(each, b"x") for each in tokens)))
        assert await asyncio.gather(*(states.load(each, MOST) for each in tokens)) == [b"x"] * 300
        assert sessions.breaker.counters.failed == states.breaker.counters.failed == 0


async def test_a_call_that_waits_too_long_for_its_turn_does_not_count_as_a_failure(server: RedisServer, monkeypatch):
    monkeypatch.setattr("cluster.sessions.TURN_S", 0.01)
    monkeypatch.setattr("cluster.state_store.CALLS_AT_ONCE", 1)
    async with stores(server.url) as (sessions, states, token):
        states.budget_s = 0.01
        async with sessions._turns.take(1.0), states._turns.take(1.0):
            for _ in range(5):
                with pytest.raises(PeerLost, match="busy"):
                    await sessions.read(token, "")
                assert await states.load("a", MOST) is None
        states.budget_s = BUDGET_S
        await check_reads(sessions, states, token)
        assert sessions.breaker.counters.failed == states.breaker.counters.failed == 0


async def test_records_that_wait_for_a_thread_are_read_and_written_and_count_as_no_failure(server, monkeypatch):
    async def late(tokens: int, work):
        await asyncio.sleep(0.7)
        return work()

    async with stores(server.url) as (sessions, _, token):
        sessions.budget_s = 0.6
        monkeypatch.setattr("cluster.sessions.off_loop", late)
        later = later_record(3)
        await sessions.write(token, "", later)
        assert await sessions.read(token, "") == later
        with pytest.raises(Conflict):
            await sessions.write(token, "", later)
        assert sessions.breaker.counters.failed == 0


async def test_a_record_longer_than_any_of_ours_counts_as_missing_and_is_not_read_whole(server, monkeypatch):
    async with stores(server.url) as (sessions, _, token):
        monkeypatch.setattr("cluster.sessions.MAX_RECORD_BYTES", 100)
        with pytest.raises(NotFound):
            await sessions.read(token, "")
        with pytest.raises(NotFound):
            await sessions.write(token, "", later_record(3))
