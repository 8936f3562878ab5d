"""Clients that open many connections, or hold them: others are served, and file descriptors are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from contextlib import asynccontextmanager

import grpc.aio
import pytest
import uvloop
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.api import grpc as grpc_server
from cluster.api import keyless
from cluster.api.grpc import HANDSHAKE_S, most_connections, serve_router
from cluster.api.keyless import network_of_peer
from cluster.api.openai import server as http_server
from cluster.api.places import network_of
from tests.support.certificates import Authority
from tests.support.edge import EdgePeers, ingress
from tests.support.http_api import accepted_by_loop, http_at
from tests.support.sockets import until

MOST = 16
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
OTHER = "127.0.0.2"
"""Another address of this machine, from which a client can call."""


class IdleConnections:
    """Connections of one client that sends nothing."""

    def __init__(self) -> None:
        self.open = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, address: str, connections: int, first: bytes = b"") -> None:
        """Open connections, and count those that the server leaves open."""
        host, _, port = address.rpartition(":")
        for _ in range(connections):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(first)
            self.open += 1
            self._tasks.append(asyncio.create_task(self._hold(reader, writer)))

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                while await reader.read(65536):
                    pass
        finally:
            self.open -= 1
            writer.close()

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def idle_connections():
    made = IdleConnections()
    try:
        yield made
    finally:
        await made.leave()


async def answer_at(address: str, local: str | None = None, context: ssl.SSLContext | None = None) -> bytes:
    """What a new connection gets for a request; empty where it is closed."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, local_addr=(local, 0) if local else None
        )
        try:
            writer.write(HEALTH)
            async with asyncio.timeout(20):
                return await reader.read(12)
        finally:
            writer.close()
    except ConnectionError:
        return b""


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS that does not begin"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop, as in Serve"])
def test_a_client_with_thousands_of_connections_keeps_no_other_address_out(tmp_path, run, tls):
    run(_keep_no_other_address_out(tmp_path, tls))


