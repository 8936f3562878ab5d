"""Clients of Redis: how a lost connection is renewed, what an error says, and which keys a full server evicts."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

REDIS_FAULTS = (redis.exceptions.RedisError, OSError, TimeoutError)
RENEWALS = 2
"""How often a command whose connection breaks is sent again, over a new one. So all commands may be sent twice."""
RENEWED_AFTER = (redis.exceptions.ConnectionError, redis.exceptions.ReadOnlyError)
"""READONLY: the server was the primary when the connection was made. A new connection reaches the present one."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Keeps an idle connection alive in load balancers, which drop one after 60 to 350 s, and ends one whose peer is gone.
Beside a retry, redis-py's own health check recurses without end where the server wants a password and none is given.
"""

STATES_FIRST = frozenset({"volatile-ttl", "noeviction"})
"""The maxmemory-policies that evict no session before a saved state, which expires earlier."""


def connect(url: str, budget_s: float) -> redis.asyncio.Redis:
    """A client of the server at `url`. It connects at its first command, within `budget_s`."""
    options: dict[str, Any] = {}
    if not url.startswith("unix:"):
        numbers = {getattr(socket, name): value for name, value in KEEPALIVE.items() if hasattr(socket, name)}
        options |= {"socket_keepalive": True, "socket_keepalive_options": numbers}
    return redis.asyncio.Redis.from_url(
        url,
        socket_connect_timeout=budget_s,
        retry=Retry(ExponentialBackoff(cap=budget_s / 10, base=budget_s / 100), RENEWALS),
        retry_on_error=list(RENEWED_AFTER),
        **options,
    )


async def drop_idle(client: redis.asyncio.Redis) -> None:
    """Close the connections that no call uses, so that the next call makes a new one."""
    await client.connection_pool.disconnect(inuse_connections=False)


def answers(error: BaseException) -> bool:
    """True if a fault is the server's own answer to a command, so that other commands may succeed."""
    return isinstance(error, redis.exceptions.ResponseError)


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


async def eviction_warning(client: redis.asyncio.Redis) -> str:
    """What a full server would evict that it should not; empty where it would not, or where CONFIG is not allowed.
    Raises one of REDIS_FAULTS where the server does not answer."""
    try:
        found = await client.config_get("maxmemory-policy")
    except redis.exceptions.ResponseError:  # managed servers forbid it
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
