"""Addresses of Redis: of one server, of Sentinels that name one, or of a cluster. Says nothing of a server at one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit, urlunsplit

ESCAPES = "in a password, write characters such as / ? # @ as %2F %3F %23 %40"
ONE_SERVER = ("redis", "rediss", "unix")
SENTINEL, CLUSTER = "+sentinel", "+cluster"
SCHEMES = (*ONE_SERVER, *(f"{scheme}{kind}" for kind in (SENTINEL, CLUSTER) for scheme in ("redis", "rediss")))
SENTINEL_PORT, REDIS_PORT = 26379, 6379
SENTINEL_PASSWORD = "sentinel_password"
"""The option of a url with the Sentinels' own password."""


@dataclass(frozen=True, slots=True)
class SeveralNodes:
    """An address with several nodes: `redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE`, or
    `redis+cluster://USER:PASSWORD@HOST:PORT,HOST:PORT`; with `rediss` over TLS."""

    nodes: tuple[tuple[str, int], ...]
    service: str  # the name that Sentinels have for the primary; empty for a cluster
    options: Mapping[str, Any]  # options of connections to Redis, by the names of redis-py
    tls: bool
    sentinel_password: str = ""

    @classmethod
    def read(cls, url: str) -> Self:
        """Raises ValueError with the reason, without any part of the address that may be one of its password."""
        from redis.asyncio.connection import parse_url  # imported here, as most commands need no address

        try:
            parts = urlsplit(url)
        except ValueError:  # the error's message may have the credentials
            raise ValueError(f"has no host with a port from 1 to 65535; {ESCAPES}") from None
        scheme, _, kind = parts.scheme.partition("+")
        credentials, at, hosts = parts.netloc.rpartition("@")
        nodes = tuple(_node(each, SENTINEL_PORT if kind == "sentinel" else REDIS_PORT) for each in hosts.split(","))
        service, slash, database = parts.path.strip("/").partition("/")
        if kind == "sentinel" and not service:
            raise ValueError("names no service: add a / and the name that the Sentinels have for the primary")
        if kind == "cluster" and service:
            raise ValueError("has a path: a cluster has one database and no services")
        if slash and not database.isdigit():
            raise ValueError("the database is not a number")
        query = parse_qs(parts.query)
        password = query.pop(SENTINEL_PASSWORD, [""])[0]
        rest = "&".join(each for each in parts.query.split("&") if not each.startswith(f"{SENTINEL_PASSWORD}="))
        options = dict(parse_url(urlunsplit((scheme, f"{credentials}{at}host", f"/{database}", rest, ""))))
        for name in ("host", "port", "connection_class"):
            options.pop(name, None)
        return cls(nodes, service, options, scheme == "rediss", password)


def has_several_nodes(url: str) -> bool:
    return url.partition("://")[0].endswith((SENTINEL, CLUSTER))


def _node(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise ValueError(f"has no host with a port from 1 to 65535; {ESCAPES}")
    return host, default_port if port is None else port


def unreadable(url: str) -> str:
    """Why the client cannot read an address; empty where it can. Without any part of the address that may be one of its
    password: where that has a `/`, urllib takes its beginning for the port."""
    from redis.asyncio import ConnectionPool  # imported here, as most commands have no address

    if has_several_nodes(url):
        try:
            SeveralNodes.read(url)
        except ValueError as error:
            return str(error)
        return ""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        return f"has no host with a port from 1 to 65535; {ESCAPES}"
    try:
        ConnectionPool.from_url(url).make_connection()  # reads the options; connects to nothing
    except (ValueError, TypeError) as error:
        return str(error).rpartition("__init__() ")[2]
    if parts.scheme == "unix":
        return "" if parts.path else "has no path of a socket"
    database = parts.path.strip("/")
    return f"the database is not a number; {ESCAPES}" if database and not database.isdigit() else ""
