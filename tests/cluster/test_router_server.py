"""A router's own server: its health, limits, ports and end. Over real sockets, with fake peers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import aclosing, asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from dendro import attempts
from dendro.answer import REASON_KEY, Round
from dendro.client import CHANNEL_OPTIONS, AsyncClient
from dendro.errors import EngineFailed, Overloaded
from dendro.text import Sampling
from dendro.v1 import generation_pb2 as pb
from dendro.v1 import generation_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.api import grpc as api
from cluster.api.collectors import RouterMetrics
from cluster.api.grpc import SERVICE, serve_router
from cluster.api.health import HealthReport
from cluster.api.status import serve_status
from cluster.peers import pools
from cluster.sessions import MemorySessions, Record
from tests.support.edge import ByteTokenizer, EdgePeers, config, ingress, plain_answer
from tests.support.faults import Panic
from tests.support.scraped import total
from tests.support.sockets import end, process, until

PROMPT = "walk the "
IDS = list(PROMPT.encode())
OFF = pb.Speculation(mode=pb.Speculation.MODE_OFF)
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def serving(peers=None, **options):
    """A router's server; `options` of its configuration."""
    server = await serve_router(ingress(peers or EdgePeers(), **options))
    try:
        yield server
    finally:
        await server.stop()


def asking(count=40):
    return pb.GenerateRequest(text=PROMPT, max_new_tokens=count, speculation=OFF)


def accepts(address, host=""):
    """Whether connections are accepted at the address; at its port of another `host`, if given."""
    of, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host or of, int(port))) == 0


async def health_of(channel, name=""):
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
    return answer.status


async def test_a_draining_server_finishes_its_streams_and_takes_no_others():
    async with serving(EdgePeers(0.01)) as server, grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert (await watch.read()).status == SERVING == await health_of(channel)
        call: Any = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asking())
        assert (await call.read()).WhichOneof("event") == "started"
        stopping = asyncio.create_task(server.stop(drain_s=30.0))
        assert (await watch.read()).status == NOT_SERVING, "sent before the streams end"
        await until(lambda: not accepts(server.address))
        tokens: list[int] = []
        while (event := await call.read()) is not EOF:
            tokens += event.chunk.token_ids
        assert tokens == plain_answer(IDS, Sampling(), 40)
        async with asyncio.timeout(15):
            await stopping


async def test_streams_that_outlast_the_drain_end_with_a_status_at_which_clients_resume_and_release_their_peers(
    monkeypatch,
):
    send_status = api._abort

    async def sent_late(*parts: Any) -> None:
        await asyncio.sleep(0.2)
        await send_status(*parts)

    monkeypatch.setattr(api, "_abort", sent_late)
    peers = EdgePeers(0.05)
    async with serving(peers) as server, grpc.aio.insecure_channel(server.address) as channel:
        call: Any = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asking(400))
        assert (await call.read()).WhichOneof("event") == "started"
        stopping = asyncio.create_task(server.stop(drain_s=0.1))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while await call.read() is not EOF:
                pass
        await stopping
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    trailing: Any = ended.value.trailing_metadata()
    assert dict(trailing)[REASON_KEY] == "PeerLost"
    assert {kind for kind, _ in peers.closed} == {"drafter", "verifier"}


async def test_a_call_whose_message_does_not_come_does_not_hold_up_the_end_of_a_router(monkeypatch):
    monkeypatch.setattr(api, "CUT_S", 600.0)
    async with serving() as server, grpc.aio.insecure_channel(server.address) as channel:
        untyped: Any = channel
        calls = [untyped.stream_stream(f"/{SERVICE}/Generate")() for _ in range(2)]
        for call in calls:
            await call.wait_for_connection()
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest())  # an answer says that the server has the calls before it
        async with asyncio.timeout(20):
            await server.stop()
        for call in calls:
            assert await call.code() is not grpc.StatusCode.OK


