"""Addresses of Redis: what makes one unreadable. Says nothing of a server at it."""

from __future__ import annotations

from urllib.parse import urlsplit

ESCAPES = "in a password, write characters such as / ? # @ as %2F %3F %23 %40"


def unreadable(url: str) -> str:
    """Why the client cannot read a `redis://`, `rediss://` or `unix://` address; empty where it can. Without any part
    of the address that may be one of its password: where that has a `/`, urllib takes its beginning for the port."""
    from redis.asyncio import ConnectionPool  # here, as every command reads a configuration and most have no address

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
