"""Addresses of IPv6: replicas, workers and status ports that listen at one."""

from __future__ import annotations

import socket

import aiohttp
import pytest
from dendro.servicer import VERIFIER_REPLICA, serve_engine

from cluster.api.health import HealthReport
from cluster.api.status import serve_status
from cluster.peers.stream import VERIFIER, Streams
from tests.support.fakes import FakeVerifier
from verifier_service.shards import Crew


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


async def test_a_replica_at_an_address_of_ipv6_is_reached_at_the_address_that_it_reports():
    replica, streams = await serve_engine(VERIFIER_REPLICA, FakeVerifier(), host="::1"), Streams(VERIFIER)
    try:
        assert replica.address.startswith("[::1]:")
        assert (await streams.to(replica.address)).hello == await FakeVerifier().hello()
    finally:
        await streams.close()
        await replica.stop()


async def test_a_status_port_at_all_addresses_is_read_over_ipv4_and_ipv6():
    runner, port = await serve_status([], lambda: HealthReport(True), "::", (0,), "grpc.status_port")
    try:
        for host in ("127.0.0.1", "[::1]"):
            async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/healthz") as answer:
                assert answer.status == 200, host
    finally:
        await runner.cleanup()


def test_a_leader_at_an_address_of_ipv6_waits_for_its_workers_there():
    invited = []

    def start(invitations):
        invited.extend(invitations)
        raise RuntimeError("no worker is needed")

    with pytest.raises(RuntimeError):
        Crew.start(2, start, "::1")
    assert [each.host for each in invited] == ["::1"]