async def test_an_answer_goes_on_at_another_router_when_its_own_is_stopped():
    """The client's first call is at the first address."""
    async with serving(EdgePeers(0.01)) as first, serving() as second:
        tokens: list[int] = []
        async with AsyncClient(f"{first.address},{second.address}") as client:
            async for event in client.generate(PROMPT, max_new_tokens=60, speculation="off"):
                if isinstance(event, Round):
                    tokens += event.token_ids
                    if len(tokens) == 10:
                        await first.stop()
        assert tokens == plain_answer(IDS, Sampling(), 60)
        assert second.stats()["requests"] == 1


async def test_a_request_past_the_limit_is_refused_while_health_is_answered():
    peers, goes_on = EdgePeers(), asyncio.Event()
    peers.before_round = goes_on.wait
    async with serving(peers, router={"max_requests": 2}) as server, AsyncClient(server.address) as client:
        running = [asyncio.create_task(client.generate_text(PROMPT, max_new_tokens=60)) for _ in range(2)]
        await until(lambda: server.stats()["running"] == 2)
        with pytest.raises(Overloaded, match="2 answers run"):
            await client.generate_text(PROMPT)
        async with grpc.aio.insecure_channel(server.address) as channel:
            assert await health_of(channel) == SERVING
        goes_on.set()
        await asyncio.gather(*running)
        await client.generate_text(PROMPT, max_new_tokens=2)
        stats = server.stats()
    assert (stats["requests"], stats["refused"], stats["running"]) == (3, 1, 0)


async def test_a_panic_of_a_native_library_ends_its_request_with_a_status_at_once(monkeypatch, caplog):
    def encode(self, text, begins):
        raise Panic("index out of bounds")

    async with serving() as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        with monkeypatch.context() as patch, pytest.raises(grpc.aio.AioRpcError) as ended:
            patch.setattr(ByteTokenizer, "encode", encode)
            await stub.Generate(asking(), timeout=30).read()
        assert ended.value.code() is grpc.StatusCode.INTERNAL and "index" not in (ended.value.details() or "")
        assert "index out of bounds" in caplog.text
        assert (await stub.Generate(asking(), timeout=30).read()).WhichOneof("event") == "started"


async def test_reflection_names_the_public_service_and_health():
    async with serving() as server, grpc.aio.insecure_channel(server.address) as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        listed = [each.name async for answer in answers for each in answer.list_services_response.service]
    assert {SERVICE, "grpc.health.v1.Health"} <= set(listed)


@pytest.mark.parametrize("host, elsewhere", [("127.0.0.1", False), ("0.0.0.0", True)])
async def test_only_the_configured_host_is_listened_at(host, elsewhere):
    server = await serve_router(ingress(EdgePeers()), host)
    try:
        assert accepts(server.address, "127.0.0.2") == elsewhere, "another address of this machine"
    finally:
        await server.stop()


async def test_routers_share_a_port_or_take_the_next_one():
    async with serving() as alone:
        port = int(alone.address.rpartition(":")[2])
    two = [await serve_router(ingress(EdgePeers()), ports=[port], share_port=True) for _ in range(2)]
    try:
        assert {each.address for each in two} == {f"127.0.0.1:{port}"}
    finally:
        for each in two:
            await each.stop()
    async with serving() as holder, serving() as other:
        taken = [int(each.address.rpartition(":")[2]) for each in (holder, other)]
        with pytest.raises(EngineFailed, match=r"grpc\.port"):
            await serve_router(ingress(EdgePeers()), ports=taken)
        third = await serve_router(ingress(EdgePeers()), ports=[*taken, 0])
        await third.stop()


class WaitsForever(generation_pb2_grpc.GenerationServiceServicer):
    async def Generate(self, request, context):  # type: ignore[override]
        await asyncio.Event().wait()


