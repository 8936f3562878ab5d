"""Who may use the HTTP API, over real sockets: keys, TLS, foreign pages, and clients that send slowly."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl

import aiohttp
import pytest

from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.api.openai import server as http_server
from cluster.router.allowance import KeyLimits
from tests.support.certificates import Authority
from tests.support.http_api import HELLO, http_at, post, raw

CHAT = {"model": "demo", "messages": HELLO, "max_tokens": 2}


def head(*lines):
    return "\r\n".join(("GET /v1/models HTTP/1.1", *lines, "", "")).encode()


FOREIGN_HOSTS = (
    *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:80", "localhost@evil"),
    *("[::1]evil.example", "localhost:80@evil.example", "[", ""),
)
FOREIGN_ORIGINS = (
    *("http://evil.example", "null", "http://127.0.0.1:1.evil.example", "http://127.0.0.1:1", ""),
    *("http://[", "http://]", "http://[::1"),
)


async def status_of(server, *lines):
    return (await raw(server, head(*lines), more=True))[0]


@pytest.mark.parametrize("sections", [{}, {"grpc": {"host": "0.0.0.0"}, "auth": "none"}], ids=["default", "open gRPC"])
async def test_a_web_page_of_another_site_cannot_use_a_server_on_the_loopback(sections):
    async with http_at(**sections) as (server, _):
        port = server.address.rpartition(":")[2]
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "LOCALHOST"):
            assert await status_of(server, f"Host: {host}") == 200
            assert await status_of(server, f"Host: {host}", f"Origin: http://{host}") == 200
        for host in FOREIGN_HOSTS:
            assert await status_of(server, f"Host: {host}") == 403
        for origin in FOREIGN_ORIGINS:
            assert await status_of(server, f"Host: 127.0.0.1:{port}", f"Origin: {origin}") == 403


NO_REQUESTS = {
    "long header": (head("Host: 127.0.0.1", "X: " + "a" * 30_000), "buffer"),
    "two hosts": (head("Host: 127.0.0.1", "Host: 127.0.0.1"), "Host"),
    "two lengths": (head("Host: 127.0.0.1", "Content-Length: 1", "Content-Length: 2"), "Content-Length"),
    "path beyond ASCII": ("GET /caf\u00e9 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode(), "request line"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "request line"),
}


@pytest.mark.parametrize(("data", "reason"), NO_REQUESTS.values(), ids=NO_REQUESTS)
async def test_what_is_no_request_of_http_gets_an_error_in_json_with_the_reason(data, reason):
    async with http_at() as (server, _):
        status, headers, body = await raw(server, data, more=True)
    error = json.loads(body)["error"]
    assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
    assert (error["type"], error["code"]) == ("invalid_request_error", "BadRequest") and reason in error["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_a_call_of_http_1_0_which_names_no_host_comes_from_no_browser_and_is_served(path):
    """Every browser sends a Host; health checks of HTTP/1.0 do not."""
    async with http_at() as (server, _):
        for lines, expected in ((), 200), (("Origin: http://127.0.0.1",), 403):
            asked = "\r\n".join((f"GET {path} HTTP/1.0", *lines, "", "")).encode()
            assert (await raw(server, asked, more=True))[0] == expected


async def test_with_keys_any_host_is_served_and_pages_of_other_sites_are_not(tmp_path):
    text, key = new_key("alice", "alice", KeyLimits())
    write_keys(tmp_path / "keys.json", ApiKeys(keys=(key,)))
    async with http_at(auth={"keys": tmp_path / "keys.json"}) as (server, _):
        known = f"Authorization: Bearer {text}"
        assert await status_of(server, "Host: api.example", known) == 200
        assert await status_of(server, "Host: api.example") == 401
        assert await status_of(server, "Host: api.example", known, "Origin: https://evil.example") == 403


async def test_a_keys_limit_of_tokens_names_a_field_of_http_where_no_length_is_given(tmp_path):
    text, key = new_key("alice", "alice", KeyLimits(tokens_per_minute=5))
    write_keys(tmp_path / "keys.json", ApiKeys(keys=(key,)))
    async with http_at(auth={"keys": tmp_path / "keys.json"}) as (server, _):
        named = {"authorization": f"Bearer {text}"}
        status, _, answer = await post(server, "/v1/completions", {"prompt": "abc", "n": 3}, **named)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert answer["error"]["message"] == (
        "max_tokens: makes 6 tokens with the prompt; this key's limit `tokens_per_minute` is 5 at this router"
    )


async def test_without_keys_any_host_is_served_where_other_machines_reach_the_server():
    async with http_at(http={"host": "0.0.0.0"}, auth="none") as (server, _):
        assert await status_of(server, "Host: api.example") == 200
        assert await status_of(server, "Host: api.example", "Origin: https://evil.example") == 403


async def test_http_is_served_over_tls_alone_with_the_certificate_of_now(tmp_path):
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    files = old.issue("front", "127.0.0.1")

    async def answers(authority):
        context = ssl.create_default_context(cafile=str(authority.path))
        async with aiohttp.ClientSession() as session:
            try:
                url = f"https://{server.address}/v1/chat/completions"
                async with session.post(url, json=CHAT, ssl=context) as answer:
                    return answer.status == 200 and bool((await answer.json())["choices"])
            except aiohttp.ClientConnectorCertificateError:
                return False

    async with http_at(tls={"clients": files}) as (server, _):
        assert await answers(old) and not await answers(new)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await raw(server, head("Host: 127.0.0.1"), more=True)
        fresh = new.issue("fresh", "127.0.0.1")
        for part in ("certificate", "key"):
            shutil.copy(fresh[part], files[part])
        assert await answers(new) and not await answers(old)


@pytest.mark.parametrize("first", [b"", b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"], ids=["new", "kept"])
async def test_a_connection_whose_headers_come_too_slowly_is_ended(monkeypatch, first):
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.3)
    async with http_at() as (server, _):
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(first)

        async def trickle():
            writer.write(b"GET /v1/models HTTP/1.1\r\n")
            while True:
                writer.write(b"X: y\r\n")
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(trickle())
        async with asyncio.timeout(20):
            try:
                answer = await reader.read(-1)
            except ConnectionError:
                answer = b""
        assert answer.count(b"HTTP/1.1") <= bool(first) and server.connections == 0
        sending.cancel()
        writer.close()
