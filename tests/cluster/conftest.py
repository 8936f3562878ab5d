"""Servers that several test files of this folder use."""

from __future__ import annotations

import pytest

from cluster.api.grpc import serve_router
from cluster.redis_server import RedisServer
from tests.support.edge import EdgePeers, ingress


@pytest.fixture
async def address():
    """A router of fake peers, over a socket."""
    server = await serve_router(ingress(EdgePeers()))
    yield server.address
    await server.stop()


@pytest.fixture(scope="module")
def redis_url():
    """A Redis of a module's tests, which none of them harms."""
    with RedisServer(memory_mb=64) as server:
        yield server.url