def faster(options):
    """The same options with a hundredth of every time but those for which an answer is waited for."""
    return tuple(
        (name, value // 100 if name.endswith("_ms") and "timeout" not in name else value) for name, value in options
    )


@pytest.mark.parametrize("ours", [True, False], ids=["our limits", "gRPC's own"])
async def test_our_clients_keepalive_is_within_our_servers_limits_on_a_silent_stream(ours):
    server = grpc.aio.server(options=faster(api.SERVER_OPTIONS) if ours else None)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(WaitsForever(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=faster(CHANNEL_OPTIONS)) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(asking())
            done, _ = await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=5.0)
            assert bool(done) != ours, "a silent stream lives through 50 pings"
            call.cancel()
    finally:
        await server.stop(0)


class NameServer(asyncio.DatagramProtocol):
    """Answers every question about an IPv4 address with `addresses`."""

    def __init__(self) -> None:
        self.addresses = {"127.0.0.1"}

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, sender: Any) -> None:
        question = data[12 : data.index(0, 12) + 5]
        found = sorted(self.addresses) if question[-4:-2] == b"\0\1" else []
        head = data[:2] + b"\x85\x80\0\1\0" + bytes([len(found)]) + bytes(4)
        records = (b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(each) for each in found)
        self.transport.sendto(head + question + b"".join(records), sender)


@pytest.mark.slow
async def test_any_client_of_grpc_finds_a_router_that_is_added_behind_a_name_and_its_streams_run_on(monkeypatch):
    aged = tuple((name, 200 if name == api.CONNECTION_AGE else value) for name, value in api.SERVER_OPTIONS)
    assert aged != api.SERVER_OPTIONS
    monkeypatch.setattr(api, "SERVER_OPTIONS", aged)
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    first = await serve_router(ingress(EdgePeers(0.02)))
    port = int(first.address.rpartition(":")[2])
    second = await serve_router(ingress(EdgePeers()), "127.0.0.2", [port])
    target = f"dns://127.0.0.1:{transport.get_extra_info('sockname')[1]}/router.test:{port}"
    options = [("grpc.lb_policy_name", "round_robin"), ("grpc.dns_min_time_between_resolutions_ms", 0)]
    try:
        async with grpc.aio.insecure_channel(target, options=options) as channel, asyncio.timeout(20):
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            running: Any = stub.Generate(asking(25))
            assert (await running.read()).WhichOneof("event") == "started"
            names.addresses.add("127.0.0.2")
            while not second.stats()["requests"]:
                assert [event async for event in stub.Generate(asking(1))]
            tokens: list[int] = []
            while (event := await running.read()) is not EOF:
                tokens += event.chunk.token_ids
            assert tokens == plain_answer(IDS, Sampling(), 25)
    finally:
        transport.close()
        await first.stop()
        await second.stop()


async def test_the_other_port_has_metrics_and_health():
    router, report = ingress(EdgePeers()), HealthReport(True)
    server = await serve_router(router)
    try:
        collectors = [RouterMetrics(router, server.stats, lambda: report)]
        status, port = await serve_status(collectors, lambda: report, "127.0.0.1", [0], "grpc.status_port")
        try:
            async with AsyncClient(server.address) as client:
                done = await client.generate_text(PROMPT, max_new_tokens=5, speculation="off")
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:

                async def page(path):
                    async with session.get(path) as answer:
                        return answer.status, await answer.text()

                code, text = await page("/metrics")
                found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
                assert code == 200 and total(text, "dendro_router_rounds_total") == len(done.rounds) == 5
                assert float(found["dendro_router_requests_total"]) == 1 and float(found["dendro_router_running"]) == 0
                assert float(found["process_cpu_seconds_total"]) > 0
                assert await page("/healthz") == (200, '{"serving": true, "faults": {}}\n')
                report = HealthReport(False, {"target demo": "no replica answers"})
                assert await page("/healthz") == (503, f"{report}\n")
                assert total((await page("/metrics"))[1], "dendro_router_fault", part="target demo") == 1
            with pytest.raises(EngineFailed, match="status_port"):
                await serve_status([], lambda: report, "127.0.0.1", [port], "grpc.status_port")
        finally:
            await status.cleanup()
    finally:
        await server.stop()


