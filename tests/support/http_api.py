"""A router's HTTP server around the fakes, and OpenAI's own clients of it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from cluster.api.callers import Callers
from cluster.api.openai.server import HttpServer, serve_http
from cluster.api.requests import RunningRequests
from tests.support.edge import EdgePeers, ingress

HELLO = [{"role": "user", "content": "hello"}]
HELLO_TEXT = "[user]hello<end>[assistant]"
"""What the fake tokenizer's template writes."""


@asynccontextmanager
async def http_at(
    peers: EdgePeers | None = None, *, served_ingress: Any = None, callers: Callers | None = None, **sections: Any
) -> AsyncIterator[tuple[HttpServer, RunningRequests]]:
    """Yields the server, and the requests of its router. `sections` are of the configuration."""
    made = served_ingress or ingress(peers or EdgePeers(), **sections)
    requests = RunningRequests(made.config.router.max_requests, made.turns.writing)
    server = await serve_http(made, requests, callers or Callers(made.config))
    try:
        yield server, requests
    finally:
        await server.stop()


def accepted_by_loop(patch: pytest.MonkeyPatch) -> list[socket.socket]:
    """The connections that the running loop accepts from now on."""
    loop = asyncio.get_running_loop()
    accept, accepted = loop.sock_accept, list[socket.socket]()

    async def noted(listening: socket.socket) -> tuple[socket.socket, Any]:
        connection, address = await accept(listening)
        accepted.append(connection)
        return connection, address

    patch.setattr(loop, "sock_accept", noted)
    return accepted


@asynccontextmanager
async def client_of(server: HttpServer, **options: Any) -> AsyncIterator[Any]:
    """OpenAI's asyncio client; without retries, which would hide errors."""
    made = openai.AsyncOpenAI(
        base_url=f"http://{server.address}/v1", api_key="none", **{"max_retries": 0, "timeout": 30.0} | options
    )
    async with made as client:
        yield client


async def raw(server: HttpServer, data: bytes, more: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to bytes on a new connection. more: the request is not at its end"""
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        await writer.drain()
        if not more:
            writer.write_eof()
        async with asyncio.timeout(20):
            head, body = await reader.readuntil(b"\r\n\r\n"), b""
            lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            if "content-length" in headers:
                body = await reader.readexactly(int(headers["content-length"]))
        return int(lines[0].split()[1]), headers, body
    finally:
        writer.close()


def request_of(path: str, body: bytes, **headers: str) -> bytes:
    """A request as it is sent."""
    lines = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(body)), **headers}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("latin-1") + b"\r\n" + body


async def post(server: HttpServer, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Send JSON, or bytes as they are. Returns status, headers, and the answer's JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, found, answer = await raw(server, request_of(path, data, **headers), more=True)
    return status, found, json.loads(answer) if answer else None
