"""Clients of Redis: how a lost connection is renewed, what an error says, and which keys a full server evicts."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
import redis.exceptions
from dendro.tasks import BackgroundTasks
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedSSLConnection,
)
from redis.backoff import ExponentialBackoff, NoBackoff

from cluster.redis_address import SeveralNodes, has_several_nodes
from cluster.redis_cluster import RedisClusterClient

REDIS_FAULTS = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError, TimeoutError, ValueError)
"""ValueError: what redis-py raises where an answer has something else than a number."""
RENEWALS = 2
"""Times that a command whose connection breaks is sent again, over new connections: any command may be sent twice."""
RENEWED_AFTER = (redis.exceptions.ConnectionError, redis.exceptions.ReadOnlyError)
"""READONLY: the server was the primary when the connection was made. A new connection reaches the present one."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Keeps an idle connection alive in load balancers, which drop one after 60 to 350 s, and ends one whose peer is gone.
Beside a retry, redis-py's own health check recurses without end where the server wants a password and none is given.
"""

STATES_FIRST = frozenset({"volatile-ttl", "noeviction"})
"""The maxmemory-policies that evict no session before a saved state, unless the session has less time left."""


_ASKED = BackgroundTasks(expected=Exception)  # Sentinels that are asked; the first answer ends the wait for the others

AnyClient = redis.asyncio.Redis | RedisClusterClient
"""Clients of a server, of the primary that Sentinels name, or of a cluster."""


def connect(url: str, budget_s: float) -> AnyClient:
    """A client of what is at `url`. It connects at its first command, within `budget_s`."""
    options: dict[str, Any] = {
        "socket_connect_timeout": budget_s,
        "retry": Retry(ExponentialBackoff(cap=budget_s / 10, base=budget_s / 100), RENEWALS),
        "retry_on_error": list(RENEWED_AFTER),
    }
    if not url.startswith("unix:"):
        numbers = {getattr(socket, name): value for name, value in KEEPALIVE.items() if hasattr(socket, name)}
        options |= {"socket_keepalive": True, "socket_keepalive_options": numbers}
    if not has_several_nodes(url):
        return redis.asyncio.Redis.from_url(url, **options)
    several = SeveralNodes.read(url)
    options |= several.options
    return _of_primary(several, options) if several.service else RedisClusterClient(several.nodes, several.tls, options)


def _of_primary(several: SeveralNodes, options: dict[str, Any]) -> redis.asyncio.Redis:
    """A client of the primary; each new connection asks the Sentinels which server that is."""
    trust = {name: value for name, value in options.items() if name.startswith("ssl_")}
    asking: dict[str, Any] = {"socket_timeout": options["socket_connect_timeout"], "retry": Retry(NoBackoff(), 1)}
    asking |= {"socket_connect_timeout": options["socket_connect_timeout"], **trust}
    asking |= {"ssl": True} if several.tls else {}
    asking |= {"password": several.sentinel_password} if several.sentinel_password else {}
    sentinel = _Sentinels(several.nodes, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]  # redis-py's
    kind = {"connection_class": SentinelManagedSSLConnection} if several.tls else {}
    pool = _PrimaryPool(several.service, sentinel, **options, **kind)  # type: ignore[no-untyped-call]  # redis-py's
    return redis.asyncio.Redis.from_pool(pool)


class _Sentinels(Sentinel):
    """Asks all Sentinels at once: redis-py asks one after another, and a call's time ends at the first that is gone."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        asked = [_ASKED.start(_masters_of(each)) for each in self.sentinels]
        failed: Exception | None = None
        for answer in asyncio.as_completed(asked):
            try:
                state = (await answer).get(service_name)
            except redis.exceptions.RedisError as error:
                failed = error
            else:
                if state and self.check_master_state(state, service_name):
                    return state["ip"], state["port"]
        raise MasterNotFoundError(f"no Sentinel names a primary of {service_name}") from failed


async def _masters_of(sentinel: redis.asyncio.Redis) -> Any:
    return await sentinel.sentinel_masters()


class _PrimaryPool(SentinelConnectionPool):
    """Connections to the primary. Closes those to the Sentinels, too."""

    async def aclose(self) -> None:
        await super().aclose()
        for each in self.sentinel_manager.sentinels:
            await each.aclose()


async def drop_idle(client: AnyClient) -> None:
    """Close the connections that no call uses, so that the next call makes a new connection."""
    if isinstance(client, RedisClusterClient):
        await client.drop_idle()
    else:
        await client.connection_pool.disconnect(inuse_connections=False)


@asynccontextmanager
async def transaction(client: AnyClient, key: str) -> AsyncIterator[Pipeline]:
    """A transaction on one key. Raises WatchError where another change came first, or the key has moved to another
    node: then it can be made again."""
    if not isinstance(client, RedisClusterClient):
        async with client.pipeline(transaction=True) as pipe:
            yield pipe
        return
    node = await client.node_of(key)
    try:
        async with node.pipeline(transaction=True) as pipe:
            yield pipe
    except redis.exceptions.MovedError as error:
        await client.learn_nodes()
        raise redis.exceptions.WatchError("the key has moved") from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, redis.exceptions.ClusterDownError):
        await client.learn_nodes()  # a replica may have become the primary
        raise


def answers(error: BaseException) -> bool:
    """True if a fault is the server's own answer to a command, so that other commands may succeed. ClusterError: nodes
    sent the command to each other, as its slot moves."""
    return isinstance(error, redis.exceptions.ResponseError | redis.exceptions.ClusterError)


def reason_of(error: BaseException) -> str:
    """What a fault of a call says, beginning with Redis' own word (OOM, WRONGPASS, MOVED, ...), or with the kind of the
    error where it is not an answer of the server."""
    if isinstance(error, redis.exceptions.ConnectionError):  # the server may have refused it, for a reason
        error = error.__cause__ or error
    text = str(error)
    found = re.search(r"\) of pipeline caused error: \(?(.*?),?\)?$", text, re.DOTALL)  # the command precedes it
    text = found[1].strip("'\"") if found else text
    word = getattr(error, "status_code", None) or type(error).__name__
    return f"{word}: {text}" if text else word


async def eviction_warning(client: AnyClient) -> str:
    """What a full server would evict that it should not; empty where it would not, or where CONFIG is not allowed.
    Raises one of REDIS_FAULTS where the server does not answer."""
    try:
        found = await client.config_get("maxmemory-policy")
    except (redis.exceptions.ResponseError, AttributeError):  # managed servers forbid it, or the answer is no map
        return ""
    policy = found.get("maxmemory-policy")
    if not policy or policy in STATES_FIRST:
        return ""
    return (
        f"redis: its maxmemory-policy is {policy}: when it is full, it evicts sessions before saved states; "
        "set volatile-ttl or noeviction"
    )


async def warning_at(url: str, budget_s: float) -> str:
    """`eviction_warning` of the server at `url`. Raises one of REDIS_FAULTS where it does not answer in time."""
    client = connect(url, budget_s)
    try:
        async with asyncio.timeout(budget_s):
            await client.execute_command("PING")
            return await eviction_warning(client)
    finally:
        await client.aclose()