async def test_answers_survive_a_restart_of_both_routers_at_once(monkeypatch, caplog):
    """Their calls have failed some 30 times each when the routers are there again."""
    monkeypatch.setattr(attempts, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(attempts, "WARNED_AFTER_S", 0.0)
    failures, pause_after = 0, attempts.Attempts.pause_after

    def counted(*arguments):
        nonlocal failures
        failures += 1
        return pause_after(*arguments)

    monkeypatch.setattr(attempts.Attempts, "pause_after", counted)
    two = [await serve_router(ingress(EdgePeers(0.01))) for _ in range(2)]
    addresses = [each.address for each in two]
    async with AsyncClient(",".join(addresses)) as client:

        async def ask(turn):
            done = await client.generate_text(f"{PROMPT}{turn}", max_new_tokens=60, speculation="off")
            assert list(done.token_ids) == plain_answer(f"{PROMPT}{turn}".encode(), Sampling(), 60)

        asked = asyncio.gather(*(ask(turn) for turn in range(4)))
        await until(lambda: sum(each.stats()["rounds"] for each in two) >= 40)
        await asyncio.gather(*(each.stop() for each in two))
        await until(lambda: failures >= 120)
        again = [await serve_router(ingress(EdgePeers()), ports=[int(each.split(":")[1])]) for each in addresses]
        await asked
        await asyncio.gather(*(each.stop() for each in again))
    warned = [each.getMessage() for each in caplog.records if each.name == "dendro.client"]
    assert len(warned) == 4 and all(f"{', '.join(addresses)}: no answer; calls go on for" in each for each in warned)


async def test_a_full_router_beside_a_free_one_refuses_nothing():
    peers = EdgePeers()
    peers.before_round = asyncio.Event().wait  # its answer does not end
    async with serving(peers, router={"max_requests": 1}) as full, serving() as free:
        async with (
            AsyncClient(full.address) as other,
            AsyncClient(f"{full.address},{free.address}") as client,
            aclosing(other.generate(PROMPT, max_new_tokens=400)) as events,
        ):
            await anext(events)
            for _ in range(4):
                done = await client.generate_text(PROMPT, max_new_tokens=5)
                assert list(done.token_ids) == plain_answer(IDS, Sampling(), 5)
        assert (full.stats()["requests"], free.stats()["requests"]) == (1, 4) and full.stats()["refused"]


async def test_with_two_routers_the_death_of_one_fails_no_request():
    """A router killed with requests on it; the next requests go to the other alone."""
    (first, one), (second, two) = await process("edge"), await process("edge")
    try:
        async with AsyncClient(f"{one},{two}") as client:
            begun = 0

            async def ask(turn):
                nonlocal begun
                tokens = []
                async for event in client.generate(f"{PROMPT}{turn}", max_new_tokens=80, speculation="(1,)"):
                    begun += isinstance(event, Round) and event.offset == 0
                    tokens += event.token_ids if isinstance(event, Round) else ()
                assert tokens == plain_answer(f"{PROMPT}{turn}".encode(), Sampling(), 80)

            asked = asyncio.gather(*(ask(turn) for turn in range(16)))
            await until(lambda: begun == 16 or asked.done())
            os.kill(second.pid, signal.SIGKILL)
            await asked
            await asyncio.gather(*(ask(turn) for turn in range(16, 24)))
    finally:
        await end(first, second)


@pytest.mark.long
async def test_no_answer_is_lost_while_routers_are_killed_and_stopped():
    """Five times one of two routers or, the third time, both; they start again at their ports."""
    random = Random(7)
    running = [await process("edge") for _ in range(2)]
    addresses = [address for _, address in running]
    answers = 0

    async def ask(client, each, over):
        nonlocal answers
        while not over.is_set():
            prompt = f"{PROMPT}{each} {answers}"
            done = await client.generate_text(prompt, max_new_tokens=40, speculation="off")
            assert list(done.token_ids) == plain_answer(prompt.encode(), Sampling(), 40)
            answers += 1

    async def fail(which):
        router, address = running[which]
        router.send_signal(random.choice([signal.SIGKILL, signal.SIGTERM]))
        await router.wait()
        running[which] = await process("edge", address.rpartition(":")[2])

    try:
        async with AsyncClient(",".join(addresses)) as client, asyncio.TaskGroup() as group:
            over = asyncio.Event()
            for each in range(6):
                group.create_task(ask(client, each, over))
            for fault in range(5):
                wanted = answers + random.randrange(1, 12)
                await until(lambda wanted=wanted: answers >= wanted, timeout_s=60.0)
                await asyncio.gather(*(fail(which) for which in ((0, 1) if fault % 3 == 2 else (fault % 2,))))
            over.set()
    finally:
        await end(*(router for router, _ in running))
    assert answers >= 5


class Handle:
    """A handle of Serve to a deployment whose first `failures` calls find no replica."""

    lease = None

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, 0
        self.stats = self

    def options(self, stream: bool) -> Handle:
        return self

    async def remote(self) -> dict[str, int]:
        from ray.serve._private.common import DeploymentID
        from ray.serve.exceptions import DeploymentUnavailableError

        self.calls += 1
        if self.calls <= self.failures:
            raise DeploymentUnavailableError(DeploymentID("verifier"))
        return {}


async def test_a_router_waits_for_a_replica_of_every_target_but_those_whose_pool_may_be_empty(monkeypatch):
    monkeypatch.setattr(pools, "REPLICA_POLL_S", 0.0)
    sleepy = {"checkpoint": "none", "autoscaling": {"min_replicas": 0, "max_replicas": 1}}
    models = {"here": {"checkpoint": "none"}, "late": {"checkpoint": "none"}, "sleepy": sleepy}
    handles: dict[str, Any] = {"here": Handle(0), "late": Handle(3), "sleepy": Handle(0)}
    await pools.ServePeers(config(targets=models, drafters={}), handles, {}).wait_for_targets()
    assert {name: each.calls for name, each in handles.items()} == {"here": 1, "late": 4, "sleepy": 0}


class HeldSessions(MemorySessions):
    """Keeps every write waiting until `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def write(self, token: str, tenant: str, record: Record) -> None:
        self.begun.set()
        await self.go.wait()
        await super().write(token, tenant, record)


@asynccontextmanager
async def writing_a_turn():
    """A server that waits in the write of a request's turn, its store, and the call's stub and task."""
    sessions = HeldSessions()
    server = await serve_router(ingress(EdgePeers(), sessions))
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
            request = pb.GenerateRequest(
                text=PROMPT, max_new_tokens=3, speculation=OFF, keep_session=True, request_id="mine"
            )
            call = stub.Generate(request)
            events = asyncio.create_task(collected(call))
            await sessions.begun.wait()
            yield server, sessions, stub, call, events
    finally:
        await server.stop()


async def collected(call: Any) -> list[pb.GenerateResponse]:
    return [event async for event in call]


async def test_a_request_whose_turn_is_being_written_is_not_aborted_and_ends_with_complete():
    async with writing_a_turn() as (_, sessions, stub, _, events):
        assert (await stub.Abort(pb.AbortRequest(request_id="mine"))).aborted == 0
        sessions.go.set()
        complete = (await events)[-1].complete
        assert complete.session
        assert (await sessions.read(complete.session, "")).turn_of("mine") is not None


async def test_a_client_that_leaves_while_its_turn_is_written_leaves_no_request_behind():
    async with writing_a_turn() as (server, _, _, call, events):
        call.cancel()
        await asyncio.wait({events})
        await until(lambda: server.requests.stats()["running"] == 0)