async def _keep_no_other_address_out(tmp_path, tls):
    authority = Authority(tmp_path, "own")
    sections = {"tls": {"clients": authority.issue("front", "127.0.0.1")}} if tls else {}
    context = ssl.create_default_context(cafile=str(authority.path)) if tls else None
    async with http_at(http={"max_connections": MOST}, **sections) as (server, _), idle_connections() as held:
        before = open_files()
        for _ in range(20):
            await held.join(server.address, 100)
            await until(lambda: held.open <= MOST - MOST // 8)
        await until(lambda: open_files() <= before + 2 * MOST)  # both ends of a connection are of this process
        assert await answer_at(server.address, context=context) == b"", "its address has all that it may have"
        assert await answer_at(server.address, OTHER, context) == b"HTTP/1.1 200"
        assert held.open == MOST - MOST // 8, "connections that were in time stay"
        await held.leave()
        async with asyncio.timeout(20):
            while await answer_at(server.address, context=context) == b"":
                pass  # the server has not seen the end of the others yet


async def test_connections_that_wait_are_accepted_one_in_a_turn_of_the_loop(monkeypatch):
    accepted = accepted_by_loop(monkeypatch)
    async with http_at(http={"max_connections": MOST}) as (server, _):
        host, _, port = server.address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(4 * MOST):  # the loop does not run meanwhile
                stack.enter_context(socket.create_connection((host, int(port))))
            while len(accepted) < 4 * MOST:
                before = len(accepted)
                await asyncio.sleep(0)
                assert len(accepted) - before <= 2


async def test_a_refused_connection_is_counted_as_an_error_that_the_alert_of_errors_sees():
    peers = ingress(EdgePeers(), http={"max_connections": MOST})
    async with http_at(served_ingress=peers) as (server, _), idle_connections() as held:
        await held.join(server.address, MOST)
        await until(lambda: held.open <= MOST - MOST // 8)
        assert peers.totals.errors == {"UNAVAILABLE": MOST // 8}


async def test_a_connection_whose_tls_does_not_begin_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(http_server, "HANDSHAKE_S", 0.2)
    files = Authority(tmp_path, "own").issue("front", "127.0.0.1")
    async with http_at(tls={"clients": files}) as (server, _), idle_connections() as held:
        await held.join(server.address, 3)
        await held.join(server.address, 3, b"\x16\x03\x01")  # the beginning of a handshake
        await until(lambda: not held.open)


async def test_a_client_that_asks_again_and_again_and_reads_nothing_is_ended(monkeypatch):
    """The second answer waits until the first was read, which is not an answer's own time limit."""
    monkeypatch.setattr(http_server, "BODY_S", 0.1)
    monkeypatch.setattr(http_server, "READ_GRACE_S", 0.1)
    async with http_at(router={"request_timeout_s": 0.2}) as (server, _):
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            client.setblocking(False)
            client.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000)
            await until(lambda: server.connections == 1)
            await until(lambda: server.connections == 0)


async def test_without_a_descriptor_left_a_server_serves_again_once_there_is_one(monkeypatch):
    async with http_at() as (server, _), idle_connections() as held:
        loop, failures = asyncio.get_running_loop(), iter(range(3))
        accept = loop.sock_accept

        async def failing(listening):
            if next(failures, None) is not None:
                raise OSError(24, "Too many open files")
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", failing)
        await held.join(server.address, 1)
        assert await answer_at(server.address) == b"HTTP/1.1 200"


def test_an_address_of_ipv6_is_as_one_with_all_of_its_network():
    assert network_of("192.0.2.1") == network_of("::ffff:192.0.2.1") == "192.0.2.1"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") == "2001:db8:0:1::/64"
    assert network_of("fe80::1%eth0") == "fe80::/64"


def test_connections_are_at_most_a_quarter_of_the_files_that_may_be_open(monkeypatch):
    for files, most in ((1024, 256), (1 << 20, 4096), (-1, 4096)):
        monkeypatch.setattr("resource.getrlimit", lambda _, files=files: (files, files))
        assert most_connections(4096) == most


@asynccontextmanager
async def grpc_at(**sections):
    server = await serve_router(ingress(EdgePeers(), **sections))
    try:
        yield server
    finally:
        await server.stop()


SILENT = pytest.mark.parametrize(
    "first", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"], ids=["no handshake", "no call"]
)


@SILENT
async def test_grpc_connections_without_a_call_are_bounded(first):
    async with grpc_at(grpc={"max_connections": MOST}) as server, idle_connections() as held:
        before = open_files()
        await held.join(server.address, 10 * MOST, first)
        await until(lambda: held.open <= MOST, timeout_s=HANDSHAKE_S / 2)  # none is ended by its age
        await until(lambda: open_files() <= before + 3 * MOST)  # both ends of a connection are of this process


@SILENT
async def test_grpc_connections_without_a_call_are_ended(monkeypatch, first):
    options = dict(grpc_server.SERVER_OPTIONS)
    options |= {"grpc.server_handshake_timeout_ms": 300, grpc_server.CONNECTION_AGE: 300}
    monkeypatch.setattr(grpc_server, "SERVER_OPTIONS", tuple(options.items()))
    async with grpc_at() as server, idle_connections() as held:
        await held.join(server.address, MOST, first)
        await until(lambda: not held.open)


async def test_streams_that_would_never_end_do_so_after_the_longest_answer(monkeypatch):
    """Health is watched without a key, so that a stream of it may hold a connection open."""
    options = dict(grpc_server.SERVER_OPTIONS) | {grpc_server.CONNECTION_AGE: 200}
    monkeypatch.setattr(grpc_server, "SERVER_OPTIONS", tuple(options.items()))
    monkeypatch.setattr(grpc_server, "SEND_S", 0.1)
    monkeypatch.setattr(grpc_server, "READ_GRACE_S", 0.1)
    async with (
        grpc_at(router={"request_timeout_s": 0.2}) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(20):
            with pytest.raises(grpc.aio.AioRpcError):
                await watched.read()


async def test_streams_that_need_no_key_are_bounded_and_calls_go_on(monkeypatch):
    monkeypatch.setattr(keyless, "MOST_STREAMS", MOST)
    async with grpc_at() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub, found = health_pb2_grpc.HealthStub(channel), reflection_pb2_grpc.ServerReflectionStub(channel)

        async def begins(call) -> bool:
            try:
                return bool(await call.read())  # false at the end of a stream
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                return False

        watched = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MOST // 2)]
        asked = [found.ServerReflectionInfo() for _ in range(MOST)]
        for each in asked:
            with contextlib.suppress(asyncio.InvalidStateError):  # raised where the stream was refused before
                await each.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        begun = [await begins(each) for each in (*watched, *asked)]
        assert sum(begun) == MOST - MOST // 8
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        own = generation_pb2_grpc.GenerationServiceStub(channel)
        assert (await own.GetServerInfo(pb.GetServerInfoRequest())).models
        for call in (*watched, *asked):
            call.cancel()
        async with asyncio.timeout(20):
            while not await begins(stub.Watch(health_pb2.HealthCheckRequest())):
                pass  # the server has not seen the end of the others yet


async def test_a_watched_name_is_short():
    async with grpc_at() as server, grpc.aio.insecure_channel(server.address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="a" * 1_000_000))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_address_of_a_peer_of_grpc_is_known():
    assert network_of_peer("ipv4:192.0.2.1:5000") == "192.0.2.1"
    assert network_of_peer("ipv6:%5B2001:db8::1%5D:5000") == "2001:db8::/64"
