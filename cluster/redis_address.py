"""Addresses of Redis: what makes one unreadable. Says nothing of a server at it."""

from __future__ import annotations

from urllib.parse import urlsplit


def unreadable(url: str) -> str:
    """Why the client cannot read a `redis://`, `rediss://` or `unix://` address; empty where it can. Without the
    address itself, which may have a password."""
    from redis.asyncio import ConnectionPool  # here, as every command reads a configuration and most have no address

    try:
        parts = urlsplit(url)
        if parts.port == 0:
            return "the port is 0"
        ConnectionPool.from_url(url).make_connection()  # reads the options; connects to nothing
    except (ValueError, TypeError) as error:
        return str(error).rpartition("__init__() ")[2]
    if parts.scheme == "unix":
        return "" if parts.path else "has no path of a socket"
    database = parts.path.strip("/")
    return f"the database {database!r} is not a number" if database and not database.isdigit() else ""
