"""Redis over TLS with a user and a password: a real server, behind a socket that ends TLS."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import redis
from dendro.certificates import CertificateFiles
from dendro.errors import BadRequest, PeerLost

from cluster.config import Config
from cluster.redis_server import RedisServer
from cluster.sessions import RedisSessions
from tests.support.certificates import Authority

TARGETS = {"demo": {"checkpoint": "x"}}


@contextlib.asynccontextmanager
async def ending_tls(files, path):
    """A port that passes bytes on to a UNIX socket. Yields its number."""

    async def pump(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader, writer):
        inner_reader, inner_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=files.ssl_context())
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def kept(config, **environment):
    """Whether a session's secret is kept at a configuration's Redis."""
    sessions = RedisSessions(config.redis.address(environment), 60)
    try:
        return bool(await sessions.new_token("t"))
    except PeerLost:
        return False
    finally:
        await sessions.close()


async def test_a_server_of_the_authority_is_used_with_user_and_password_and_no_other_server(tmp_path):
    own, other = Authority(tmp_path, "own"), Authority(tmp_path, "other")
    pair = own.issue("redis", "127.0.0.1")
    files = CertificateFiles("redis", pair["certificate"], pair["key"])
    with RedisServer(memory_mb=16) as server:
        admin = redis.Redis.from_url(server.url)
        admin.acl_setuser("dendro", enabled=True, passwords=["+a/b?c"], commands=["+@all"], keys=["dendro:*"])
        admin.acl_setuser("default", enabled=False)
        async with ending_tls(files, server.url.removeprefix("unix://")) as port:

            def config(**fields):
                section = {"url": f"rediss://127.0.0.1:{port}", "authority": own.path.name, **fields}
                return Config.of({"targets": TARGETS, "redis": section}, tmp_path)

            user = {"user": "dendro", "password_variable": "SECRET"}
            assert await kept(config(**user), SECRET="a/b?c")
            assert not await kept(config(**user), SECRET="wrong")
            assert not await kept(config())
            assert not await kept(config(**user, authority=other.path.name), SECRET="a/b?c")


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"url": "redis://h:1", "user": "u"}, "redis.user"),
        ({"url": "redis://h:1", "authority": "ca.crt"}, "redis.authority"),
    ],
)
def test_what_does_not_fit_the_url_is_refused_by_its_field(section, field, tmp_path):
    with pytest.raises(BadRequest, match=f"^{field}: "):
        Config.of({"targets": TARGETS, "redis": section}, tmp_path)
