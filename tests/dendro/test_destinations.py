"""Where a client calls: names whose addresses change while it lives, and proxies of the environment."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import grpc
import grpc.aio
import pytest
from dendro import destinations
from dendro.answer import REASON_KEY, Round
from dendro.client import AsyncClient, Client
from dendro.destinations import Destinations
from dendro.errors import Overloaded, PeerLost
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc

from tests.support.sockets import until

HOST = "router.test"


class StubRouter(generation_pb2_grpc.GenerationServiceServicer):
    """Answers with one token, a second one after `finish` is set."""

    def __init__(self) -> None:
        self.calls = 0
        self.full = False
        self.finish = asyncio.Event()
        self.finish.set()

    async def Generate(self, request, context):
        self.calls += 1
        if self.full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "router: full", ((REASON_KEY, "Overloaded"),))
        yield pb.GenerateResponse(started=pb.GenerateStarted(model="m", seed=9, prompt_tokens=3, target="t"))
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(offset=0, token_ids=[1]))
        await self.finish.wait()
        yield pb.GenerateResponse(chunk=pb.GenerateChunk(offset=1, token_ids=[2]))
        usage = pb.Usage(completion_tokens=2)
        yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage))


@asynccontextmanager
async def routers(*hosts: str):
    """Yields a router at each host, all at one port, and the port."""
    async with AsyncExitStack() as stack:
        port, started = 0, []
        for host in hosts:
            server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            router = StubRouter()  # type: ignore[abstract]
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(router, server)
            port = server.add_insecure_port(f"{host}:{port}")
            await server.start()
            stack.push_async_callback(server.stop, 0)
            started.append(router)
        yield started, port


@pytest.fixture
def answers(monkeypatch):
    """The addresses behind HOST. Each call looks them up anew before it goes on."""
    monkeypatch.setattr(destinations, "LOOK_UP_S", -1.0)
    monkeypatch.setattr(destinations, "in_background", lambda work: work())
    return {"127.0.0.1"}


@pytest.fixture(params=["asyncio", "blocking"])
async def ask(request, answers):
    """Calls HOST so often, with one client that lives as long as the test."""
    clients: list[AsyncClient | Client] = []

    async def ask(port: int, count: int) -> None:
        if not clients:
            kind = AsyncClient if request.param == "asyncio" else Client
            clients.append(kind(f"{HOST}:{port}", timeout_s=20.0, look_up=lambda host, port: sorted(answers)))
        for _ in range(count):
            if isinstance(clients[0], AsyncClient):
                await clients[0].generate_text("p")
            else:
                await asyncio.to_thread(clients[0].generate_text, "p")

    yield ask
    for client in clients:
        if isinstance(client, AsyncClient):
            await client.close()
        else:
            client.close()


async def test_a_router_that_is_added_behind_a_name_gets_calls_and_one_that_is_removed_gets_none(ask, answers):
    async with routers("127.0.0.1", "127.0.0.2") as ((old, new), port):
        await ask(port, 4)
        assert (old.calls, new.calls) == (4, 0)
        answers.add("127.0.0.2")
        async with asyncio.timeout(10):
            while not new.calls:  # gRPC divides calls among the routers that it has connected to
                await ask(port, 1)
        answers.remove("127.0.0.1")
        before = old.calls
        await ask(port, 6)
        assert old.calls == before


async def test_a_running_answer_outlives_a_change_of_its_names_addresses(answers):
    async with routers("127.0.0.1", "127.0.0.2") as ((old, new), port):
        old.finish.clear()
        async with AsyncClient(f"{HOST}:{port}", look_up=lambda host, port: sorted(answers)) as client:
            async with aclosing(client.generate("p")) as events:
                await anext(events)
                answers.clear()
                answers.add("127.0.0.2")
                await client.generate_text("p")
                old.finish.set()
                tokens = [token async for event in events if isinstance(event, Round) for token in event.token_ids]
            assert tokens == [1, 2] and (old.calls, new.calls) == (1, 1)
            assert len(client._channels.drain()) == 1, "that of the former address was closed"


async def test_a_call_is_refused_only_where_all_routers_behind_a_name_are_full(ask, answers):
    answers.add("127.0.0.2")
    async with routers("127.0.0.1", "127.0.0.2") as ((full, free), port):
        async with asyncio.timeout(10):
            while not (full.calls and free.calls):  # both are connected
                await ask(port, 1)
        full.full, before = True, free.calls
        await ask(port, 6)
        assert free.calls == before + 6
        free.full = True
        with pytest.raises(Overloaded):
            await ask(port, 1)


async def test_a_look_up_that_finds_nothing_keeps_the_last_addresses(ask, answers):
    async with routers("127.0.0.1") as ((router,), port):
        await ask(port, 1)
        answers.clear()
        await ask(port, 2)
        assert router.calls == 3


@pytest.mark.parametrize(
    ("addresses", "secure", "target"),
    [
        (["10.0.0.2", "10.0.0.1"], False, "ipv4:10.0.0.1:9000,10.0.0.2:9000"),
        (["fd00::1"], False, "ipv6:[fd00::1]:9000"),
        (["10.0.0.1", "fd00::1"], False, f"{HOST}:9000"),
        (["10.0.0.1"], True, f"{HOST}:9000"),
        ([], False, f"{HOST}:9000"),
    ],
    ids=["IPv4", "IPv6", "both", "with certificates", "unknown"],
)
def test_grpc_gets_addresses_where_it_needs_no_name(addresses, secure, target):
    destination = Destinations(True, secure, lambda host, port: addresses).destination(f"{HOST}:9000")
    assert (destination.target, destination.authority, destination.addresses) == (
        target,
        f"{HOST}:9000",
        frozenset(addresses),
    )


@pytest.mark.parametrize("address", ["127.0.0.1:9", "localhost:9", "[::1]:9", "10.0.0.1:9", "unix:/a:9", "dns:///h:9"])
def test_an_address_that_is_no_name_is_not_looked_up(address):
    def fail(host, port):
        raise AssertionError

    assert Destinations(True, False, fail).destination(address).target == address


@pytest.fixture
async def proxy(monkeypatch):
    """The requests to a proxy that the environment names, which refuses all of them."""
    requests: list[bytes] = []

    async def refuse(reader, writer):
        requests.append((await reader.readline()).split(b" HTTP")[0])
        writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    monkeypatch.setenv("http_proxy", f"http://{host}:{port}")
    for name in ("grpc_proxy", "https_proxy", *destinations.NO_PROXY_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    async with server:
        yield requests


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_no_proxy_is_used_for_this_machine(proxy, host):
    async with routers("127.0.0.1") as ((router,), port), AsyncClient(f"{host}:{port}", timeout_s=20.0) as client:
        await client.generate_text("p")
        assert router.calls == 1 and not proxy


@pytest.mark.parametrize(
    ("no_proxy", "proxied", "used"),
    [("", True, True), ("other.test", True, True), (".test", True, False), ("", False, False)],
    ids=["no exception", "of another host", "of this host", "switched off"],
)
async def test_a_proxy_is_used_for_other_hosts_unless_no_proxy_lists_them(proxy, monkeypatch, no_proxy, proxied, used):
    monkeypatch.setenv("no_proxy", no_proxy)
    async with routers("127.0.0.1") as ((router,), port):
        address = f"{HOST}:{port}"
        async with AsyncClient(address, timeout_s=20.0, proxy=proxied, look_up=lambda *_: ["127.0.0.1"]) as client:
            asking = asyncio.create_task(client.generate_text("p"))
            if used:  # each call ends at the proxy, and the client goes on until its time is over
                await until(lambda: proxy)
                assert not asking.done()
                asking.cancel()
                await asyncio.wait({asking})
            else:
                await asking
        assert (router.calls, set(proxy)) == ((0, {f"CONNECT {address}".encode()}) if used else (1, set()))


def test_names_are_looked_up_by_the_system(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 9)) for each in ("10.0.0.1", "10.0.0.1", "10.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, type: found)
    assert Destinations(True, False).destination(f"{HOST}:9").addresses == {"10.0.0.1", "10.0.0.2"}


@pytest.fixture
def hanging():
    """A look-up that does not end before the test, and the hosts whose look-ups have ended."""
    released, ends = threading.Event(), []

    def look_up(host, port):
        released.wait(10)
        ends.append(host)
        return []

    yield look_up, ends
    released.set()


@pytest.mark.parametrize("method", ["models", "abort"])
@pytest.mark.parametrize("kind", [AsyncClient, Client])
async def test_the_deadline_holds_though_a_names_look_up_hangs(hanging, kind, method):
    look_up, ends = hanging
    client = kind("router.onion:9", timeout_s=0.2, look_up=look_up)
    call = getattr(client, method)
    arguments = ["a"] if method == "abort" else []
    with pytest.raises(PeerLost):
        await (asyncio.to_thread(call, *arguments) if kind is Client else call(*arguments))
    assert not ends


@pytest.mark.parametrize("kind", [AsyncClient, Client])
async def test_the_next_address_is_called_though_a_names_look_up_hangs(hanging, kind, monkeypatch):
    """gRPC knows without a look-up that `.onion` has no addresses (RFC 7686)."""
    monkeypatch.setattr(destinations, "LOOK_UP_S", 0.1)
    look_up, ends = hanging
    async with routers("127.0.0.1") as ((router,), port):
        client = kind(f"router.onion:9,127.0.0.1:{port}", timeout_s=20, look_up=look_up)
        await (asyncio.to_thread(client.generate_text, "p") if kind is Client else client.generate_text("p"))
    assert router.calls == 1 and not ends


HANGING = """
import asyncio, threading
from dendro.client import AsyncClient

begun = asyncio.Event()

def look_up(host, port):
    loop.call_soon_threadsafe(begun.set)
    threading.Event().wait()

async def leave():
    global loop
    loop = asyncio.get_running_loop()
    asking = asyncio.create_task(AsyncClient("router.test:9000", look_up=look_up).models())
    await begun.wait()
    asking.cancel()

asyncio.run(leave())
"""


def test_a_process_ends_though_a_names_look_up_hangs():
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=40)
