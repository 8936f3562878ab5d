"""Clusters on Ray Serve with a Redis of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from cluster import deploy
from cluster.config import Config
from cluster.redis_server import RedisServer


def use_deployed(config: Config, use: Callable[[str], Coroutine[Any, Any, None]], **loaders: Any) -> None:
    """Start a cluster, call `use` with its routers' addresses, and stop it. loaders: of `deploy.start`"""
    with RedisServer() as server:
        addresses = deploy.start(config, server.url, **loaders)
        try:
            asyncio.run(use(addresses))
        finally:
            deploy.stop()


@contextmanager
def no_process_left() -> Iterator[None]:
    """Check that all processes that are started in the context have ended with it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert [child for child in psutil.Process().children(recursive=True) if child not in before] == []
